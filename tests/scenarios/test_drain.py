from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.errors import PlanError
from dsv4_repro.kernels.plan import device_named, plan_launch
from dsv4_repro.repro.campaign.plan import HuntPlan
from dsv4_repro.repro.serving.load_plan import LOAD_SCHEMA, LoadPlan
from dsv4_repro.scenarios.drain import MAX_PLAN_BYTES, DrainPlan, load_plan, schema
from dsv4_repro.scenarios.drain_steps import decode_steps, plan_requests, schedule_line


def test_the_defaults_are_the_published_ones() -> None:
    plan = DrainPlan()
    assert (plan.requests, plan.min_live, plan.mtp, plan.max_num_seqs, plan.max_model_len, plan.compress, plan.steps) == (
        16,
        3,
        1,
        16,
        65536,
        4,
        60,
    )
    assert (plan.next_n, plan.width, plan.top_k, plan.dp, plan.capture_sizes) == (2, 16384, 512, 1, None)
    assert (plan.layers_on("cpu"), plan.layers_on("gpu")) == (2, 21)
    assert plan.replace(layers=5).layers_on("gpu") == 5
    assert plan.graph_sizes == (2, 4, 8, 16, 24, 32)


@pytest.mark.parametrize("seed", range(25))
def test_the_default_drain_reaches_three_live_below_2048_tokens(seed: int) -> None:
    steps = decode_steps(DrainPlan(seed=seed))
    live = [step.live_requests for step in steps]
    assert live[0] == 16
    assert live == sorted(live, reverse=True)
    assert live[-1] == 3
    assert live.count(3) >= 5
    assert len(steps) == 60
    assert max(max(step.seq_lens) for step in steps) < 2048


