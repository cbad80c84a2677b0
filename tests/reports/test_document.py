"""The report says what the diagnosis says, and never more."""

from __future__ import annotations

from typing import Any

import pytest
from markdown_it import MarkdownIt

from dsv4_repro.forensics.records import ChainLink, Diagnosis, Evidence, LedgerGroup, UnreadItem, Verdict, Wait, Window
from dsv4_repro.reports.document import (
    FixText,
    ReportSource,
    equation,
    hardware_sentence,
    inferred_lines,
    ledger_rows,
    markdown_report,
    verdict_words,
)
from dsv4_repro.reports.svg_grid import grid_picture

RUN: dict[str, Any] = {
    "environment": {"device": "NVIDIA H200", "sm": 90, "driver": "580.159.04"},
    "kernel": {"origin": "builtin", "function": "_Zk", "sha256": "00" * 32, "sm": 90},
    "command": ["dsv4-repro", "run", "drain", "--out", "a b"],
    "versions": {"dsv4-repro": "0.1.0"},
}


def _wait(**more: Any) -> Wait:
    values: dict[str, Any] = {
        "kernel": "_Zk", "grid": (16, 1, 1), "block": (12, 0, 0), "warp": 0, "pc_offset": 0x1CE0, "address": "0x7f00", "value": 1,
        "target": 2, "comparison": ">=", "state_field": "arrival_counter", "group": 6, "role": "leader",
        "instructions": ((0x1CD0, "LDG.E.STRONG.GPU R4, [R4]"),),
    }  # fmt: skip
    return Wait(**{**values, **more})


def _hang(**more: Any) -> Diagnosis:
    values: dict[str, Any] = {
        "outcome": "hang",
        "ground": "gpu",
        "verdict": Verdict.model_validate(
            {
                "class": "gpu-spin-barrier",
                "cause": "peer-left",
                "confidence": "high",
                "signature": "vllm-51593",
                "sentence": "peer left",
            }
        ),
        "waits": (_wait(),),
        "ledger": (LedgerGroup(group=6, spinning=(12,), exited=(13,), inferred="exited blocks leave no trace"),),
        "chain": (ChainLink(link="drain", status="computed", text="three live", evidence=("E1",)),),
        "evidence": (Evidence(id="E1", kind="core dump", path="evidence/hang-1/x.nvcudmp", sha256="ab" * 32),),
        "window": Window(live_requests=3, rows=6, graph_rows=8, padded_requests=1, reached=True),
    }
    return Diagnosis(**{**values, **more})


def _text(diagnosis: Diagnosis, run: dict[str, Any] | None = None, **more: Any) -> str:
    return "\n".join(
        markdown_report(ReportSource(diagnosis=diagnosis, run=RUN if run is None else run, title="T", version="0.1.0", **more))
    )


def test_a_hang_report_has_the_equation_beside_its_instructions_and_the_ledger() -> None:
    text = _text(_hang(), fixes=[FixText("producer", "clamp at 0", "vLLM #51538", "--producer clamped")])
    assert "`arrival_counter = 1, waits until it is >= 2`" in text
    assert "```asm\n+0x1cd0  LDG.E.STRONG.GPU R4, [R4]\n```" in text
    assert "| 6 | - | 12 | 13 | - | - |" in text.replace("\\-", "-")
    assert "Inferred: group 6: exited blocks leave no trace" in text
    assert "| drain | computed | three live | E1 |" in text
    assert "- producer: clamp at 0. vLLM #51538. Here: `--producer clamped`" in text
    assert "dsv4-repro run drain --out 'a b'" in text


def test_the_report_has_its_parts_in_the_order_a_reader_needs() -> None:
    headings = [line for line in _text(_hang()).splitlines() if line.startswith("#")]
    assert headings == ["# T", "## What waits", "## Who arrived", "## The chain", "## Reproduce", "## What could not be read"]


