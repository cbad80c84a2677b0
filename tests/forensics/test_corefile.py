"""The core dump reader against the writer, old row sizes, gaps, and everything that is no dump."""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from dsv4_repro.errors import CoreFileError
from dsv4_repro.forensics import coretables, limits
from dsv4_repro.forensics.codeimage import EmbeddedImage
from dsv4_repro.forensics.compare import compare_states
from dsv4_repro.forensics.corefile import INTERPRETER, open_core, read_core
from dsv4_repro.forensics.coretables import CTA, DEVICE, GRID, LANE, SM, WARP, Kind
from dsv4_repro.forensics.corewriter import CoreOptions, write_core
from dsv4_repro.forensics.device_state import CtaState, DeviceState, GridState
from dsv4_repro.kernels.disasm import disassemble

SHDR = struct.Struct("<IIQQQQIIQQ")


def ctas_of(grid: GridState) -> tuple[CtaState, ...]:
    """The CTAs of a grid whose CTAs were read."""
    assert grid.ctas is not None
    return grid.ctas


@pytest.fixture
def dump(tmp_path: Path) -> Callable[..., Path]:
    def make(state: DeviceState, **options: Any) -> Path:
        return write_core(tmp_path / "hang.nvcudmp", state, CoreOptions(**options))

    return make


