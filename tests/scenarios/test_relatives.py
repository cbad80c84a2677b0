"""Every relative's rows come to what they name on the CPU, defect and fix apart, and every pair of scenarios is told apart."""

from __future__ import annotations

from itertools import combinations

import pytest

from dsv4_repro.errors import KernelNotFoundError, UnavailableError, UsageError
from dsv4_repro.forensics.records import CLASSES
from dsv4_repro.repro.relative_cpu import judge_row
from dsv4_repro.repro.relative_matrix import matrix_document
from dsv4_repro.repro.relative_run import choose_row
from dsv4_repro.repro.row_tries import Tried
from dsv4_repro.scenarios.launches import DrainBatches, Row
from dsv4_repro.scenarios.registry import Scenario, all_scenarios, scenario

ROWS = [(entry, row) for entry in all_scenarios() for row in entry.variants()]
HERE = [(entry, row) for entry, row in ROWS if "cpu" in row.grounds and "==" not in row.kernel]
SHIPPED = [(entry, row) for entry, row in ROWS if "cpu" in row.grounds and "==" in row.kernel]
#: Pairs that device evidence cannot tell apart, with the reason.
SAME_DEVICE_STATE = {
    frozenset({"drain", "victim"}): "the same defect in the same kernel: what differs is whom the host blames",
    frozenset({"cooperative", "overflow"}): "both can leave indices beyond a row's length: what differs is the kernel's name",
    frozenset({"crossrank", "drain"}): "the held rank's kernel is the drain's: what differs is that another rank waits for it",
    frozenset({"crossrank", "victim"}): "the held rank's kernel is the drain's, and so is the victim's culprit",
}


def ids(pair: tuple[Scenario, Row]) -> str:
    return f"{pair[0].name}-{pair[1].name}"


@pytest.mark.parametrize("pair", HERE, ids=ids)
def test_a_row_comes_to_what_it_names(pair: tuple[Scenario, Row]) -> None:
    _, row = pair
    done = judge_row(row)
    assert done.as_expected, done.document()
    assert done.first.diagnosis.outcome == CLASSES[row.class_][1]


@pytest.mark.release_wheel
@pytest.mark.parametrize("pair", SHIPPED, ids=ids)
def test_a_release_comes_to_what_its_row_names(pair: tuple[Scenario, Row]) -> None:
    try:
        done = judge_row(pair[1])
    except UnavailableError as error:
        pytest.skip(f"needs the package index or a cached release: {error}")
    assert done.as_expected, done.document()


def test_names_of_rows_are_unique_and_words_are_known() -> None:
    for entry in all_scenarios():
        names = [row.name for row in entry.variants()]
        assert len(names) == len(set(names))
        for row in entry.variants():
            assert row.class_ in CLASSES
            assert row.cause is None or row.cause in CLASSES[row.class_][0]
            assert row.text
            assert row.grounds


def test_every_relative_has_defect_and_fix_or_says_what_it_would_take() -> None:
    for entry in all_scenarios():
        if entry.name == "drain":
            continue
        rows = entry.variants()
        if rows:
            assert any(row.fixed for row in rows), entry.name
            assert any(not row.fixed for row in rows), entry.name
        else:
            assert entry.not_reproduced, entry.name
            assert all(what and takes for what, takes in entry.not_reproduced)


def test_every_pair_of_scenarios_is_told_apart_by_device_evidence() -> None:
    """By class and cause that their defect rows must come to (which the rows' own tests hold the classifier to)."""
    runnable = {
        entry.name: {(row.class_, row.cause) for row in entry.variants() if not row.fixed and row.class_ != "unknown"}
        for entry in all_scenarios()
    }
    runnable["drain"] = {("gpu-spin-barrier", "peer-left")}
    named = {name: {key for key in found if key[1] is not None} for name, found in runnable.items()}
    for first, second in combinations(sorted(name for name, found in named.items() if found), 2):
        shared = named[first] & named[second]
        if frozenset({first, second}) in SAME_DEVICE_STATE:
            assert shared
        else:
            assert not shared, (first, second, shared)