def test_the_step_with_three_live_is_the_one_of_the_report() -> None:
    step = next(step for step in decode_steps(DrainPlan()) if step.live_requests == 3)
    assert (step.rows, step.graph_rows, step.padded_requests, step.next_n) == (6, 8, 1, 2)
    assert step.query_start_loc == (0, 2, 4, 6, 6)
    assert step.decode_lens == (2, 2, 2, 0)
    assert step.seq_lens[3] == 0
    assert step.expanded[6:] == (-1, 0)
    assert step.expanded[:6] == tuple(length + less for length in step.seq_lens[:3] for less in (-1, 0))
    assert step.lengths[6:] == (-1, 0)
    assert step.lengths[:6] == tuple(length // 4 for length in step.expanded[:6])
    assert step.danger
    assert not step.eager
    assert step.path == "native"
    launch = plan_launch(step.graph_rows, DrainPlan().width, DrainPlan().width, 512, device_named("RTX PRO 6000 Blackwell"))
    assert launch.wedges_on_negative_length
    assert launch.leader_block(step.lengths.index(-1)) == 12


def test_a_clamped_producer_changes_nothing_but_the_negative_lengths() -> None:
    plan = DrainPlan()
    for raw, clamped in zip(decode_steps(plan), decode_steps(plan, "clamped"), strict=True):
        assert clamped.lengths == tuple(max(length, 0) for length in raw.lengths)
        assert (clamped.seq_lens, clamped.rows, clamped.graph_rows, clamped.finished) == (
            raw.seq_lens,
            raw.rows,
            raw.graph_rows,
            raw.finished,
        )
        assert not clamped.danger


def test_with_a_floor_of_four_the_window_of_three_is_never_reached() -> None:
    steps = decode_steps(DrainPlan(min_live=4))
    assert min(step.live_requests for step in steps) == 4
    assert not any(step.danger for step in steps if step.live_requests == 4)


def test_without_speculation_there_is_no_danger() -> None:
    assert not any(step.danger for step in decode_steps(DrainPlan(mtp=0)))


def test_three_query_tokens_take_the_safe_path_except_on_the_sm100_family() -> None:
    plan = DrainPlan(mtp=2, capture_sizes=(6, 12, 24, 48))
    elsewhere = decode_steps(plan, sm=120)
    assert {step.path for step in elsewhere if step.padded_requests} == {"variable"}
    assert {step.path for step in elsewhere if not step.padded_requests} == {"uniform"}
    assert not any(step.danger for step in elsewhere)
    family = decode_steps(plan, sm=100)
    assert {step.path for step in family} == {"native"}
    assert any(step.danger for step in family)
    assert min(min(step.lengths) for step in family) == -1


def test_a_capture_list_with_the_size_in_it_has_no_padding() -> None:
    steps = decode_steps(DrainPlan(capture_sizes=(2, 4, 6, 8, 16)))
    assert not any(step.danger for step in steps if step.live_requests == 3)


def test_eager_steps_are_launched_as_they_are() -> None:
    steps = decode_steps(DrainPlan(capture_sizes=(2, 4)))
    for step in steps:
        if step.rows > 4:
            assert step.eager
            assert (step.graph_rows, step.padded_requests) == (step.rows, 0)


def test_requests_that_leave_are_named_once_and_the_rest_outlast_the_plan() -> None:
    plan = DrainPlan()
    steps = decode_steps(plan)
    gone = [request for step in steps for request in step.finished]
    requests = {request.id: request for request in plan_requests(plan)}
    assert len(gone) == len(set(gone)) == 13
    assert {request.id for request in requests.values() if request.outlasts} == set(requests) - set(gone)
    for before, after in itertools.pairwise(steps):
        assert set(before.requests) - set(after.requests) == set(after.finished)
    for request in requests.values():
        assert plan.prompt[0] <= request.prompt <= plan.prompt[1]
        assert request.output == plan.survivor_output if request.outlasts else plan.output[0] <= request.output <= plan.output[1]


def test_contexts_grow_by_one_to_next_n_tokens_a_step() -> None:
    steps = decode_steps(DrainPlan(mtp=3, acceptance=0.5))
    gains = set()
    for before, after in itertools.pairwise(steps):
        was = dict(zip(before.requests, before.seq_lens, strict=False))
        now = dict(zip(after.requests, after.seq_lens, strict=False))
        gains |= {now[request] - was[request] for request in now}
    assert gains == {1, 2, 3, 4}
    assert {1} == _gains(DrainPlan(acceptance=0.0))
    assert {2} == _gains(DrainPlan(acceptance=1.0))


def _gains(plan: DrainPlan) -> set[int]:
    steps = decode_steps(plan)
    gains: set[int] = set()
    for before, after in itertools.pairwise(steps):
        was = dict(zip(before.requests, before.seq_lens, strict=False))
        gains |= {length - was[request] for request, length in zip(after.requests, after.seq_lens, strict=False)}
    return gains


def test_the_same_seed_gives_the_same_steps_everywhere() -> None:
    """Fixed values: a change of these changes what everybody's recorded runs mean."""
    steps = decode_steps(DrainPlan(seed=7))
    assert schedule_line(steps) == EXPECTED_SCHEDULE
    assert steps[0].seq_lens == EXPECTED_LENGTHS
    other = subprocess.run(
        [
            sys.executable,
            "-c",
            "from dsv4_repro.scenarios.drain import *; from dsv4_repro.scenarios.drain_steps import *; "
            "print(hash(decode_steps(DrainPlan(seed=7))[-1].lengths))",
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "123"},
    )
    assert int(other.stdout) == hash(steps[-1].lengths)
    assert decode_steps(DrainPlan(seed=8)) != steps


EXPECTED_SCHEDULE = "16 x 5, 15 x 5, 14 x 4, 13 x 1, 12 x 1, 11 x 2, 10 x 2, 9 x 4, 8 x 1, 7 x 2, 6 x 1, 5 x 6, 4 x 6, 3 x 20"
EXPECTED_LENGTHS = (384, 949, 1030, 654, 901, 218, 213, 420, 1088, 732, 572, 955, 768, 552, 1249, 1114)


def test_more_requests_than_slots_wait_their_turn() -> None:
    steps = decode_steps(DrainPlan(requests=24, max_num_seqs=8, steps=120))
    live = [step.live_requests for step in steps]
    assert max(live) == 8
    assert live[0] == 8
    assert live[-1] == 3
    assert {request for step in steps for request in step.requests} == set(range(24))


def test_ranks_are_padded_to_the_largest() -> None:
    plan = DrainPlan(dp=2, requests=7, min_live=3)
    first, second = decode_steps(plan, rank=0), decode_steps(plan, rank=1)
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.graph_rows == other.graph_rows
        assert one.total_live == other.total_live == one.live_requests + other.live_requests
    assert first[0].live_requests == 4
    assert second[0].live_requests == 3
    with pytest.raises(PlanError, match="rank = 2"):
        decode_steps(plan, rank=2)


def test_an_idle_rank_has_only_zeros() -> None:
    steps = decode_steps(DrainPlan(dp=2, requests=1, min_live=1), rank=1)
    assert steps[0].live_requests == 0
    assert set(steps[0].lengths) == {0}
    assert not steps[0].danger


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"requests": -1}, "requests = -1"),
        ({"requests": 0}, "requests = 0"),
        ({"requests": 10**9}, "requests = 1000000000"),
        ({"requests": "many"}, "requests = 'many'"),
        ({"requests": 1e300}, "requests"),
        ({"min_live": 0}, "min_live = 0"),
        ({"min_live": 17}, "min_live 17 > requests 16"),
        ({"requests": 64, "min_live": 20}, "min_live 20 > max_num_seqs 16"),
        ({"prompt": (5, 2)}, "prompt"),
        ({"prompt": 0}, "prompt"),
        ({"prompt": -5}, "prompt"),
        ({"prompt": "1:2:3"}, "prompt"),
        ({"prompt": "a"}, "prompt = 'a'"),
        ({"prompt": 2**31}, "prompt"),
        ({"prompt": 70_000}, "max_model_len 65536 <"),
        ({"output": (0, 5)}, "output"),
        ({"mtp": -1}, "mtp = -1"),
        ({"mtp": 99}, "mtp = 99"),
        ({"acceptance": 1.5}, "acceptance = 1.5"),
        ({"acceptance": float("nan")}, "acceptance = nan"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"capture_sizes": []}, "capture_sizes"),
        ({"capture_sizes": [0]}, "size 0"),
        ({"capture_sizes": "x"}, "capture_sizes = 'x'"),
        ({"capture_sizes": list(range(1, 5000))}, "more than 4096"),
        ({"max_model_len": 2**31}, "max_model_len = 2147483648"),
        ({"max_model_len": 0}, "max_model_len = 0"),
        ({"compress": 0}, "compress = 0"),
        ({"max_model_len": 3000, "compress": 4096}, "no width"),
        ({"dp": 0}, "dp = 0"),
        ({"layers": 0}, "layers = 0"),
        ({"steps": 0}, "steps = 0"),
        ({"steps": 10**6}, "steps = 1000000"),
        ({"steps": 10_000, "requests": 4096, "max_num_seqs": 4096}, "rows, more than"),
        ({"seed": -1}, "seed = -1"),
        ({"top_k": 100}, "top_k = 100"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_nonsense_names_field_and_value(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError) as caught:
        DrainPlan(**fields)
    assert named in str(caught.value)
    with pytest.raises(PlanError):
        DrainPlan().replace(**fields)


@pytest.mark.parametrize("hostile", [{"k" * 500_000: 1}, {"requests": "v" * 500_000}, {f"k{n}": n for n in range(20_000)}])
@pytest.mark.parametrize(
    "read",
    [
        lambda fields: DrainPlan(**fields),
        HuntPlan.from_document,
        lambda fields: LoadPlan.from_document({"schema": LOAD_SCHEMA, "waves": [], **fields}),
    ],
)
def test_what_is_wrong_with_a_plan_of_any_kind_is_said_in_few_words(read: Any, hostile: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        read(hostile)
    assert next(iter(hostile))[:100] in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_an_unknown_producer_is_named() -> None:
    with pytest.raises(PlanError, match="producer = 'x'"):
        decode_steps(DrainPlan(), "x")  # type: ignore[arg-type]


def test_flags_as_text() -> None:
    plan = DrainPlan(prompt="256:1024", output="32", capture_sizes="8,4,2,4")
    assert (plan.prompt, plan.output, plan.capture_sizes) == ((256, 1024), (32, 32), (2, 4, 8))


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_plan_file_reads_back(tmp_path: Path, suffix: str) -> None:
    plan = DrainPlan(requests=12, prompt=(100, 200), capture_sizes=(2, 4, 8), seed=5)
    file = tmp_path / f"plan{suffix}"
    if suffix == ".json":
        file.write_text(json.dumps(plan.document()))
    else:
        file.write_text("requests = 12\nprompt = [100, 200]\ncapture_sizes = [2, 4, 8]\nseed = 5\n")
    assert load_plan(file) == plan


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.json", b"{", "not a plan"),
        ("a.json", b"[]", "object of fields"),
        ("a.json", b"\xff\xfe", "not a plan"),
        ("a.json", b"[" * 100_000, "not a plan"),
        ("a.json", b'{"requests": -1}', "requests = -1"),
        ("a.json", b'{"schema": "other/1"}', "schema 'other/1'"),
        ("a.json", b'{"steps": 1e999}', "steps"),
        ("a.json", b'{"seed": ' + b"9" * 5000 + b"}", "a.json"),
        ("a.toml", b"requests = ", "not a plan"),
        ("a.toml", b"requests = 2026-01-01", "requests"),
        ("a.json", b" " * (MAX_PLAN_BYTES + 1), "larger than"),
    ],
)
def test_a_bad_plan_file_is_named(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        load_plan(file)
    assert name in str(caught.value)
    assert what in str(caught.value)


def test_a_missing_plan_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(PlanError, match=str(path)):
            load_plan(path)


def test_the_schema_accepts_documents_and_refuses_others() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(DrainPlan().document(), schema())
    jsonschema.validate(DrainPlan(capture_sizes=(2, 4)).document(), schema())
    for bad in ({"requests": 0}, {"other": 1}, {"schema": "x"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema())


plans: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    requests=st.integers(1, 40),
    min_live=st.integers(1, 4),
    mtp=st.integers(0, 4),
    acceptance=st.floats(0, 1),
    max_num_seqs=st.integers(4, 24),
    capture_sizes=st.none() | st.lists(st.integers(1, 64), min_size=1, max_size=8),
    compress=st.sampled_from([1, 2, 4, 128]),
    dp=st.integers(1, 3),
    steps=st.integers(1, 60),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=120, deadline=None)
@given(plans, st.sampled_from(["raw", "clamped"]), st.sampled_from([None, 90, 100, 120]))
def test_every_step_of_any_plan_is_consistent(fields: dict[str, Any], producer: Any, sm: int | None) -> None:
    fields["min_live"] = min(fields["min_live"], fields["requests"])
    plan = DrainPlan(**fields)
    for rank in range(plan.dp):
        steps = decode_steps(plan, producer, sm=sm, rank=rank)
        assert len(steps) <= plan.steps
        for index, step in enumerate(steps):
            slots = step.live_requests + step.padded_requests
            assert step.index == index
            assert step.rows == step.live_requests * plan.next_n <= step.graph_rows == slots * plan.next_n
            assert len(step.query_start_loc) == slots + 1
            assert step.query_start_loc[-1] == step.rows
            assert len(step.seq_lens) == len(step.decode_lens) == slots
            assert len(step.lengths) == len(step.expanded) == step.graph_rows
            assert all(0 < length <= plan.max_model_len for length in step.seq_lens[: step.live_requests])
            assert set(step.seq_lens[step.live_requests :]) <= {0}
            assert step.lengths == tuple(length // plan.compress for length in step.expanded)
            assert step.danger == any(length < 0 for length in step.lengths)
            assert step.total_live >= min(plan.min_live, plan.requests)
            assert all(-(2**31) <= length < 2**31 for length in step.lengths)
            assert step.eager or step.graph_rows in plan.graph_sizes
            if producer == "clamped" or plan.mtp == 0:
                assert not step.danger
