"""A hang goes through one line of JSON unchanged, and what is no such line is told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import EvidenceError
from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.repro.serving.hang_document import (
    HangVerdict,
    decode_hang,
    encode_hang,
    verdict_of_samples,
    verdict_of_words,
)
from dsv4_repro.repro.serving.records import (
    Assessment,
    Blind,
    Change,
    DeviceSample,
    EngineCounters,
    EngineSample,
    LoadSample,
    LogSample,
    ProcessSample,
    Rank,
    RankProgress,
    ServerTarget,
    Snapshot,
)
from dsv4_repro.repro.serving.watch_loop import Hang


def a_hang(ranks: int = 1) -> Hang:
    """One with every kind of record, a path that is no UTF-8, and a number that JSON has no word for."""
    target = ServerTarget(
        base_url="http://127.0.0.1:1", api_pid=7, engine_pids=(8, 9), log_path=Path("/l\udcff/server.log"), owned=True,
        ranks=tuple(Rank(10 + number, number, 5, gpu_uuid="GPU-x", how="title") for number in range(ranks)),
        tree={7: "api", 8: "engine"}, changes=(Change("a", "b", "c"),), unread=(Unread("log", "why", "do"),),
    )  # fmt: skip
    snapshot = Snapshot(
        at=100.5,
        engine=EngineSample(100.0, running=3, by_engine={"0": EngineCounters(running=3.0)}),
        log=LogSample(100.0, events={"stats": 4}),
        progress=(RankProgress(10, 100.0, unfinished=(4, 5), unfinished_age_s=3.0),),
        devices=(DeviceSample(100.0, 0, xids=(13,), unread=(Unread("GPM", "not there"),), power_w=math.inf),),
        processes=(ProcessSample(100.0, 7, "api", "S"),),
        load=LoadSample(100.0, faults={"timeout": 2}),
        blind=(Blind("canary", "off"),),
    )
    assessment = Assessment("hung", 100.5, 97.0, ("nothing moves",), ("GPU 0: resident",), (Blind("a", "b"),), 3)
    return Hang(target, snapshot, assessment, (("sample", {"wall": 1.5, "x": [1]}),), 4)


def test_it_comes_out_as_it_went_in() -> None:
    hang = a_hang(2)
    line = encode_hang(hang, root=Path("/r"), attach=False)
    assert line.count(b"\n") == 1
    found, more = decode_hang(line)
    assert (found.target, found.snapshot, found.assessment) == (hang.target, hang.snapshot, hang.assessment)
    assert (found.recent, found.number) == (hang.recent, 4)
    assert more == {"root": "/r", "attach": False}
    assert found.moved() == ""


@pytest.mark.parametrize("line", [b"", b"{}\n", b"[]\n", b"null\n", b'{"target": 3}\n', b"[" * 100000, b"\xff\n"])
def test_anything_else_is_told(line: bytes) -> None:
    with pytest.raises(EvidenceError):
        decode_hang(line)


def test_a_record_with_an_unknown_field_is_told() -> None:
    document = json.loads(encode_hang(a_hang()))
    document["target"]["colour"] = "red"
    with pytest.raises(EvidenceError, match="colour"):
        decode_hang(json.dumps(document).encode())


def test_the_verdict_of_samples_names_no_cause() -> None:
    one, two = verdict_of_samples(a_hang(1)), verdict_of_samples(a_hang(2))
    assert (one.outcome, one.class_, one.cause, one.confidence) == ("hang", "gpu-kernel-stuck", None, "low")
    assert (two.outcome, two.class_) == ("inconclusive", "unknown")
    assert "GPU 0: resident" in one.sentence


def test_a_verdict_comes_out_as_it_went_in_and_no_other_does() -> None:
    verdict = HangVerdict("hang", "gpu-spin-barrier", "peer-left", "high", None, "s")
    assert verdict_of_words(verdict.words()) == verdict
    others: tuple[Any, ...] = (None, [], {}, {**verdict.words(), "outcome": "fine"}, {**verdict.words(), "class": 3},
                  {**verdict.words(), "sentence": "x" * 5000}, {**verdict.words(), "confidence": None})  # fmt: skip
    for words in others:
        with pytest.raises(EvidenceError):
            verdict_of_words(words)
