"""What goes into a bundle of limited size, and what goes first when it does not fit. Pure: sizes in, decisions out.

The rule, from the first to go to the last (documented in docs/bundle.md):

==== ==========================================================================================================
rank what
==== ==========================================================================================================
8    raw core dumps (only there with ``--raw``)
7    files of no known kind
6    row states and other binary artefacts
5    device state as JSON tables (the stripped dump holds the same)
4    logs, stacks, metrics and other texts: first cut around their ends and the lines that the verdict cites, then dropped
3    stripped core dumps and the code of the stuck kernel
2    the timeline
1    report.html (can be rendered again from the diagnosis)
0    manifest, redaction report, run record, diagnosis, report.md, environment: never
==== ==========================================================================================================

Within a rank the largest goes first, and by name where sizes are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import RunStoreError

__all__ = ["ESSENTIAL", "Decision", "Piece", "fit"]

ESSENTIAL = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """One file of the bundle. ``packed``: its bytes in the archive, compressed and with its two directory entries."""

    name: str
    packed: int
    rank: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What happened to a file: ``dropped``, or ``cut`` (once or more)."""

    name: str
    what: str
    why: str


def fit(pieces: Sequence[Piece], limit: int, shrink: Callable[[str], int | None]) -> tuple[list[Piece], list[Decision]]:
    """(the pieces that go in, what was cut or dropped). ``shrink(name)`` makes a file's next smaller version and returns its packed
    size, None if there is none. Raises RunStoreError if the essential files alone are larger than ``limit`` bytes.
    """
    kept = {piece.name: piece for piece in pieces}
    decisions: dict[str, Decision] = {}
    total = sum(piece.packed for piece in pieces)
    while total > limit:
        worst = max(kept.values(), key=lambda piece: (piece.rank, piece.packed, piece.name))
        if worst.rank == ESSENTIAL:
            raise RunStoreError(
                f"the report and its records alone take {total} bytes, more than the {limit} that a bundle may have",
                help_text=f"Allow more: --max-size {-(-total // 1_000_000)}MB",
            )
        smaller = shrink(worst.name)
        if smaller is not None and smaller < worst.packed:
            total -= worst.packed - smaller
            kept[worst.name] = Piece(worst.name, smaller, worst.rank)
            decisions[worst.name] = Decision(worst.name, "cut", "the size limit")
        else:
            total -= worst.packed
            del kept[worst.name]
            decisions[worst.name] = Decision(worst.name, "dropped", "the size limit")
    return [kept[piece.name] for piece in pieces if piece.name in kept], [decisions[name] for name in sorted(decisions)]
