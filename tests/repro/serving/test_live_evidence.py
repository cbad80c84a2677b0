"""Samples as text that the classifier's own readers understand, and nothing that was not read."""

from __future__ import annotations

from dsv4_repro.forensics.classify import classify
from dsv4_repro.forensics.evidence.gather import read_text
from dsv4_repro.repro.serving.live_evidence import evidence_text
from dsv4_repro.repro.serving.records import DeviceSample, EngineSample, ProcessSample, Snapshot


def _shots(tokens: tuple[float, float] = (60.0, 60.0), memory: int = 0) -> list[Snapshot]:
    return [
        Snapshot(
            at,
            engine=EngineSample(at, health=200, running=3, waiting=0, generation_tokens=value),
            devices=(DeviceSample(at, 0, utilisation=100, memory_utilisation=memory, power_w=123.0),),
            processes=(ProcessSample(at, 8, "engine", "S"), ProcessSample(at, 9, "worker", None)),
        )
        for at, value in ((10.0, tokens[0]), (13.0, tokens[1]))
    ]


def test_the_readers_understand_every_line() -> None:
    case = read_text("x", evidence_text(_shots(), wall=1_800_000_000.0, log="INFO 01-15 08:00:00 x\n"))
    assert case.scrapes == 2
    assert {sample.name for sample in case.metrics} == {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total",
    }  # fmt: skip
    assert [(gpu.util, gpu.memory_util, gpu.power) for gpu in case.gpus] == [(100, 0, 123.0)] * 2
    assert [process.pid for process in case.procs] == [8]
    assert case.unread == []


def test_what_was_not_read_is_not_written() -> None:
    text = evidence_text([Snapshot(1.0, engine=EngineSample(1.0, error="refused"))], wall=1.8e9)
    assert "scrape" not in text
    assert "nvidia" not in text
    text = evidence_text([Snapshot(1.0, devices=(DeviceSample(1.0, 0),))], wall=1.8e9)
    assert "[N/A], [N/A], [N/A]" in text


def test_large_counters_keep_their_last_digit() -> None:
    text = evidence_text(_shots((123456789.0, 123456790.0)), wall=1.8e9)
    assert "123456789.0" in text
    assert "123456790.0" in text


def test_moving_counters_are_never_judged_hung() -> None:
    judged = classify(read_text("x", evidence_text(_shots((60.0, 90.0), memory=40), wall=1.8e9)))
    assert judged.class_ in ("not-hung", "unknown")
