"""``scripts/release.py`` behind a debugger that answers anything: it never writes unless all conditions hold at that very stop, and
never leaves the process under a debugger that has given up."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_repro.forensics.collect.cuda_gdb import SCRIPTS
from dsv4_repro.forensics.collect.cuda_release import release_events
from dsv4_repro.kernels.abi import RELEASE_COUNT

from .gdb_patient import EventLoop, GdbError

NAME = "persistent_topk_kernel"
COUNTER = 0x7FD67BE89668
ALLOWED = (COUNTER, COUNTER + 3088)
_HEAD = "  Kernel Parent Dev Grid Status SMs Mask GridDim BlockDim Invocation\n"
KERNELS = {
    "wanted": f"*      0      -   0    5 Active 0x100 (16,1,1) (1024,1,1) vllm::persistent::{NAME}<512, 4u>(Params)\n",
    "longer": f"*      0      -   0    5 Active 0x100 (16,1,1) (1024,1,1) vllm::{NAME}_2<512>(Params)\n",
    "other": "*      0      -   0    5 Active 0x100 (16,1,1) (1024,1,1) vllm::decode_attention(Params)\n",
    "in a parameter": f"*      0      -   0    5 Active 0x100 (16,1,1) (1024,1,1) other<{NAME}>({NAME})\n",
    "none": "No CUDA kernels.\n",
    "garbage": "\x00\xff * 0 persistent_topk_kernel\n(cuda-gdb) \n",
}
_CODE = """   0x7fd0 <k+7312>:\tIMAD.U32 R5,RZ,RZ,UR12
   0x7fe0 <k+7344>:\tIMAD.MOV.U32 R4,RZ,RZ,R6
   0x7ff0 <k+7376>:\tLDG.E.STRONG.GPU R4,desc[UR16][R4.64+0xc08]
=> 0x8000 <k+7392>:\tCCTL.IVALL
   0x8030 <k+7440>:\t@!P0 BRA 0x7fd0
