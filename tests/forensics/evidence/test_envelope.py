"""Log lines freed of what carried them."""

from __future__ import annotations

import pytest

from dsv4_repro.forensics.evidence.envelope import clean, open_line

MESSAGE = (
    "(EngineCore pid=4) INFO 11-28 09:13:52 [shm_broadcast.py:802] No available shared memory broadcast block found in 60 seconds."
)


@pytest.mark.parametrize(
    ("line", "carrier"),
    [
        (MESSAGE, None),
        (f"2026-11-28T08:13:52.113Z stdout F {MESSAGE}", "utc"),
        (f"2026-11-28T08:13:52.113456+01:00 stderr P {MESSAGE}", "utc"),
        (f"Nov 28 09:13:52 gpu-01 vllm[2231]: {MESSAGE}", "yearless"),
        (f"2026-11-28T09:13:52+0100 gpu-01 vllm[2231]: {MESSAGE}", "utc"),
        (f"2026-11-28T09:13:52.123456789Z {MESSAGE}", "utc"),
        (f"[pod/vllm-0/engine] {MESSAGE}", None),
        (f"vllm-1  | {MESSAGE}", None),
        (f"vllm-ds-7d9f engine {MESSAGE}", None),
        (f"(raylet pid=99, ip=10.0.0.2) {MESSAGE}", None),
        (f'{{"log": "{MESSAGE}\\n", "stream": "stderr", "time": "2026-11-28T08:13:52Z"}}', "utc"),
        (f'{{"MESSAGE": "{MESSAGE}", "__REALTIME_TIMESTAMP": "1795853632113000"}}', "utc"),
        (f'{{"record": {{"message": "{MESSAGE}"}}, "ts": 1795853632.1}}', "utc"),
        (f'2026-11-28T08:13:52Z stdout F {{"message": "{MESSAGE}"}}', "utc"),
    ],
)
def test_the_message_comes_out_whole(line: str, carrier: str | None) -> None:
    message, stamp = open_line(line)
    assert message == MESSAGE
    assert (stamp.kind if stamp else None) == carrier


def test_worker_prefixes_are_not_taken_for_envelopes() -> None:
    for prefix in (
        "(Worker_DP0_TP3_EP3 pid=9)",
        "(VllmWorker TP1 pid=9)",
        "(RayWorkerWrapper pid=9, ip=10.0.0.1)",
        "(APIServer pid=1)",
    ):
        line = f"{prefix} INFO 11-28 09:13:52 [x.py:1] text"
        assert open_line(line) == (line, None)


def test_level_and_process_of_json_lines_are_kept() -> None:
    message, _ = open_line(
        '{"level": "ERROR", "process_name": "EngineCore", "pid": 12, "msg": "EngineCore encountered a fatal error."}'
    )
    assert message == "(EngineCore pid=12) ERROR EngineCore encountered a fatal error."


@pytest.mark.parametrize("line", ['{"a": 1}', "{", "{" * 5000, '{"message": 3}', "[1, 2]", "", "\x1b[31m"])
def test_what_is_no_envelope_comes_back(line: str) -> None:
    assert open_line(line)[0] == line


def test_escape_sequences_and_control_characters_are_gone() -> None:
    raw = "\x1b[36m(EngineCore pid=1)\x1b[0;0m \x1b]8;;http://evil\x07ERROR\x00\x08\x7f \u2028x\x1b]0;title\x1b\\y"
    assert clean(raw) == "(EngineCore pid=1) ERROR xy"
    assert clean("plain\ttext ✓ é") == "plain\ttext ✓ é"
