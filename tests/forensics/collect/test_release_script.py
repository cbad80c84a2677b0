"""``scripts/release.py`` against a stand-in for cuda-gdb's Python with an event loop: what it writes, when, and what it leaves."""

from __future__ import annotations

import json
import re
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics.collect.cuda_gdb import SCRIPTS
from dsv4_repro.forensics.collect.cuda_release import release_events
from dsv4_repro.kernels.abi import RELEASE_COUNT

from .gdb_patient import EventLoop
from .gdb_texts import BLOCKS, POLL, REGISTERS, kernels

COUNTER = 0x7FD67BE89668
KERNELS = kernels("vllm::persistent::persistent_topk_kernel<512, 4u>(Params)")


class Patient(EventLoop):
    """A process with ``launches`` hung launches in a row behind a debugger: each write of the release count frees one."""

    def __init__(self, launches: int, **troubles: Any) -> None:
        super().__init__()
        self.left, self.troubles = launches, troubles
        self.counter = 1
        self.asked: list[str] = []
        self.detached = self.running = False

    def execute(self, command: str, to_string: bool = False) -> str:
        self.asked.append(command)
        assert not self.running or command == "interrupt", f"{command} while the process runs"
        if command == "continue &":
            self.running = True
            # The freed launch ends; the next one comes to its own wait.
            if self.counter != 1:
                self.left -= 1
                self.counter = 1
        elif command == "interrupt":
            if self.troubles.get("no_stop"):
                return ""
            self.running = False
            self.stopped()
        elif command == "detach":
            self.detached = True
        elif command == "quit":
            self.quit = True
        elif command == "info cuda kernels":
            return str(self.troubles.get("kernels", KERNELS)) if self.left > 0 else "No CUDA kernels.\n"
        elif command.startswith("info cuda blocks"):
            return str(self.troubles.get("blocks", BLOCKS))
        elif command.startswith("x/"):
            return POLL
        elif command.startswith("print *(@global int*)"):
            return f"$1 = {self.troubles.get('counter', self.counter)}"
        elif found := re.fullmatch(r"set var \*\(@global int\*\)(0x[0-9a-f]+) = (\d+)", command):
            assert int(found[1], 16) == COUNTER
            self.counter = int(found[2])
        return ""

    def parse_and_eval(self, expression: str) -> int:
        return 0x8000 if expression == "$pc" else REGISTERS[expression[1:]]


@pytest.fixture
def release(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[Patient, list[dict[str, Any]], str]]:
    def run(launches: int = 5, go: dict[str, Any] | None = None, **more: Any) -> tuple[Patient, list[dict[str, Any]], str]:
        patient = Patient(launches, **more.pop("troubles", {}))
        lost = more.pop("lost", False)
        settings = {"library": True, "folder": str(tmp_path), "total_s": 15.0, "go_s": 0.3, **more}
        if go is not None:
            document = {
                "kernel": "persistent_topk_kernel", "addresses": [COUNTER, COUNTER + 3088], "expected": 1, "value": RELEASE_COUNT,
                "most": 100, "pause_s": 0.03, "group_size": 2, **go,
            }  # fmt: skip
            (tmp_path / "go").write_text(json.dumps(document))
        monkeypatch.setitem(sys.modules, "gdb", patient)
        monkeypatch.setenv("DSV4_REPRO_GDB", json.dumps(settings))
        runpy.run_path(str(SCRIPTS / "release.py"))
        if not lost:
            patient.loop()
        text = capsys.readouterr().out
        return patient, release_events(text), text

    return run


def test_it_releases_until_nothing_waits_and_detaches(release: Any) -> None:
    patient, events, text = release(5, {})
    assert [one["event"] for one in events] == ["read"] + ["wrote"] * 5 + ["nothing", "end"]
    assert events[-1]["writes"] == 5
    assert patient.left == 0
    assert patient.detached
    assert not patient.running
    assert text.index("stage reading") < text.index("stage detaching") < text.index("stage done")
    assert text.index("info registers") < text.index('"event": "read"') < text.index('"event": "wrote"')