def test_the_victim_is_never_named_as_culprit() -> None:
    entry = scenario("victim")
    done = judge_row(choose_row(entry, None, None))
    diagnosis = done.first.diagnosis
    assert all("sparse_mla" not in wait.kernel for wait in diagnosis.waits)
    assert diagnosis.waits
    assert diagnosis.verdict.signature == "vllm-51593"
    host = next(link for link in diagnosis.chain if link.link == "host")
    assert "sparse_mla" in host.text


def test_the_held_rank_is_named_and_never_the_spinning_one() -> None:
    entry = scenario("crossrank")
    diagnosis = judge_row(choose_row(entry, "held-by-a-barrier", None)).first.diagnosis
    assert diagnosis.verdict.sentence.startswith("device 0: ")
    assert "cross_rank" not in diagnosis.verdict.sentence
    assert diagnosis.verdict.signature == "vllm-51593"
    assert {wait.device for wait in diagnosis.waits} == {0, 1}
    notes = diagnosis.document()["notes"]
    assert any("not the culprit" in note for note in notes)
    alone = judge_row(choose_row(entry, "only-the-spinning-rank-read", None)).first.diagnosis
    assert (alone.verdict.cause, alone.document()["ranks_not_read"]) == (None, [0])
    behind = judge_row(choose_row(entry, "peer-has-not-come", None)).first.diagnosis
    assert "device 0 was read and has no resident block" in behind.verdict.sentence


def test_the_drafts_rows_cover_every_path_of_the_producer() -> None:
    """Native, uniform and variable, each raw and clamped; negative lengths are native and raw alone; each has a padded step."""
    seen: dict[tuple[str, str], int] = {}
    for row in scenario("dspark").variants():
        assert isinstance(row.what, DrainBatches)
        detail = judge_row(row).first.detail
        assert detail["padded_steps"] > 0, row.name
        for path in detail["paths"]:
            key = (path, row.what.producer)
            seen[key] = seen.get(key, 0) + detail["negative"]
    assert set(seen) == {(path, producer) for path in ("native", "uniform", "variable") for producer in ("raw", "clamped")}
    assert {key for key, negative in seen.items() if negative} == {("native", "raw")}


def test_choosing_a_row() -> None:
    entry = scenario("init-race")
    assert choose_row(entry, None, None).name == "zeroed-in-kernel"
    assert choose_row(entry, "zeroed-by-host", None).fixed
    assert choose_row(entry, None, "builtin:guard").kernel == "builtin:guard"
    with pytest.raises(UsageError, match="there are: zeroed-in-kernel"):
        choose_row(entry, "nobody", None)
    with pytest.raises(UsageError, match="runs on the cpu ground only"):
        choose_row(scenario("reset-race"), "flashinfer-before", None, "gpu")
    with pytest.raises(UsageError, match="none is reproduced here") as told:
        choose_row(scenario("others-51538"), None, None)
    assert "would take" in str(told.value.help_text)
    with pytest.raises(UsageError, match="launches no kernel"):
        choose_row(scenario("dspark"), None, "builtin")


def test_a_row_with_the_other_code_is_not_as_expected() -> None:
    """The matrix can fail: the defect's row with the fixed kernel, and a kernel that does not exist."""
    entry = scenario("histogram-ring")
    done = judge_row(choose_row(entry, "ring-counts-rows", "builtin:guard"))
    assert not done.as_expected
    document = matrix_document(entry, [done], [])
    assert document["outcome"] == "other"
    with pytest.raises(KernelNotFoundError):
        judge_row(choose_row(entry, None, "builtin:nobody"))


def test_counts_are_of_all_orders_of_execution() -> None:
    row = choose_row(scenario("init-race"), "zeroed-in-kernel-two", None)
    done: Tried = judge_row(row, count_all=True)
    assert done.launches == 24
    assert 0 < done.counts["gpu-spin-barrier", "init-race"] < 24
    assert done.counts["not-hung", None] + done.counts["gpu-spin-barrier", "init-race"] == 24
