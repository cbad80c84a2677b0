"""What stands in a CUDA core dump: section types, row layouts and the order of the tree. Data only.

Source: NVIDIA's public format description ``cudacoredump.h`` (shipped with cuda-gdb's sources, BSD-style licence), revision with
the additions of driver r575; sizes agree with dumps written by driver 580 on an H200 (grid 0x88, SM 0x30, CTA 0x38, warp 0x40,
lane 0x38). Rows grow at their end with the driver: readers step by ``sh_entsize`` and a field past it is absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "ABI_VERSION",
    "CONSTBANK",
    "CONTEXT",
    "CTA",
    "DEVICE",
    "EM_CUDA",
    "ET_CORE",
    "GRID",
    "LANE",
    "META",
    "MODULE",
    "OSABI_CUDA",
    "SHT_LOUSER",
    "SM",
    "WARP",
    "Kind",
    "Row",
]

EM_CUDA = 190
ET_CORE = 4
OSABI_CUDA = 0x33
ABI_VERSION = 7
SHT_LOUSER = 0x80000000


class Kind(IntEnum):
    """Section types, as the difference from SHT_LOUSER. A section is found by type, parent (sh_link) and row (sh_info)."""

    MANAGED_MEMORY = 1
    GLOBAL_MEMORY = 2
    LOCAL_MEMORY = 3
    SHARED_MEMORY = 4
    REGISTERS = 5
    IMAGE = 6
    RELOCATED_IMAGE = 7
    BACKTRACE = 8
    DEVICES = 9
    CONTEXTS = 10
    SMS = 11
    GRIDS = 12
    CTAS = 13
    WARPS = 14
    LANES = 15
    MODULES = 16
    PREDICATES = 17
    PARAMETERS = 18
    UNIFORM_REGISTERS = 19
    UNIFORM_PREDICATES = 20
    CONSTANT_BANKS = 21
    METADATA = 22
    CONVERGENCE_BARRIERS = 23


#: Section name prefix of each kind; devices and rows follow as ``.dev0.sm1.cta2.wp3.ln4`` (or ``.ctx0``, ``.grid0``).
PREFIX: dict[Kind, str] = {
    Kind.GLOBAL_MEMORY: ".cudbg.global",
    Kind.MANAGED_MEMORY: ".cudbg.global",
    Kind.LOCAL_MEMORY: ".cudbg.local",
    Kind.SHARED_MEMORY: ".cudbg.shared",
    Kind.REGISTERS: ".cudbg.regs",
    Kind.IMAGE: ".cudbg.elfimg",
    Kind.RELOCATED_IMAGE: ".cudbg.relfimg",
    Kind.BACKTRACE: ".cudbg.bt",
    Kind.DEVICES: ".cudbg.devtbl",
    Kind.CONTEXTS: ".cudbg.ctxtbl",
    Kind.SMS: ".cudbg.smtbl",
    Kind.GRIDS: ".cudbg.gridtbl",
    Kind.CTAS: ".cudbg.ctatbl",
    Kind.WARPS: ".cudbg.wptbl",
    Kind.LANES: ".cudbg.lntbl",
    Kind.MODULES: ".cudbg.modtbl",
    Kind.PREDICATES: ".cudbg.pred",
    Kind.PARAMETERS: ".cudbg.param",
    Kind.UNIFORM_REGISTERS: ".cudbg.uregs",
    Kind.UNIFORM_PREDICATES: ".cudbg.upred",
    Kind.CONSTANT_BANKS: ".cudbg.cbankstbl",
    Kind.METADATA: ".cudbg.meta",
    Kind.CONVERGENCE_BARRIERS: ".cudbg.cbu_bar",
}


@dataclass(frozen=True)
class Row:
    """A table's row: field names with sizes in bytes (8 or 4, little-endian, unsigned), in order and without gaps.

    ``minimum``: bytes of a row of the first drivers; a shorter row cannot be read. ``kind``: the section type that holds it.
    """

    kind: Kind
    minimum: int
    fields: tuple[tuple[str, int], ...]

    @cached_property
    def size(self) -> int:
        """Bytes of a row with all fields known here."""
        return sum(width for _, width in self.fields)

    def dtype(self, entsize: int) -> np.dtype[Any]:
        """numpy dtype of one row that is ``entsize`` bytes long: the fields that fit, then whatever newer drivers added."""
        import numpy as np

        names, formats, offsets = [], [], []
        at = 0
        for name, width in self.fields:
            if at + width <= entsize:
                names.append(name)
                formats.append(f"<u{width}")
                offsets.append(at)
            at += width
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": entsize})

    def pack(self, **values: int) -> bytes:
        """One full row; fields not given are 0. KeyError for a field that the row does not have."""
        unknown = set(values) - {name for name, _ in self.fields}
        if unknown:
            raise KeyError(f"{self.kind.name} rows have no {sorted(unknown)}")
        return b"".join((values.get(name, 0) & ((1 << 8 * width) - 1)).to_bytes(width, "little") for name, width in self.fields)


def _row(kind: Kind, minimum: int, quads: str, words: str, *more: tuple[int, str]) -> Row:
    fields = [(name, 8) for name in quads.split()] + [(name, 4) for name in words.split()]
    for width, names in more:
        fields += [(name, width) for name in names.split()]
    return Row(kind, minimum, tuple(fields))


DEVICE = _row(
    Kind.DEVICES,
    72,
    "name_at type_at sm_type_at",
    "device pci_bus pci_device sms warps_per_sm lanes_per_warp registers predicates sm_major sm_minor instruction_bytes status "
    "uniform_registers uniform_predicates convergence_barriers _pad0",
)
CONTEXT = _row(Kind.CONTEXTS, 40, "context shared_window local_window global_window", "device thread")
MODULE = _row(Kind.MODULES, 8, "module", "")
GRID = _row(
    Kind.GRIDS,
    104,
    "grid context function entry module parent params_offset",
    "kernel_type origin status registers grid_x grid_y grid_z block_x block_y block_z blocking host_thread "
    "cluster_x cluster_y cluster_z _pad0 preferred_x preferred_y preferred_z _pad1",
)
CONSTBANK = _row(Kind.CONSTANT_BANKS, 16, "address", "size bank")
#: The last two words are newer than the public description: rows of 0x30 bytes were seen (driver 580), 0x28 are described.
SM = _row(
    Kind.SMS,
    8,
    "",
    "sm _pad0 exception error_pc_valid",
    (8, "error_pc"),
    (4, "target_valid target_x target_y target_z _more0 _more1"),
)
CTA = _row(
    Kind.CTAS,
    24,
    "grid",
    "x y z _pad0 cluster_x cluster_y cluster_z _pad1 cluster_dim_x cluster_dim_y cluster_dim_z _pad2",
)
WARP = _row(
    Kind.WARPS,
    32,
    "error_pc",
    "warp valid active broken error_pc_valid _pad0 registers _pad1 shared_bytes _pad2 "
    "in_syscall cbu_active cbu_exited cbu_collective",
)
LANE = _row(
    Kind.LANES,
    48,
    "virtual_pc function_pc",
    "lane x y z exception call_depth syscall_depth cc cbu_state _pad0",
)
META = _row(Kind.METADATA, 32, "generator_at", "driver_major driver_minor cuda_major cuda_minor flags timestamp")