def test_nothing_is_written_without_permission(release: Any) -> None:
    patient, events, _ = release(5)
    assert not [command for command in patient.asked if command.startswith("set var")]
    assert events[-1]["why"] == "not permitted"
    assert patient.detached


def test_a_starter_that_says_stop_is_obeyed_before_anything_is_written(release: Any, tmp_path: Path) -> None:
    (tmp_path / "stop").write_text("")
    patient, events, _ = release(5, {})
    assert events[-1]["writes"] == 0
    assert patient.detached


@pytest.mark.parametrize(
    ("go", "troubles", "says"),
    [
        ({"addresses": [0x1000]}, {}, "none of the words that were judged"),
        ({"kernel": "another_kernel"}, {}, "no another_kernel is resident"),
        ({}, {"counter": 0}, "is 0, not 1"),
        ({}, {"counter": 2}, "is 2, not 1"),
        ({}, {"blocks": BLOCKS + "  (13,0,0) running   0    9\n"}, "block 13 of block 12's group is still there"),
        ({"group_size": 4}, {"blocks": BLOCKS + "  (15,0,0) running   0    9\n"}, "block 15 of block 12's group is still there"),
        ({}, {"blocks": BLOCKS.replace("(12,0,0)", "(13,0,0)")}, "block 13 is not the leader"),
        ({}, {"kernels": KERNELS.replace("persistent_topk_kernel", "decode_attention")}, "no persistent_topk_kernel is resident"),
        ({}, {"kernels": KERNELS.replace("persistent_topk_kernel", "not_persistent_topk_kernel")}, "no persistent_topk_kernel"),
    ],
)
def test_anything_but_the_judged_wait_is_left_alone(release: Any, go: Any, troubles: Any, says: str) -> None:
    patient, events, _ = release(3, go, troubles=troubles)
    assert not [command for command in patient.asked if command.startswith("set var")]
    assert says in events[-1]["why"]
    assert patient.detached


def test_blocks_of_other_groups_do_not_keep_a_wait_from_its_release(release: Any) -> None:
    _, events, _ = release(2, {}, troubles={"blocks": BLOCKS + "  (11,0,0) running   0    9\n  (14,0,0) running   0   10\n"})
    assert events[-1]["writes"] == 2


def test_the_number_of_writes_is_bounded(release: Any) -> None:
    patient, events, _ = release(50, {"most": 3})
    assert events[-1]["writes"] == 3
    assert patient.detached


def test_out_of_time_it_detaches(release: Any) -> None:
    patient, events, _ = release(10_000, {"pause_s": 0.1}, total_s=1.0)
    assert events[-1]["why"] == "out of time"
    assert 1 <= events[-1]["writes"] < 30
    assert patient.detached


def test_beside_other_ranks_a_stop_without_a_wait_is_not_the_end(release: Any) -> None:
    _, alone, _ = release(1, {})
    _, beside, _ = release(1, {"patience_s": 0.5})
    assert sum(one["event"] == "nothing" for one in alone) == 1
    assert sum(one["event"] == "nothing" for one in beside) > 2


def test_a_process_that_does_not_stop_again_is_said_and_left(release: Any, capsys: pytest.CaptureFixture[str]) -> None:
    patient, _, _ = release(3, {}, troubles={"no_stop": True}, stop_s=0.2, lost=True)
    end = time.monotonic() + 10
    events: list[dict[str, Any]] = []
    while not any(one["event"] == "lost" for one in events):
        assert time.monotonic() < end
        if patient.queue:
            patient.queue.popleft()()
        time.sleep(0.01)
        events += release_events(capsys.readouterr().out)
    assert patient.running
    assert not patient.detached
    assert not patient.quit