def test_what_is_not_known_is_said_and_nothing_is_made_up() -> None:
    bare = _wait(
        value=None, target=None, comparison=None, state_field=None, address=None, pc_offset=None, instructions=(), warp=None
    )
    text = _text(_hang(waits=(bare,), ledger=(), chain=(), evidence=()), run={})
    assert "the polled word = not read, the target is not known" in text
    assert "not known" in text
    assert "```asm" not in text
    assert "Who arrived" not in text


def test_what_could_not_be_read_is_listed_with_its_remedy_and_an_empty_list_says_so() -> None:
    item = UnreadItem(what="cuda-gdb", why="not found", remedy="install the toolkit")
    assert "| cuda-gdb | not found | install the toolkit |" in _text(_hang(unread=(item,)))
    assert "Nothing that was looked for is missing." in _text(_hang())


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        ({"attempted": True, "retired": True, "milliseconds": 0.731, "address": "0x7f", "why_not": ""}, "retired 0.73 ms later"),
        ({"attempted": True, "retired": True, "milliseconds": None, "address": None, "why_not": ""}, "and the kernel retired"),
        (
            {"attempted": True, "retired": False, "milliseconds": None, "address": "0x7f", "why_not": "still polling"},
            "did not retire",
        ),
    ],
)
def test_the_experiment_is_told_as_it_went(experiment: dict[str, Any], words: str) -> None:
    assert words in _text(_hang(unwedge=experiment))


def test_an_experiment_that_was_not_made_is_not_told() -> None:
    assert "experiment" not in _text(_hang(unwedge={"attempted": False, "retired": False, "why_not": "no address"}))


def test_trials_and_the_bound_that_follows() -> None:
    bound = {"side": "at least", "value": 0.98513, "confidence": 0.95, "of": "hang per danger window reached"}
    text = _text(_hang(trials={"asked": 200, "hang": 200, "clean": 0, "bounds": [bound]}))
    assert "200 trials: 200 hung." in text
    assert "at least 0.9851 at 95% confidence" in text


@pytest.mark.parametrize(
    ("ground", "environment", "sm", "words"),
    [
        ("gpu", {"device": "NVIDIA H200", "sm": 90}, 90, "the published case is of SM120 cards, and this run used none"),
        ("gpu", {"device": "RTX PRO 6000", "sm": 120}, 120, "Run on RTX PRO 6000 (sm_120)."),
        ("cpu", {}, 120, "It was not run on that hardware"),
        ("gpu", {}, None, "an unknown architecture"),
    ],
)
def test_the_hardware_is_named_honestly(ground: str, environment: dict[str, Any], sm: int | None, words: str) -> None:
    diagnosis = _hang(ground=ground)
    source = ReportSource(diagnosis=diagnosis, run={"environment": environment, "kernel": {"sm": sm}})
    assert words in hardware_sentence(source)


def test_a_loose_file_claims_no_hardware() -> None:
    assert "comes from files" in hardware_sentence(ReportSource(diagnosis=_hang(ground="file")))


def test_hostile_text_everywhere_stays_text() -> None:
    evil = "<script>x</script> `a` | b ](http://evil) @team\n# h"
    verdict = Verdict.model_validate(
        {"class": "gpu-spin-barrier", "cause": "peer-left", "sentence": evil, "identity": evil, "signature": evil}
    )
    diagnosis = _hang(
        verdict=verdict,
        waits=(_wait(kernel=evil, address=evil, instructions=((0, "```\n" + evil),)),),
        ledger=(LedgerGroup(group=1, spinning=(1,), inferred=evil),),
        chain=(ChainLink(link=evil, status="inferred", text=evil, evidence=("E1",)),),
        evidence=(Evidence(id="E1", kind=evil, path=evil, sha256=evil),),
        unread=(UnreadItem(what=evil, why=evil, remedy=evil),),
        next="echo\n```\n" + evil,
    )
    run = {**RUN, "environment": {evil: evil}, "command": ["dsv4-repro", "`x`\n```\n" + evil]}
    text = _text(diagnosis, run, fixes=[FixText(evil, evil, evil, evil)])
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    html = [token.content.strip() for token in tokens if token.type == "html_block"]
    assert html == [
        "<details><summary>Environment</summary>", "</details>", "<details><summary>Evidence</summary>", "</details>",
    ]  # fmt: skip
    inline = [child.type for token in tokens if token.type == "inline" for child in token.children or []]
    assert not {"html_inline", "link_open", "image"} & set(inline)
    assert [token.markup for token in tokens if token.type == "heading_open"].count("#") == 1
    assert "@team" not in "".join(child.content for token in tokens for child in token.children or [] if child.type == "text")


