"""All 2^32 lengths through the conditions that the machine code came to: a second opinion on the solver's answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...kernels.sass.symbolic_terms import Terms, compile_numpy
from .verdicts import Witness

__all__ = ["exhaustive_lengths"]

#: What was counted in this process, by condition and sizes.
_COUNTED: dict[str, int] = {}


def exhaustive_lengths(pairs: Sequence[tuple[Any, Any]], terms: Terms, witness: Witness, *, step: int = 1 << 18) -> int | None:
    """Of all 2^32 lengths: how many make, in any of ``pairs``, the one CTA wait and the other not come, at the witness's sizes.

    None where a condition depends on something that is not an input. NumPy over the same terms that the solver saw; conditions that
    are spelled the same were run before and are not run again.
    """
    import numpy as np

    any_pair: Any = False
    for waits, gone in pairs:
        any_pair = terms.either(any_pair, terms.both(waits, gone))
    if type(any_pair) is bool:
        return (1 << 32) if any_pair else 0
    fixed = {"max_seq_len": witness.max_seq_len & 0xFFFFFFFF, "stride": witness.stride & 0xFFFFFFFF, "chunk": 8192}
    key = f"{any_pair!r} {sorted(fixed.items())}"
    if key not in _COUNTED:
        try:
            function = compile_numpy(any_pair, "len", fixed)
        except ValueError:
            return None
        total = 0
        base = np.arange(step, dtype=np.uint32)
        for first in range(0, 1 << 32, step):
            total += int(np.count_nonzero(np.broadcast_to(function(base + np.uint32(first)), base.shape)))
        _COUNTED[key] = total
    return _COUNTED[key]
