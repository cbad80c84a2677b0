"""The load plan: the same from the same seed, the windows it aims at, and files that are hostile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsv4_repro.errors import PlanError
from dsv4_repro.kernels.graphs import decode_graph_sizes
from dsv4_repro.repro.schemas import schema_of
from dsv4_repro.repro.serving.aims import window
from dsv4_repro.repro.serving.load_plan import (
    LOAD_SCHEMA,
    MAX_PLAN_BYTES,
    LoadPlan,
    read_load_plan,
)
from dsv4_repro.scenarios.drain import DrainPlan
from dsv4_repro.scenarios.drain_steps import plan_requests


def test_the_same_seed_gives_the_same_bytes_and_another_others() -> None:
    plan = DrainPlan(seed=7)
    assert LoadPlan.from_drain(plan).to_bytes() == LoadPlan.from_drain(plan).to_bytes()
    assert LoadPlan.from_drain(plan).to_bytes() != LoadPlan.from_drain(plan.replace(seed=8)).to_bytes()
    assert LoadPlan.from_drain(DrainPlan()).sha256 == LoadPlan.from_drain(DrainPlan()).sha256


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = LoadPlan.from_drain(DrainPlan(seed=3))
    plan.write(tmp_path / "plan.json")
    again = read_load_plan(tmp_path / "plan.json")
    assert again == plan
    assert again.to_bytes() == plan.to_bytes() == (tmp_path / "plan.json").read_bytes()


def test_a_plan_obeys_its_schema() -> None:
    document = LoadPlan.from_drain(DrainPlan()).document()
    jsonschema.validate(document, schema_of("load-plan"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "extra": 1}, schema_of("load-plan"))


def test_the_first_wave_has_the_lengths_of_the_other_grounds() -> None:
    drain = DrainPlan()
    wave = LoadPlan.from_drain(drain).waves[1]
    sent = [spec for spec in wave.requests if spec.hold_back is None]
    drawn = plan_requests(drain)
    assert [spec.prompt_tokens for spec in sent] == [request.prompt for request in drawn]
    leaving = [(spec.max_tokens, request.output) for spec, request in zip(sent, drawn, strict=True) if not request.outlasts]
    assert all(mine == theirs for mine, theirs in leaving)
    assert all(spec.min_tokens == spec.max_tokens and spec.ignore_eos and spec.temperature == 0.0 for spec in sent)


@pytest.mark.parametrize("acceptance", ["none", "all"])
@pytest.mark.parametrize("mtp", [0, 1, 3])
def test_those_that_stay_outlast_those_that_leave_however_drafts_are_accepted(mtp: int, acceptance: str) -> None:
    """The worst case: who leaves gets one token a step, who stays gets next_n, and all prompts were prefilled before the last."""
    drain = DrainPlan(mtp=mtp)
    for wave in LoadPlan.from_drain(drain, window_steps=50).waves[1:]:
        sent = [spec for spec in wave.requests if spec.hold_back is None]
        staying = sorted(spec.max_tokens for spec in sent)[-drain.min_live :]
        leaving = sorted(spec.max_tokens for spec in sent)[: -drain.min_live]
        slow, fast = (1, mtp + 1) if acceptance == "none" else (mtp + 1, mtp + 1)
        assert min(staying) // fast >= max(leaving) // slow + 50


def test_prompts_of_two_requests_differ() -> None:
    plan = LoadPlan.from_drain(DrainPlan())
    prompts = {spec.completion().prompt for wave in plan.waves for spec in wave.requests}
    assert len(prompts) == sum(len(wave.requests) for wave in plan.waves)


def test_windows_of_vllms_default_list() -> None:
    def padded(*capture_sizes: int) -> dict[int, int | None]:
        aims = [window(live, 1, decode_graph_sizes(16, 2, capture_sizes or None)) for live in range(1, 17)]
        return {aim.live: aim.graph_rows for aim in aims if aim.padded_requests}

    assert padded() == {3: 8, 5: 16, 6: 16, 7: 16, 9: 24, 10: 24, 11: 24, 13: 32, 14: 32, 15: 32}
    assert padded(2, 4, 6, 8) == {}
    aim = window(3, 1, (2, 4, 8, 16))
    assert (aim.rows, aim.graph_rows, aim.padded_requests) == (6, 8, 1)
    assert aim.text == "3 live x 2 = 6 rows in a graph of 8, 1 padded"
    assert window(3, 1, ()).text == "3 live x 2 = 6 rows, eager"
    assert window(4, 1, (2, 4, 8, 16)).padded_requests == 0


def test_aims_of_a_drain() -> None:
    wave = LoadPlan.from_drain(DrainPlan()).waves[1]
    assert [aim.live for aim in wave.aims] == [15, 14, 13, 11, 10, 9, 7, 6, 5, 3]
    assert [aim.live for aim in wave.aims if aim.required] == [3]
    eager = LoadPlan.from_drain(DrainPlan(), eager=True).waves[1]
    assert [(aim.live, aim.graph_rows) for aim in eager.aims] == [(3, None)]


def test_outputs_stay_within_the_context() -> None:
    drain = DrainPlan(max_model_len=2048)
    plan = LoadPlan.from_drain(drain, window_steps=10_000)
    assert max((spec.prompt_tokens or 0) + spec.max_tokens for wave in plan.waves for spec in wave.requests) == 2046


def test_the_shortest_load_that_wedges() -> None:
    plan = LoadPlan.from_lengths(
        [(3000, 60), (3001, 400), (3002, 400), (3003, 400)], live=3, max_model_len=16384, waves=2, warm_up=False
    )
    assert [[(spec.prompt_tokens, spec.max_tokens) for spec in wave.requests] for wave in plan.waves] == [
        [(3000, 60), (3001, 400), (3002, 400), (3003, 400)]
    ] * 2
    assert plan.lines()[1] == "aims at: 3 live x 2 = 6 rows in a graph of 8, 1 padded"
    body = plan.waves[0].requests[0].completion(plan.token_ids).body("m")
    assert len(body["prompt"]) == 3000
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["temperature"]) == (60, 60, True, 0.0)


def test_one_engine_is_steered() -> None:
    with pytest.raises(PlanError, match="dp = 2"):
        LoadPlan.from_drain(DrainPlan(dp=2))


def _request(**fields: Any) -> dict[str, Any]:
    return {"id": "a", "prompt_tokens": 4, "max_tokens": 4, **fields}


def _document(**fields: Any) -> dict[str, Any]:
    return {"schema": LOAD_SCHEMA, "waves": [{"name": "w", "requests": [_request()]}], **fields}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({}, "schema"),
        ({"schema": "x"}, "schema 'x'"),
        (_document(waves=[]), "waves"),
        (_document(waves=[{"name": "w", "requests": []}]), "waves.0.requests"),
        (_document(extra=1), "extra"),
        (_document(waves=[{"name": "w", "requests": [_request(max_tokens=0)]}]), "waves.0.requests.0.max_tokens = 0"),
        (_document(waves=[{"name": "w", "requests": [_request(max_tokens=1 << 23)] * 2}]), "same|id a|max_model_len"),
        (_document(waves=[{"name": "w", "requests": [_request(), _request()]}]), "two requests have the id a"),
        (_document(waves=[{"name": "../w", "requests": [_request()]}]), "waves.0.name"),
        (_document(waves=[{"name": "w", "requests": [_request(id="a/b")]}]), "requests.0.id"),
        (_document(waves=[{"name": "w", "requests": [_request(text="x")]}]), "not both"),
        (_document(waves=[{"name": "w", "requests": [_request(min_tokens=5)]}]), "min_tokens 5"),
        (_document(waves=[{"name": "w", "requests": [_request()], "aims": [{"live": 2, "mtp": 1}]}]), "aims at 2"),
        (
            _document(waves=[{"name": "w", "requests": [_request()], "aims": [{"live": 1, "mtp": 1, "graph_rows": 1}]}]),
            "does not hold",
        ),
        (_document(max_model_len=7), "needs 8 tokens"),
        (_document(token_ids=[5, 5]), "token_ids"),
        (_document(waves=[{"name": "w", "requests": [_request(temperature=float("nan"))]}]), "temperature"),
        (_document(waves=[{"name": "w", "requests": [_request(start_s=float("inf"))]}]), "start_s"),
    ],
)
def test_what_makes_no_sense_is_said_with_its_place(tmp_path: Path, document: dict[str, Any], says: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=says) as caught:
        read_load_plan(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 4000
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b"[" * 200_000, b"1", b'{"schema": ' + b"9" * 5000 + b"}"])
def test_a_file_that_is_no_plan(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(raw)
    with pytest.raises(PlanError):
        read_load_plan(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        read_load_plan(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PlanError, match="not a regular file"):
        read_load_plan(tmp_path / "pipe")
    with pytest.raises(PlanError):
        read_load_plan(tmp_path)
    huge = tmp_path / "huge"
    with huge.open("wb") as stream:
        stream.truncate(MAX_PLAN_BYTES + 1)
    with pytest.raises(PlanError, match="larger than"):
        read_load_plan(huge)


def test_a_plan_with_very_many_requests_is_refused(tmp_path: Path) -> None:
    waves = [{"name": f"w{wave}", "requests": [_request(id=f"{wave}-{one}") for one in range(2001)]} for wave in range(10)]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(_document(waves=waves)))
    with pytest.raises(PlanError, match="20010 requests"):
        read_load_plan(path)
