"""``scripts/hang.py`` against a stand-in for cuda-gdb's Python module: what it asks, what it prints, and that no failure stops
it.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics.collect.cuda_gdb import SCRIPTS

from .gdb_patient import GdbError
from .gdb_texts import BLOCKS, POLL, REGISTERS, kernels

DEVICES = (
    "  Dev PCI Name Description SM Type SMs Warps/SM Lanes/Warp Max Regs/Lane Active SMs Mask\n"
    "* 0 00:06.0 NVIDIA H200 GH100GL-A sm_90 132 64 32 255 0x100\n"
)
KERNELS = kernels("persistent_topk_kernel<512, 4u>()")
CODE_120 = """   0x8000 <k+7200>:\tLDG.E.STRONG.GPU R5, desc[UR4][R10.64+0xc08]
=> 0x8010 <k+7216>:\tCCTL.IVALL
   0x8030 <k+7232>:\tISETP.GE.AND P0, PT, R5, R8, PT
   0x8040 <k+7248>:\t@!P0 BRA 0x8000
"""
OF_BOTH = {**REGISTERS, "R10": 0x1000, "R11": 0x7F}


class FakeGdb(types.ModuleType):
    error = GdbError

    def __init__(self, answers: dict[str, Any], registers: dict[str, int]) -> None:
        super().__init__("gdb")
        self.answers, self.registers, self.asked = answers, registers, list[str]()

    def execute(self, command: str, to_string: bool = False) -> str:
        self.asked.append(command)
        for pattern, answer in self.answers.items():
            if re.fullmatch(pattern, command):
                result = answer(command) if callable(answer) else answer
                if result is None:
                    raise GdbError("refused")
                return str(result)
        return ""

    def parse_and_eval(self, expression: str) -> int:
        if expression == "$pc":
            return 0x8000
        if expression[1:] not in self.registers:
            raise GdbError(f"no register {expression}")
        return self.registers[expression[1:]]


ANSWERS: dict[str, Any] = {
    "info cuda devices": DEVICES,
    "info cuda kernels": KERNELS,
    "info cuda blocks kernel 0": BLOCKS,
    r"x/\d+i .*": POLL,
    r"print \*\(@global int\*\)0x[0-9a-f]+": "$1 = 1",
}


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[FakeGdb, str]]:
    def run(changes: dict[str, Any] | None = None, registers: dict[str, int] | None = None, **settings: Any) -> tuple[FakeGdb, str]:
        answers = {**(changes or {}), **{key: value for key, value in ANSWERS.items() if key not in (changes or {})}}
        module = FakeGdb(answers, OF_BOTH if registers is None else registers)
        monkeypatch.setitem(sys.modules, "gdb", module)
        monkeypatch.setenv("DSV4_REPRO_GDB", json.dumps(settings))
        runpy.run_path(str(SCRIPTS / "hang.py"))
        return module, capsys.readouterr().out

    return run


def test_it_reads_everything_of_the_waiting_block(source: Callable[..., tuple[FakeGdb, str]]) -> None:
    module, text = source()
    assert "cuda kernel 0 block (12,0,0) thread (0,0,0)" in module.asked
    assert "(cuda-gdb) info cuda warps" in text
    assert "(cuda-gdb) info registers" in text
    assert "dsv4-repro: polled word at 0x7fd67be89668 (R5:R6 + 0xc08, load at 0x7ff0)" in text
    assert "(cuda-gdb) print *(@global int*)0x7fd67be89668\n$1 = 1" in text
    assert "(cuda-gdb) x/14xw $_cuda_const_bank(0,0x210)" in text
    assert text.index("stage reading") < text.index("info cuda devices") < text.index("stage detaching") < text.index("stage done")
    assert "detach" not in module.asked, "a person's session stays attached"
    assert not [command for command in module.asked if command.startswith("set var")], "nothing is written"


def test_it_detaches_when_told_and_reads_the_words_it_is_given(source: Callable[..., tuple[FakeGdb, str]]) -> None:
    module, text = source(detach=True, addresses=[0x7FD67BE89668, 0xABC], params_base=0x380)
    assert module.asked[-1] == "detach"
    assert text.count("print *(@global int*)0x7fd67be89668") == 1, "not twice"
    assert "dsv4-repro: word at 0xabc\n(cuda-gdb) print *(@global int*)0xabc" in text
    assert "$_cuda_const_bank(0,0x380)" in text


@pytest.mark.parametrize(
    ("code", "registers", "expected"),
    [
        (CODE_120, OF_BOTH, "polled word at 0x7f00001c08 (R11:R10 + 0xc08"),
        (
            POLL.replace("IMAD.MOV.U32 R4,RZ,RZ,R6", "LDS R4,[R2]"),
            OF_BOTH,
            "polled word not known: the load at 0x7ff0 overwrites",
        ),
        (POLL, {key: value for key, value in OF_BOTH.items() if key != "R6"}, "polled word not known: R6 cannot be read"),
        ("   0x8000 <k>:\tBAR.SYNC 0x0\n", OF_BOTH, "polled word not known: no strong load"),
        ("", OF_BOTH, "polled word not known: no strong load"),
    ],
)
def test_the_polled_address_is_derived_or_said_not_to_be_known(
    source: Callable[..., tuple[FakeGdb, str]], code: str, registers: dict[str, int], expected: str
) -> None:
    _module, text = source({r"x/\d+i .*": code}, registers)
    assert f"dsv4-repro: {expected}" in text


@pytest.mark.parametrize("pattern", [*ANSWERS, "info cuda warps", "info registers", "cuda kernel .*", "set .*"])
def test_any_command_may_fail_and_the_rest_goes_on(source: Callable[..., tuple[FakeGdb, str]], pattern: str) -> None:
    module, text = source({pattern: lambda _command: None}, detach=True)
    assert "failed" in text
    assert module.asked[-1] == "detach"
    assert "stage done" in text


def test_no_kernels_is_said(source: Callable[..., tuple[FakeGdb, str]]) -> None:
    _module, text = source({"info cuda kernels": "No CUDA kernels.\n"})
    assert "No CUDA kernels." in text
    assert "dsv4-repro: no kernels" in text


def test_of_many_blocks_some_are_read_and_the_number_is_said(source: Callable[..., tuple[FakeGdb, str]]) -> None:
    many = "BlockIdx State Dev SM\nKernel 0\n" + "".join(f"  ({index},0,0) running 0 {index}\n" for index in range(264))
    module, text = source({"info cuda blocks kernel 0": many}, blocks=3)
    assert "dsv4-repro: kernel 0: 264 blocks resident, 3 of them read in full" in text
    assert module.asked.count("info cuda warps") == 3
    assert len([command for command in module.asked if command.startswith("cuda kernel")]) == 3, "no register list: nothing to name"


def test_the_other_blocks_are_asked_for_the_registers_of_the_loop_that_exist(source: Callable[..., tuple[FakeGdb, str]]) -> None:
    many = "BlockIdx State Dev SM\nKernel 0\n" + "".join(f"  ({index},0,0) running 0 {index}\n" for index in range(264))
    listed = "".join(f"{name}  {value:#x}  {value}\n" for name, value in OF_BOTH.items())
    module, text = source({"info cuda blocks kernel 0": many, "info registers": listed}, blocks=3)
    brief = [command for command in module.asked if command.startswith("info registers $")]
    assert len(brief) == 261
    assert set(brief[0].split()[2:]) == {"$R4", "$R5", "$R6", "$R9", "$R10", "$UR12"}
    assert module.asked.count("info cuda warps") == 3
    assert "failed" not in text
    module, text = source({"info cuda blocks kernel 0": many, "info registers": listed}, blocks=3, brief_s=0)
    assert "dsv4-repro: the time for brief reading is over: 261 blocks of kernel 0 not read" in text
    assert not [command for command in module.asked if command.startswith("info registers $")]


def test_past_its_deadline_it_detaches_and_says_so(source: Callable[..., tuple[FakeGdb, str]]) -> None:
    module, text = source(deadline_s=-1, detach=True)
    assert "dsv4-repro: out of time" in text
    assert module.asked[-1] == "detach"


def test_an_interrupt_is_the_end_of_the_reading_and_not_of_the_detach(source: Callable[..., tuple[FakeGdb, str]]) -> None:
    def interrupted(_command: str) -> str:
        raise KeyboardInterrupt

    module, text = source({"info cuda kernels": interrupted}, detach=True)
    assert "out of time" in text
    assert module.asked[-1] == "detach"


def test_a_release_is_written_only_on_request(source: Callable[..., tuple[FakeGdb, str]]) -> None:
    module, _text = source(write=[[0xC08, 0x3FFFFFFF]])
    assert "set var *(@global int*)0xc08 = 1073741823" in module.asked


def test_both_scripts_are_python_3_8(tmp_path: Path) -> None:
    import ast

    for name in ("hang.py",):
        ast.parse((SCRIPTS / name).read_text(), feature_version=(3, 8))