"""
CODES = {"poll": _CODE, "no load": _CODE.replace("STRONG", "WEAK"), "empty": "", "garbage": "=> 0x \x00 LDG.E.STRONG.GPU R,[R]"}
Stop = dict[str, Any]


@dataclass
class Writes:
    """What was written, and the stop at which it was."""

    done: list[tuple[int, int, Stop]] = field(default_factory=list)


class Debugger(EventLoop):
    """Answers from one stop's facts after the other's; the last one stays. ``fail`` names the beginning of a command that fails."""

    def __init__(self, stops: list[Stop]) -> None:
        super().__init__()
        self.stops, self.at = stops, 0
        self.words: dict[int, int] = {}
        self.writes = Writes()

    @property
    def stop(self) -> Stop:
        return self.stops[min(self.at, len(self.stops) - 1)]

    def execute(self, command: str, to_string: bool = False) -> str:
        failing: tuple[str, type[BaseException]] | None = self.stop["fail"]
        if failing is not None and command.startswith(failing[0]):
            raise failing[1]("no")
        if command == "continue &":
            self.at += 1
            self.words = {}
        elif command == "interrupt":
            self.stopped()
        elif command == "quit":
            self.quit = True
        elif command == "info cuda kernels":
            return _HEAD + KERNELS[self.stop["kernels"]]
        elif command.startswith("info cuda blocks"):
            return "  BlockIdx   State    Dev SM\nKernel 0\n" + "".join(f"  ({x},0,0) running 0 8\n" for x in self.stop["blocks"])
        elif command.startswith("x/"):
            return CODES[self.stop["code"]]
        elif found := re.fullmatch(r"print \*\(@global int\*\)(0x[0-9a-f]+)", command):
            value = self.words.get(int(found[1], 16), self.stop["value"])
            return f"$1 = {value}" if value is not None else "Cannot access memory"
        elif found := re.fullmatch(r"set var \*\(@global int\*\)(0x[0-9a-f]+) = (\S+)", command):
            self.writes.done.append((int(found[1], 16), int(found[2]), self.stop))
            self.words[int(found[1], 16)] = int(found[2])
        return ""

    def parse_and_eval(self, expression: str) -> int:
        base = COUNTER - 0xC08 + int(self.stop["shift"])
        known = {"$pc": 0x8000, "$R4": 1, "$R5": base >> 32, "$R6": base & 0xFFFFFFFF, "$UR12": base >> 32}
        if expression not in known:
            raise GdbError(expression)
        return known[expression]


def run(stops: list[Stop], go: Any) -> tuple[Debugger, list[dict[str, Any]]]:
    """The script over these stops; it must end by itself."""
    debugger = Debugger(stops)
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(said):
        (Path(folder) / "go").write_text(go if isinstance(go, str) else json.dumps(go))
        given = {"library": True, "folder": folder, "total_s": 1.5, "go_s": 0.2, "stop_s": 0.5}
        with mock.patch.dict(sys.modules, {"gdb": debugger}), mock.patch.dict("os.environ", {"DSV4_REPRO_GDB": json.dumps(given)}):
            runpy.run_path(str(SCRIPTS / "release.py"))
            for _ in range(2000):
                if debugger.quit:
                    break
                if debugger.queue:
                    debugger.queue.popleft()()
                else:
                    time.sleep(0.002)
    return debugger, release_events(said.getvalue())


GO: dict[str, Any] = {
    "kernel": NAME, "addresses": list(ALLOWED), "expected": 1, "value": RELEASE_COUNT, "most": 5, "pause_s": 0.0, "group_size": 2,
}  # fmt: skip
FAULTS = st.sampled_from([GdbError, RuntimeError, KeyError, MemoryError, ValueError])
COMMANDS = st.sampled_from(["info cuda kernels", "info cuda blocks", "cuda kernel", "x/", "print", "set var", "detach", "continue"])
STOPS = st.fixed_dictionaries({
    "kernels": st.sampled_from(["wanted"] * 4 + list(KERNELS)),
    "blocks": st.one_of(st.just([12]), st.lists(st.integers(0, 15), max_size=6, unique=True)),
    "code": st.sampled_from(["poll"] * 4 + list(CODES)),
    "value": st.sampled_from([1, 1, 1, 0, 2, -1, RELEASE_COUNT, None]),
    "shift": st.sampled_from([0, 0, 0, 3088, 3088 * 2, 4, -3088, 1 << 33]),
    "fail": st.one_of(st.none(), st.none(), st.tuples(COMMANDS, FAULTS)),
})  # fmt: skip


def allowed(stop: Stop, address: int) -> bool:
    """All conditions at once, from the facts and not from the script."""
    lonely = [x for x in stop["blocks"] if x % 2 == 0 and x + 1 not in stop["blocks"]]
    return (
        stop["kernels"] == "wanted"
        and stop["code"] == "poll"
        and stop["value"] == 1
        and bool(lonely)
        and address == COUNTER + stop["shift"]
        and address in ALLOWED
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STOPS, min_size=1, max_size=4))
def test_nothing_is_written_unless_all_conditions_hold_at_that_stop(stops: list[Stop]) -> None:
    debugger, events = run(stops, GO)
    for address, value, stop in debugger.writes.done:
        assert value == RELEASE_COUNT
        assert allowed(stop, address), stop
    assert debugger.quit, "it stays under the debugger"
    assert events[-1]["event"] in ("end", "failed")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(
        st.sampled_from(sorted(GO)),
        st.one_of(st.none(), st.booleans(), st.integers(-5, 1), st.floats(), st.text(max_size=5), st.lists(st.text(max_size=3))),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_a_permission_that_is_not_whole_permits_nothing(changes: dict[str, Any], leave_out: bool) -> None:
    go = {name: value for name, value in GO.items() if name not in changes} if leave_out else {**GO, **changes}
    good: Stop = {"kernels": "wanted", "blocks": [12], "code": "poll", "value": 1, "shift": 0, "fail": None}
    debugger, _ = run([good, {**good, "kernels": "none"}], go)
    assert debugger.quit
    strict = {"kernel", "addresses", "expected", "value", "group_size"} & set(changes)
    for address, value, _stop in debugger.writes.done:
        assert address in ALLOWED
        # What may have been changed and is still in range: never what decides what is written, and where.
        assert value == go.get("value")
        assert type(value) is int
        assert not strict - {"expected", "value"}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"addresses": 7}', "\xff"])
def test_a_permission_that_is_no_document_permits_nothing(text: str) -> None:
    good: Stop = {"kernels": "wanted", "blocks": [12], "code": "poll", "value": 1, "shift": 0, "fail": None}
    debugger, events = run([good], text)
    assert debugger.quit
    assert not debugger.writes.done
    assert events[-1]["why"] == "not permitted"


def test_the_good_one_is_released() -> None:
    good: Stop = {"kernels": "wanted", "blocks": [12], "code": "poll", "value": 1, "shift": 0, "fail": None}
    debugger, _ = run([good, {**good, "shift": 3088}, {**good, "kernels": "none"}], GO)
    assert [address for address, _, _ in debugger.writes.done] == list(ALLOWED)
