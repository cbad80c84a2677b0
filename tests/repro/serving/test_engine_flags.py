"""Flags of ``vllm serve``: which word wins, and what they say about the batch."""

from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_repro.errors import PlanError, UsageError
from dsv4_repro.repro.serving.engine_flags import EngineFlags, facts_of, parse_flags, plan_with
from dsv4_repro.scenarios.drain import DrainPlan


def _flags(text: str) -> EngineFlags:
    return parse_flags(shlex.split(text))


def test_the_last_of_a_name_wins_in_every_spelling() -> None:
    base = _flags("--max-num-seqs 16 --enable-prefix-caching --block-size=256 -tp 1")
    over = _flags("--max_num_seqs=8 --no-enable-prefix-caching --tensor-parallel-size 4 --trust-remote-code")
    assert over.over(base).words() == (
        "--max_num_seqs=8", "--no-enable-prefix-caching", "--block-size=256", "--tensor-parallel-size", "4", "--trust-remote-code",
    )  # fmt: skip
    assert over.over(base).switch("enable-prefix-caching") is False
    assert over.over(base).switch("trust-remote-code") is True
    assert base.switch("enforce-eager") is None


def test_values_that_start_with_a_dash_are_numbers() -> None:
    assert _flags("--max-model-len -1 --seed -3.5e2").values("seed") == ("-3.5e2",)


def test_several_values_and_dotted_names() -> None:
    flags = _flags("--cudagraph-capture-sizes 1 2 4 -O.level 3 -cc.mode=0 -O3")
    assert flags.values("cudagraph-capture-sizes") == ("1", "2", "4")
    assert [name for name, _ in flags.items] == ["cudagraph-capture-sizes", "O.level", "compilation-config.mode", "O"]


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("model", "belongs to no flag"),
        ("--block-size=1 model", "belongs to no flag"),
        ("--uds /tmp/x", "--uds cannot be used"),
        ("--ssl-keyfile=k", "--ssl-keyfile cannot"),
    ],
)
def test_words_that_cannot_be_served_are_refused(text: str, piece: str) -> None:
    with pytest.raises(UsageError, match=piece):
        _flags(text)


def test_hostile_words_are_refused() -> None:
    for words in (["--a"] * 513, ["--a", "x" * 70_000], ["--a\0b"]):
        with pytest.raises(UsageError):
            parse_flags(words)


@given(st.lists(st.text(max_size=12), max_size=12))
def test_any_words_are_flags_or_a_usage_error(words: list[str]) -> None:
    try:
        flags = parse_flags(words)
    except UsageError:
        return
    assert set(flags.words()) <= set(words)
    assert parse_flags(flags.words()).words() == flags.words()


def test_keys_are_not_written_down() -> None:
    shown = _flags("--api-key secret --hf-token=other --port 1").shown()
    assert shown == ("--api-key", "<left out>", "--hf-token", "<left out>", "--port", "1")


def test_facts_and_the_plan_as_it_will_run() -> None:
    compilation = json.dumps({"cudagraph_capture_sizes": [4, 8], "cudagraph_mode": "FULL_DECODE_ONLY"})
    words = ["--max-num-seqs", "8", "--max-model-len", "16k", "--compilation-config", compilation, "--served-model-name", "a", "b"]
    flags = parse_flags([*words, "--speculative-config", '{"method":"mtp","num_speculative_tokens":2}'])
    facts = facts_of(flags)
    assert (facts.max_num_seqs, facts.max_model_len, facts.mtp, facts.method, facts.capture_sizes) == (8, 16000, 2, "mtp", (4, 8))
    assert facts.served_name == "a"
    assert facts.full_graphs
    plan = plan_with(DrainPlan(requests=4), facts)
    assert (plan.max_num_seqs, plan.max_model_len, plan.mtp, plan.capture_sizes) == (8, 16000, 2, (4, 8))
    with pytest.raises(PlanError, match="min_live"):
        plan_with(DrainPlan(min_live=9), facts)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("--enforce-eager", "--enforce-eager"),
        ("""--compilation-config '{"cudagraph_mode":"PIECEWISE"}'""", "cudagraph_mode PIECEWISE"),
    ],
)
def test_without_full_graphs_nothing_is_padded(text: str, why: str) -> None:
    facts = facts_of(_flags(text))
    assert not facts.full_graphs
    assert why in facts.why_not_full


def test_no_speculation_is_plain_decode() -> None:
    assert plan_with(DrainPlan(), facts_of(_flags("--max-num-seqs 16"))).mtp == 0


@pytest.mark.parametrize("text", ["--max-num-seqs many", "--speculative-config [1]", "--compilation-config {", "--port x"])
def test_values_that_are_none_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError, match="after --"):
        facts_of(_flags(text))
