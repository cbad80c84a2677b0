"""A recorded step says the same to whoever reads it: from the ring, or from the document that was kept of it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_repro.forensics.evidence.agent_facts import recorded_step
from dsv4_repro.forensics.evidence.ring_file import RecordedStep, step_of
from dsv4_repro.repro.serving.measured_step import measured_step

_COUNT = st.none() | st.integers(0, 2**31 - 1)
_TIME = st.none() | st.integers(1, 2**64 - 1)
STEPS = st.builds(
    RecordedStep,
    number=st.integers(1, 2**64 - 1), runner=st.sampled_from(["v1", "v2", "unknown"]),
    graph_mode=st.sampled_from(["none", "piecewise", "full", "unknown"]), native=st.none() | st.booleans(),
    requests=_COUNT, tokens=_COUNT, padded_requests=_COUNT, padded_tokens=_COUNT, decode_min=_COUNT, decode_max=_COUNT,
    decode_slots=_COUNT, decode_zero=_COUNT, next_n=_COUNT, begin_ns=_TIME, launch_ns=_TIME, record_ns=_TIME, complete_ns=_TIME,
    wait_ns=_TIME, output_ns=_TIME, guarded=st.booleans(), event_dropped=st.booleans(),
)  # fmt: skip
SEEN = RecordedStep(
    number=44, runner="v1", graph_mode="full", native=True, requests=3, tokens=6, padded_requests=4, padded_tokens=8, decode_min=0,
    decode_max=2, decode_slots=4, decode_zero=1, next_n=2, begin_ns=1, launch_ns=2, record_ns=3, complete_ns=4, wait_ns=5,
    output_ns=6, guarded=True, event_dropped=True,
)  # fmt: skip
#: What a field is when it was not seen.
UNSEEN: dict[str, Any] = {"runner": "unknown", "graph_mode": "unknown", "guarded": False, "event_dropped": False}


@given(step=STEPS)
def test_ring_and_document_say_the_same(step: RecordedStep) -> None:
    document = json.loads(json.dumps(asdict(step)))
    assert step_of(document) == step
    assert measured_step({"step": document}, (), None) == recorded_step(step)


@pytest.mark.parametrize("value", [None, "full of it", -1, 1.5, [], {}, {"v1": 1}])
@pytest.mark.parametrize("name", [field.name for field in fields(RecordedStep)])
def test_a_field_of_another_type_was_not_seen(name: str, value: Any) -> None:
    found = step_of({**asdict(SEEN), name: value})
    unseen: dict[str, Any] = {name: UNSEEN.get(name)}
    assert found == (None if name == "number" else replace(SEEN, **unseen))
    missing = asdict(SEEN)
    del missing[name]
    assert step_of(missing) == found


@pytest.mark.parametrize("document", [None, "step", 3, [], [("number", 44)], {}, {"requests": 3}])
def test_what_is_no_step_is_none(document: object) -> None:
    assert step_of(document) is None
    assert measured_step({"step": document}, (), None) is None