def test_a_report_fits_an_issue_however_many_waits() -> None:
    many = tuple(_wait(block=(number, 0, 0), instructions=((0, "x" * 5000),)) for number in range(500))
    groups = tuple(LedgerGroup(group=number, exited=tuple(range(1000))) for number in range(500))
    text = _text(_hang(waits=many, ledger=groups))
    assert len(text) < 65536
    assert "492 more waiting blocks" in text


def test_spinning_groups_come_first() -> None:
    rows = ledger_rows([LedgerGroup(group=0, exited=(0,)), LedgerGroup(group=6, spinning=(12,))])
    assert [entry[0] for entry in rows] == ["6", "0"]


def test_words() -> None:
    assert verdict_words(_hang()) == "gpu-spin-barrier / peer-left, high confidence"
    assert equation(_wait()) == "arrival_counter = 1, waits until it is >= 2"


def test_a_clean_report_names_no_culprit() -> None:
    verdict = Verdict.model_validate({"class": "not-hung", "confidence": "high", "sentence": "all 60 steps completed"})
    text = _text(
        Diagnosis(
            outcome="clean",
            ground="gpu",
            verdict=verdict,
            window=Window(live_requests=3, rows=6, graph_rows=8, padded_requests=1, reached=True),
        )
    )
    assert "What waits" not in text
    assert "3 live requests, 6 rows padded to 8 (1 padded request), reached." in text


def test_an_inference_names_its_groups_and_is_said_once_for_all_of_them() -> None:
    ledger = (
        LedgerGroup(group=7, exited=(14,), inferred="exited: a later block is resident"),
        LedgerGroup(group=5, exited=(10,), inferred="exited: a later block is resident"),
        LedgerGroup(group=6, spinning=(12,), inferred="exited: the counter says so"),
        LedgerGroup(group=0, running=(0,)),
    )
    lines = ["groups 5, 7: exited: a later block is resident", "group 6: exited: the counter says so"]
    assert inferred_lines(ledger) == lines
    picture = grid_picture(_hang(ledger=ledger))
    assert picture is not None
    assert picture.inferred == tuple(lines)
    many = inferred_lines([LedgerGroup(group=number, inferred="x") for number in range(100_000)])
    assert len(many) == 1
    assert many[0].endswith("… (100000): x")


@pytest.mark.parametrize(("padded", "words"), [(0, "0 padded requests"), (1, "1 padded request)"), (2, "2 padded requests")])
def test_padded_requests_are_counted_in_words_that_fit(padded: int, words: str) -> None:
    window = Window(live_requests=3, rows=6, graph_rows=8, padded_requests=padded, reached=True)
    assert words in _text(_hang(window=window))


@pytest.mark.parametrize("signature", ["vllm-51593", None])
def test_watching_again_reproduces_nothing(signature: str | None) -> None:
    hang = _hang()
    verdict = hang.verdict.model_copy(update={"signature": signature})
    text = _text(hang.model_copy(update={"verdict": verdict}), {**RUN, "command": ["dsv4-repro", "watch", "--pid", "5"]})
    assert ("dsv4-repro run drain    # the same wait, provoked" in text) == (signature is not None)
    assert "dsv4-repro watch --pid 5" in text
