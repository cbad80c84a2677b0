"""Lines that make a pattern try every way of sharing them out: a log may hold anything, and is read in the time of its size."""

from __future__ import annotations

import time

import pytest

from dsv4_repro.forensics.evidence.gather import read_text

HEADS = (
    "", "(Worker_TP0 pid=1", "(a pid=", "[rank0]:", "INFO 11-29 22:00:00 [core.py:1] ", "Traceback (", '  File "', "11-29 ",
    "Avg prompt throughput: ", "torch.compile takes ", "Loading safetensors checkpoint shards: ", "vllm:num_requests_running{",
    "Thread 0x7f ", "NVRM: Xid (PCI:", "CUDA error: ", "#0  0x", "  ",
)  # fmt: skip
FILLERS = (" ", "0", "a", "(", "a ", "0x0", "'a',", "a: ", "\t", "_", ".", "-", "=", "#", "pid=1 ", ")")


@pytest.mark.parametrize("filler", FILLERS)
def test_a_long_line_takes_no_time_to_speak_of(filler: str) -> None:
    for head in HEADS:
        text = head + (filler * 20_000)[:20_000] + "!\n"
        began = time.process_time()
        read_text("log", text)
        assert time.process_time() - began < 1.0, (head, filler)


@pytest.mark.parametrize("line", [" " * 4000, "=" * 399, "- " * 199, "#" * 399, "(a pid=" + "1" * 4000])
def test_many_of_them_neither(line: str) -> None:
    began = time.process_time()
    read_text("log", f"{line}\n" * 128)
    assert time.process_time() - began < 4.0
