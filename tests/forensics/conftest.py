"""Device states for the tests: the kernels written here, at a wait loop, with the blocks and gaps that a test asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import pytest

from dsv4_repro.forensics.device_state import CodeImage, CtaState, DeviceState, GridState, LaneState, WarpState
from dsv4_repro.forensics.operands import Memory, Register, operand
from dsv4_repro.forensics.waitloop import CodeView, WaitLoop
from dsv4_repro.kernels.abi import ROW_STATE_SIZE, TopKParams
from dsv4_repro.kernels.build import builtin_image, compile_kernel
from dsv4_repro.kernels.disasm import disassemble
from dsv4_repro.kernels.sasstext import Disassembly

ENTRY = 0x7F12_3400_0000
ROW_STATES = 0x7FD6_7BE0_0000
DEVICES = {75: ("Tesla T4", 75, 40), 80: ("NVIDIA A100", 80, 108), 90: ("NVIDIA H200", 90, 132), 120: ("RTX PRO 6000", 120, 188)}


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterable[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV4_REPRO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@lru_cache(maxsize=32)
def built(sm: int, variant: str = "unguarded") -> tuple[CodeImage, Disassembly]:
    """The builtin top-k for an architecture: code image and disassembly."""
    image = builtin_image(variant, sm)
    return CodeImage(image.cubin, image.function, ENTRY, sm), disassemble(image.cubin, image.function)


@lru_cache(maxsize=32)
def loops(sm: int, variant: str) -> list[WaitLoop]:
    """The wait loops of a build of the top-k."""
    return CodeView(built(sm, variant)[1].lines).wait_loops()


@lru_cache(maxsize=32)
def patient(sm: int, function: str) -> tuple[CodeImage, Disassembly]:
    """A kernel of ``patients.cu``."""
    made = compile_kernel("patients.cu", sm)
    return CodeImage(made.cubin, function, ENTRY, sm), disassemble(made.cubin, function)


def number(name: str) -> int:
    return int(name.lstrip("UR"))


def put(registers: dict[str, int], text: str, address: int) -> None:
    """Set the base registers of an address operand so that it points to ``address``."""
    memory = operand(text)
    assert isinstance(memory, Memory)
    (base,) = memory.bases
    words = (address - memory.offset) & (1 << 64) - 1
    registers[base.name] = words & 0xFFFFFFFF
    registers[f"{base.kind}{number(base.name) + 1}"] = words >> 32


@dataclass
class Scene:
    """A launch of the builtin top-k. ``spinning``: block to (value, target); ``running``: blocks that are at work.

    ``site``: which of the kernel's wait loops; ``step``: how many instructions behind the load the polling lane stands;
    ``warps``: of each block. ``sms``: SMs of the device; blocks are placed round robin in order.
    """

    sm: int = 90
    variant: str = "unguarded"
    grid: int = 16
    ctas: int = 2
    spinning: Mapping[int, tuple[int, int]] = field(default_factory=lambda: {12: (1, 2)})
    running: Iterable[int] = ()
    max_seq_len: int = 16384
    site: int = 0
    step: int = 1
    warps: int = 4
    sms: int | None = None
    place: bool = True
    params: bool = True
    code: bool = True
    memory: Mapping[int, int] = field(default_factory=dict)
    origin: str = "measured"
    lanes: int = 32

    def loop(self) -> WaitLoop:
        return loops(self.sm, self.variant)[self.site]

    def address(self, block: int) -> int:
        """Of the counter of a block's group."""
        return ROW_STATES + block // self.ctas * ROW_STATE_SIZE + 3080

    def state(self) -> DeviceState:
        code, lines = built(self.sm, self.variant)
        loop = self.loop()
        name, sm, sms = DEVICES[self.sm]
        sms = self.sms or sms
        resident = sorted({*self.spinning, *self.running})
        blocks = [self.block(index, block, loop, lines, sms) for index, block in enumerate(resident)]
        params = TopKParams(0x7F00_1000, 0x7F00_2000, 0x7F00_3000, ROW_STATES, 8, 16384, 512, 8192, self.ctas, self.max_seq_len)
        grid = GridState(
            0, 5, code.function, (self.grid, 1, 1), (1024, 1, 1), tuple(blocks), (1, 1, 1), params.pack() if self.params else None,
            code if self.code else None,
        )  # fmt: skip
        return DeviceState("test", self.origin, (grid,), {0: (name, sm, sms)}, dict(self.memory))

    def block(self, index: int, block: int, loop: WaitLoop, lines: Disassembly, sms: int) -> CtaState:
        barrier = next(line.offset for line in lines.lines if line.offset > loop.branch and line.base == "BAR")
        work = next(line.offset for line in lines.lines if line.base == "LDG" and "STRONG" not in line.modifiers)
        spins = block in self.spinning
        warps = []
        for warp in range(self.warps):
            polls = spins and warp == 0
            pc = loop.load + 16 * self.step if polls else barrier + 16 if spins else work
            registers: dict[str, int] = {}
            if polls:
                value, target = self.spinning[block]
                put(registers, loop.address, self.address(block))
                compare = lines.at(loop.compare)
                assert compare is not None
                goal = operand(compare.operands[3])
                assert isinstance(goal, Register)
                registers[goal.name] = target
                load = lines.at(loop.load)
                assert load is not None
                registers.setdefault(load.operands[0], value)
            bank = tuple(registers.get(f"R{n}", 7000 + n) for n in range(48 if self.sm != 120 else 64))
            uniform = tuple(registers.get(f"UR{n}", 9000 + n) for n in range(63))
            lanes = [
                LaneState(lane, (32 * warp + lane, 0, 0), pc if lane == 0 or not polls else barrier - 16, bank, 8, None)
                for lane in range(self.lanes)
            ]
            lanes = [dataclasses.replace(lane, virtual_pc=ENTRY + (lane.pc_offset or 0)) for lane in lanes]
            active = 1 if polls else (1 << self.lanes) - 1
            warps.append(WarpState(warp, (1 << self.lanes) - 1, active, pc, tuple(lanes), uniform, ENTRY + pc))
        return CtaState((block, 0, 0), index % sms if self.place else None, tuple(warps), (0, 0, 0))


@pytest.fixture
def scene() -> type[Scene]:
    return Scene


@pytest.fixture
def kernels() -> tuple[object, object]:
    """(built, patient): code image and disassembly of a kernel written here."""
    return built, patient