def sections(path: Path) -> list[tuple[int, ...]]:
    raw = path.read_bytes()
    (shoff,) = struct.unpack_from("<Q", raw, 0x28)
    return [SHDR.unpack_from(raw, shoff + SHDR.size * n) for n in range((len(raw) - shoff) // SHDR.size)]


# --- round trip -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sm", [75, 90, 120])
def test_round_trip(scene: Any, dump: Callable[..., Path], sm: int) -> None:
    """Everything that a state holds comes back: blocks, warps, lanes, PCs, registers, predicates, parameters, devices, memory."""
    state = scene(sm=sm, memory={0x7FD67BE89668: 1, 0x7FD67BE8966C: 0}).state()
    back = read_core(dump(state))
    assert compare_states(state, back) == []
    assert back.devices == state.devices
    assert back.memory == state.memory
    assert back.unread == ()
    assert back.origin == "measured"
    (one,), (two,) = state.grids, back.grids
    assert (two.kernel, two.grid_dim, two.block_dim, two.params) == (one.kernel, one.grid_dim, one.block_dim, one.params)
    assert two.ctas == one.ctas


def test_the_code_comes_back_as_one_function(scene: Any, dump: Callable[..., Path]) -> None:
    """What the dump holds relocated is disassembled to the same instructions, offsets from the function's start."""
    state = scene().state()
    code = read_core(dump(state)).grids[0].code
    assert code is not None
    assert code.entry == state.grids[0].code.entry
    assert code.sm == 90
    original = state.grids[0].code
    assert disassemble(code.cubin, code.function).lines == disassemble(original.cubin, original.function).lines
    assert len(code.cubin) < len(original.cubin)


def test_the_cut_function_is_the_same_in_every_run(scene: Any, tmp_path: Path) -> None:
    """Another load address, another dump, the same cubin: its disassembly is cached once."""
    cuts = []
    for index, entry in enumerate((0x7F12_3400_0000, 0x7E00_0010_0000)):
        state = scene().state()
        grid = state.grids[0]
        moved = dataclasses.replace(grid, code=dataclasses.replace(grid.code, entry=entry))
        path = write_core(tmp_path / f"{index}.nvcudmp", dataclasses.replace(state, grids=(moved,)))
        code = read_core(path).grids[0].code
        assert code is not None
        cuts.append(code)
    assert cuts[0].entry != cuts[1].entry
    assert cuts[0].cubin == cuts[1].cubin


def test_an_interpreted_state_stays_interpreted(scene: Any, dump: Callable[..., Path]) -> None:
    path = dump(scene(origin="interpreted").state())
    with open_core(path) as found:
        assert found.state.origin == "interpreted"
        assert found.metadata["generator"].startswith(INTERPRETER)


def test_pyelftools_reads_it_as_a_driver_wrote_it(scene: Any, dump: Callable[..., Path]) -> None:
    """Header, names, links and row sizes as a driver of series 580 writes them (measured on an H200)."""
    path = dump(scene().state())
    with path.open("rb") as stream:
        elf = ELFFile(stream)
        assert elf.header.e_type == "ET_CORE"
        assert elf.header.e_machine in (190, "EM_CUDA")
        assert elf.header.e_ident.EI_OSABI == 0x33
        names = {section.name: section for section in elf.iter_sections()}
    sizes = {
        "gridtbl.dev0": 0x88,
        "smtbl.dev0": 0x30,
        "ctatbl.dev0.sm0": 0x38,
        "wptbl.dev0.sm0.cta0": 0x40,
        "lntbl.dev0.sm0.cta0.wp0": 0x38,
    }
    for name, size in sizes.items():
        assert names[".cudbg." + name].header.sh_entsize == size
    assert names[".cudbg.param.dev0.grid0"].header.sh_size == 56
    assert names[".cudbg.smtbl.dev0"].header.sh_size == 132 * 0x30
    for name in (
        "relfimg.dev0.ctx0",
        "modtbl.dev0.ctx0",
        "uregs.dev0.sm0.cta0.wp0",
        "regs.dev0.sm0.cta0.wp0.ln0",
        "pred.dev0.sm0.cta0.wp0.ln0",
    ):
        assert ".cudbg." + name in names


@pytest.mark.parametrize("rows", [
    {Kind.GRIDS: 104, Kind.SMS: 8, Kind.CTAS: 24, Kind.WARPS: 32, Kind.LANES: 48, Kind.DEVICES: 72},
    {Kind.GRIDS: 120, Kind.SMS: 24, Kind.CTAS: 40, Kind.WARPS: 40, Kind.LANES: 48, Kind.DEVICES: 80},
    {Kind.GRIDS: 0x90, Kind.SMS: 0x40, Kind.CTAS: 0x48, Kind.WARPS: 0x58, Kind.LANES: 0x40, Kind.DEVICES: 0x60},
])  # fmt: skip
def test_rows_of_other_drivers(scene: Any, dump: Callable[..., Path], rows: dict[Kind, int]) -> None:
    """Rows grow at their end: older ones lack fields, newer ones have more; the step is the section's entry size."""
    state = scene().state()
    back = read_core(dump(state, row_bytes=rows))
    assert compare_states(state, back) == []
    assert back.unread == ()


@pytest.mark.parametrize("row", [DEVICE, GRID, SM, CTA, WARP, LANE], ids=lambda row: row.kind.name)
def test_rows_cut_anywhere(scene: Any, dump: Callable[..., Path], row: Any) -> None:
    """An entry size between two drivers', or no multiple of a word: fields that do not fit are absent, nothing fails."""
    state = scene(warps=1, lanes=2, sms=2).state()
    for size in [*range(row.minimum, row.size + 9, 4), row.minimum + 1, row.size - 3]:
        assert compare_states(state, read_core(dump(state, row_bytes={row.kind: size}))) == []


def test_rows_too_short_are_said(scene: Any, dump: Callable[..., Path]) -> None:
    back = read_core(dump(scene().state(), row_bytes={Kind.CTAS: 16}))
    assert back.grids[0].ctas == ()
    assert any("rows of 16 bytes" in item.why for item in back.unread)


def test_table_sizes_of_the_public_description() -> None:
    assert [row.size for row in (GRID, SM, CTA, WARP, LANE)] == [0x88, 0x30, 0x38, 0x40, 0x38]
    assert GRID.pack(grid=5, entry=0x1234)[24:32] == (0x1234).to_bytes(8, "little")
    with pytest.raises(KeyError):
        GRID.pack(nonsense=1)


# --- several of everything --------------------------------------------------------------------------------------------


def test_several_devices_and_grids(scene: Any, dump: Callable[..., Path]) -> None:
    base = scene().state()
    grid = base.grids[0]
    others = (
        grid,
        dataclasses.replace(grid, grid_id=9, ctas=tuple(dataclasses.replace(cta, sm=3) for cta in grid.ctas), params=None),
        dataclasses.replace(grid, device=2, grid_id=5, ctas=()),
    )
    state = dataclasses.replace(base, grids=others, devices={0: ("A", 90, 132), 2: ("B", 90, 132)})
    back = read_core(dump(state))
    assert compare_states(state, back) == []
    assert [(item.device, item.grid_id, len(ctas_of(item))) for item in back.grids] == [(0, 5, 1), (0, 9, 1), (2, 5, 0)]
    assert [item.what for item in back.unread] == ["parameters of grid 9"]


def test_no_resident_block(scene: Any, dump: Callable[..., Path]) -> None:
    back = read_core(dump(scene(spinning={}).state()))
    assert back.grids[0].ctas == ()
    assert back.grids[0].complete


@pytest.mark.parametrize(("kind", "what"), [
    (Kind.PARAMETERS, "parameters of grid 5"),
    (Kind.RELOCATED_IMAGE, "machine code of grid 5"),
    (Kind.DEVICES, "device table"),
    (Kind.GRIDS, "grid table of device 0"),
    (Kind.SMS, "SM table of device 0"),
    (Kind.WARPS, "warps of block (12, 0, 0)"),
])  # fmt: skip
def test_what_is_missing_is_said(scene: Any, dump: Callable[..., Path], kind: Kind, what: str) -> None:
    back = read_core(dump(scene().state(), omit={kind}))
    assert what in {item.what for item in back.unread}


@pytest.mark.parametrize("kind", [Kind.REGISTERS, Kind.PREDICATES, Kind.UNIFORM_REGISTERS, Kind.LANES])
def test_missing_registers_are_none_not_zero(scene: Any, dump: Callable[..., Path], kind: Kind) -> None:
    warp = ctas_of(read_core(dump(scene().state(), omit={kind})).grids[0])[0].warps[0]
    if kind is Kind.LANES:
        assert warp.lanes == ()
        assert warp.pc_offset is None
    else:
        lane = warp.lanes[0]
        read = {Kind.REGISTERS: lane.registers, Kind.PREDICATES: lane.predicates, Kind.UNIFORM_REGISTERS: warp.uniform_registers}
        assert read[kind] is None


def test_blocks_of_a_grid_without_a_row(scene: Any, dump: Callable[..., Path]) -> None:
    base = scene().state()
    path = dump(dataclasses.replace(base, grids=()), omit=())
    state = read_core(path)
    assert state.grids == ()
    assert any(item.what == "grids" for item in state.unread)


def test_memory_is_read_where_the_dump_has_it(scene: Any, dump: Callable[..., Path]) -> None:
    path = dump(scene().state(), memory={0x7000_0000_0000: bytes(range(64)), 0x7000_1000_0000: 1 << 24})
    with open_core(path) as found:
        assert found.word(0x7000_0000_0004) == 0x07060504
        assert found.word(0x7000_0000_003C) == 0x3F3E3D3C
        assert found.word(0x7000_0000_003E) is None, "a word that ends behind the section"
        assert found.word(0x7000_1000_0000 + (1 << 24) - 4) == 0
        assert found.word(0x6FFF_FFFF_FFFC) is None
        assert found.word(0x7000_2000_0000) is None
        assert found.state.memory == {}, "a full dump's memory is not copied into the state"


def test_device_exceptions(scene: Any, dump: Callable[..., Path]) -> None:
    path = dump(scene().state())
    raw = bytearray(path.read_bytes())
    lanes = next(row for row in sections(path) if row[1] == coretables.SHT_LOUSER + Kind.LANES)
    struct.pack_into("<I", raw, lanes[4] + 32, 14)
    path.write_bytes(raw)
    with open_core(path) as found:
        (fault,) = found.faults
        assert (fault.what, fault.block, fault.lane) == ("warp illegal address", (12, 0, 0), 0)


# --- which function ---------------------------------------------------------------------------------------------------


def image_of(cubin: bytes) -> EmbeddedImage:
    return EmbeddedImage(lambda start, length: cubin[start : start + length], len(cubin), "cubin")


def test_function_by_address(kernels: Any) -> None:
    code, _ = kernels[1](90, "flag_wait")
    image = image_of(code.cubin)
    assert {item.name for item in image.kernels()} >= {"flag_wait", "grid_barrier_once", "healthy_worker"}
    found = image.named("flag_wait")
    assert found is not None
    assert found.kernel
    assert image.named("flag_wai") is None
    cut = image_of(image.function_image(found))
    assert [item.name for item in cut.kernels()] == ["flag_wait"]


@pytest.mark.parametrize("function", ["grid_barrier_once", "named_barrier_stuck", "healthy_worker"])
def test_the_right_kernel_of_a_module_with_many(scene: Any, dump: Callable[..., Path], kernels: Any, function: str) -> None:
    code, _ = kernels[1](90, function)
    base = scene().state()
    grid = dataclasses.replace(base.grids[0], kernel=function, code=code)
    back = read_core(dump(dataclasses.replace(base, grids=(grid,)))).grids[0]
    assert back.kernel == function
    assert back.code is not None
    assert back.code.function == function


def test_entry_that_no_symbol_has(scene: Any, dump: Callable[..., Path]) -> None:
    """The grid's entry address is changed: the module's only kernel is taken, and that it was is said."""
    path = dump(scene().state())
    raw = bytearray(path.read_bytes())
    grids = next(row for row in sections(path) if row[1] == coretables.SHT_LOUSER + Kind.GRIDS)
    struct.pack_into("<Q", raw, grids[4] + 24, 0x1234_5678_0000)
    path.write_bytes(raw)
    back = read_core(path)
    assert "persistent_topk_kernel" in back.grids[0].kernel
    assert any("no symbol at 0x123456780000" in item.why for item in back.unread)


# --- bad input --------------------------------------------------------------------------------------------------------

HEADER = b"\x7fELF\x02\x01\x01\x33\x07" + bytes(7)


def header(kind: int = 4, machine: int = 190, shoff: int = 64, shentsize: int = 64, shnum: int = 3, shstrndx: int = 0) -> bytes:
    return HEADER + struct.pack("<HHIQQQIHHHHHH", kind, machine, 1, 0, 0, shoff, 0, 64, 0, 0, shentsize, shnum, shstrndx)


BAD = {
    "empty": (b"", "empty"),
    "text": (b"not a dump at all, but longer than a header of sixty-four bytes is, so that it is read", "not an ELF"),
    "short": (HEADER, "16 of 64"),
    "gzip": (b"\x1f\x8b" + bytes(80), "gzip"),
    "32-bit": (b"\x7fELF\x01\x01\x01" + bytes(80), "32-bit"),
    "big-endian": (b"\x7fELF\x02\x02\x01" + bytes(80), "little-endian"),
    "x86-64": (header(machine=62), "x86-64"),
    "arm": (header(machine=183), "AArch64"),
    "cubin": (header(kind=2), "not a core dump"),
    "no sections": (header(shoff=0), "no section table"),
    "header size": (header(shentsize=40), "section headers of 40"),
    "table past the end": (header(shoff=1 << 40), "past the file's end"),
    "no entries": (header(shnum=0) + bytes(64), "empty section table"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_not_a_dump(tmp_path: Path, name: str) -> None:
    raw, message = BAD[name]
    path = tmp_path / "bad.nvcudmp"
    path.write_bytes(raw)
    with pytest.raises(CoreFileError) as caught:
        read_core(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.exit_status == 5


def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(CoreFileError, match="cannot be opened"):
        read_core(tmp_path / "absent")
    with pytest.raises(CoreFileError, match="plain file"):
        read_core(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CoreFileError, match="plain file"):
        read_core(tmp_path / "fifo")


def test_descriptors_are_closed(scene: Any, dump: Callable[..., Path], tmp_path: Path) -> None:
    path = dump(scene().state())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        read_core(path)
        (tmp_path / "bad").write_bytes(HEADER)
        with pytest.raises(CoreFileError):
            read_core(tmp_path / "bad")
    assert len(os.listdir("/proc/self/fd")) == before


def test_truncated_at_every_section(scene: Any, dump: Callable[..., Path], tmp_path: Path) -> None:
    """Cut anywhere: a typed error, or a partial state that says what is missing. The writer puts the table last, as libelf does."""
    path = dump(scene(warps=2, lanes=4).state())
    raw = path.read_bytes()
    (shoff,) = struct.unpack_from("<Q", raw, 0x28)
    cut = tmp_path / "cut.nvcudmp"
    table = [shoff + SHDR.size * n for n in range((len(raw) - shoff) // SHDR.size)]
    for end in sorted({row[4] for row in sections(path)} | set(table)):
        cut.write_bytes(raw[:end])
        if end < shoff + SHDR.size:
            with pytest.raises(CoreFileError):
                read_core(cut)
        else:
            assert any("section headers" in item.what for item in read_core(cut).unread)


def test_contents_past_the_end(scene: Any, dump: Callable[..., Path]) -> None:
    """A table at the front of a file that was cut: what lies past the end is named, the rest is read."""
    path = dump(scene(warps=2, lanes=4).state())
    raw = bytearray(path.read_bytes())
    (shoff,) = struct.unpack_from("<Q", raw, 0x28)
    for number, row in enumerate(sections(path)):
        if row[1] == coretables.SHT_LOUSER + Kind.LANES:
            struct.pack_into("<Q", raw, shoff + SHDR.size * number + 24, len(raw) + 4096)
    path.write_bytes(raw)
    state = read_core(path)
    assert ctas_of(state.grids[0])[0].warps[0].lanes == ()
    assert any("past the file's end" in item.why for item in state.unread)


def bomb(path: Path, count: int, make: Callable[[int], bytes]) -> None:
    """A dump with ``count`` sections of which each header is ``make(number)``."""
    with path.open("wb") as stream:
        first = SHDR.pack(0, 0, 0, 0, 0, count, 0, 0, 0, 0)
        stream.write(header(shnum=0, shoff=64))
        stream.write(first)
        step = 1 << 14
        for begin in range(1, count, step):
            stream.write(b"".join(make(number) for number in range(begin, min(begin + step, count))))


def test_a_million_sections_with_cyclic_links(tmp_path: Path) -> None:
    path = tmp_path / "bomb.nvcudmp"
    count = 1_000_000
    user = coretables.SHT_LOUSER
    bomb(
        path,
        count,
        lambda n: SHDR.pack(n, user + 1 + n % 23, 0, n, n * 77 % (1 << 44), 1 << 40, (n * 7919 + 1) % count, n % 97, 1, 56),
    )
    state = read_core(path)
    assert state.unread
    assert len(state.unread) <= limits.MAX_UNREAD + 1


def test_more_sections_than_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECTIONS", 1000)
    path = tmp_path / "bomb.nvcudmp"
    bomb(path, 5000, lambda n: SHDR.pack(0, 1, 0, 0, 0, 0, 0, 0, 0, 0))
    assert any("4000 of 5000" in item.what for item in read_core(path).unread)


def test_overlapping_tables_cost_no_more_than_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table lies over the same bytes and claims all of them: rows are cut to what hardware can hold."""
    monkeypatch.setattr(limits, "MAX_CTAS", 256)
    monkeypatch.setattr(limits, "MAX_WARPS", 512)
    user, path = coretables.SHT_LOUSER, tmp_path / "overlap.nvcudmp"
    kinds = [Kind.DEVICES, Kind.SMS, Kind.CTAS, Kind.WARPS, Kind.LANES, Kind.REGISTERS]
    rows = [(Kind.DEVICES, 0, 0)] + [
        (kind, parent + 1, info) for parent, kind in enumerate(kinds[1:]) for info in range(64)
    ]  # fmt: skip
    places = [1 + next(n for n, row in enumerate(rows) if row[0] is kind) for kind in kinds]
    content = os.urandom(1 << 20)
    with path.open("wb") as stream:
        stream.write(header(shnum=len(rows) + 1, shoff=64 + len(content)) + content + bytes(64))
        for kind, parent, info in rows:
            link = places[kinds.index(kind) - 1] if parent else 0
            stream.write(SHDR.pack(0, user + kind, 0, 0, 64, len(content), link, info, 1, 72))
    state = read_core(path)
    assert state.unread


def test_two_gigabytes_of_nothing(scene: Any, dump: Callable[..., Path]) -> None:
    """A sparse dump: its size costs neither memory nor time."""
    path = dump(scene().state(), memory={0x7000_0000_0000: 2 << 30})
    assert path.stat().st_size > 2 << 30
    with open_core(path) as found:
        assert found.word(0x7000_4000_0000) == 0
        assert compare_states(scene().state(), found.state) == []


def test_sparse_file_without_a_table(tmp_path: Path) -> None:
    path = tmp_path / "sparse.nvcudmp"
    with path.open("wb") as stream:
        stream.write(header(shoff=1 << 30, shnum=60000))
        stream.truncate(2 << 30)
    state = read_core(path)
    assert state.grids == ()
    assert state.unread


def test_registers_of_a_full_device(scene: Any, dump: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """More lanes than are kept: one for each PC of each warp, and that the rest was not read is said."""
    monkeypatch.setattr(limits, "MAX_FULL_LANES", 100)
    state = scene(spinning={12: (1, 2)}, warps=4).state()
    back = read_core(dump(state))
    assert compare_states(state, back) == []
    warp = ctas_of(back.grids[0])[0].warps[0]
    assert [lane.lane for lane in warp.lanes] == [0, 1]
    assert [len(other.lanes) for other in ctas_of(back.grids[0])[0].warps] == [2, 1, 1, 1]
    assert any("registers of most lanes" in item.what for item in back.unread)


def test_a_writer_that_dies_leaves_nothing(scene: Any, tmp_path: Path) -> None:
    state = scene().state()
    broken = dataclasses.replace(state, grids=(dataclasses.replace(state.grids[0], params="not bytes"),))
    with pytest.raises((TypeError, AttributeError)):
        write_core(tmp_path / "x.nvcudmp", broken)
    assert list(tmp_path.iterdir()) == []
