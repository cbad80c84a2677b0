"""Constant bank 0 as the launcher fills it, by architecture. An offset that is not listed is an error, never a zero.

Source: the constant offsets that shipped kernels of sm_75 to sm_120 read, and EIATTR_PARAM_CBANK of their cubins.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import CubinError

__all__ = ["ConstantLayout", "layout_for"]

#: High word of generic addresses of the shared window: any value that is not the high word of a global address.
SHARED_WINDOW = 0x7E00
#: sm_90 and later keep 1 KiB at the start of shared memory for the system.
RESERVED_SHARED = 0x400


@dataclass(frozen=True, slots=True)
class ConstantLayout:
    """Byte offsets in bank 0. ``shared_base``: where a CTA's own shared memory starts."""

    params: int
    params_size: int
    block_dim: int
    grid_dim: int
    stack: int
    descriptor: int | None
    window: int | None
    shared_base: int
    shared_window: int = SHARED_WINDOW

    def known(self, offset: int) -> bool:
        """Whether the launcher sets the word at ``offset``."""
        if offset % 4:
            return False
        if self.params <= offset < self.params + self.params_size:
            return True
        places = [self.stack, *(self.block_dim + 4 * k for k in range(3)), *(self.grid_dim + 4 * k for k in range(3))]
        for pair in (self.descriptor, self.window):
            if pair is not None:
                places += [pair, pair + 4]
        return offset in places

    def values(self, params: bytes, grid: tuple[int, int, int], block: tuple[int, int, int], stack_top: int) -> dict[int, int]:
        """Word by offset for one launch. The memory descriptor's value never matters."""
        words = {
            self.params + k: int.from_bytes(params[k : k + 4].ljust(4, b"\0"), "little") for k in range(0, self.params_size, 4)
        }
        for k in range(3):
            words[self.block_dim + 4 * k] = block[k]
            words[self.grid_dim + 4 * k] = grid[k]
        words[self.stack] = stack_top
        if self.descriptor is not None:
            words[self.descriptor] = words[self.descriptor + 4] = 0
        if self.window is not None:
            words[self.window], words[self.window + 4] = 0, self.shared_window
        return words


def layout_for(sm: int, params: int, params_size: int) -> ConstantLayout:
    """The layout of an architecture such as 90; CubinError for one that is not known."""
    major = sm // 10
    if major in (7, 8) and sm >= 75:
        return ConstantLayout(params, params_size, 0x0, 0xC, 0x28, None if sm == 75 else 0x118, 0x18, 0)
    if major == 9:
        return ConstantLayout(params, params_size, 0x0, 0xC, 0x28, 0x208, None, RESERVED_SHARED)
    if major in (10, 11, 12):
        return ConstantLayout(params, params_size, 0x360, 0x370, 0x37C, 0x358, None, RESERVED_SHARED)
    raise CubinError(f"machine code of sm_{sm} cannot be interpreted: known are sm_75 to sm_12x")
