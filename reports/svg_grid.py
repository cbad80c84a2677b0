"""The CTA grid of the stuck kernel as a picture: who is running, spinning, exited, never started, and of whom nothing is known.

``grid_picture`` counts from the diagnosis's ledger (or, where there is none, from its waits: then only the waiting blocks are
known); ``grid_svg`` draws one square a block, or one for a run of neighbouring blocks when the grid is large, so that a grid of a
hundred thousand blocks costs no more than one of four thousand. States differ in mark and outline, not in colour alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..forensics.records import Diagnosis
from .document import inferred_lines, rank_of
from .svg import Drawing, text_width, wrap_words

__all__ = ["STATES", "GridPicture", "grid_picture", "grid_svg"]

#: Code -> (state, its words in the legend). The code is what a square of several blocks takes: the highest of them.
STATES: tuple[tuple[str, str], ...] = (
    ("unlisted", "not told of"),
    ("exited", "exited"),
    ("unknown", "fate not known"),
    ("never_started", "never started"),
    ("running", "resident, running"),
    ("spinning", "resident, spinning"),
)
_CODES = {name: code for code, (name, _) in enumerate(STATES)}
_MOST_CELLS = 4096
#: Blocks that are counted one by one; a larger grid is cut and says so.
_MOST_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True)
class GridPicture:
    """``codes``: one byte a block, an index of STATES. ``ctas_per_group``: 0 where groups differ or are not known.

    ``total``: blocks of the launch; ``codes`` is shorter only when the grid is larger than is drawn. ``inferred``: which lists are
    inference. ``other_kernels``: waits of further kernels or ranks that this picture does not show.
    """

    kernel: str
    grid: tuple[int, int, int]
    codes: bytes
    total: int
    ctas_per_group: int
    groups: int
    from_ledger: bool
    inferred: tuple[str, ...] = ()
    other_kernels: int = 0

    def count(self, state: str) -> int:
        """Blocks in a state."""
        return self.codes.count(_CODES[state])


def _linear(block: tuple[int, int, int], grid: tuple[int, int, int]) -> int:
    return block[0] + grid[0] * (block[1] + grid[1] * block[2])


def grid_picture(diagnosis: Diagnosis) -> GridPicture | None:
    """The picture's numbers; None if the diagnosis names neither waiting blocks nor a ledger."""
    waits = diagnosis.waits
    if not waits and not diagnosis.ledger:
        return None
    first = waits[0] if waits else None
    # One picture, one launch: of several ranks the one whose wait comes first.
    ledger = [group for group in diagnosis.ledger if first is None or rank_of(group) in (None, first.rank)]
    grid = first.grid if first else (0, 1, 1)
    listed = [
        (group, state, block)
        for group in ledger
        for state in ("exited", "unknown", "never_started", "running", "spinning")
        for block in getattr(group, state)
    ]
    total = max(grid[0], 0) * max(grid[1], 0) * max(grid[2], 0)
    if not total:
        total = 1 + max((block for _, _, block in listed), default=-1)
    if total <= 0:
        return None
    codes = bytearray(min(total, _MOST_BLOCKS))
    for _, state, block in listed:
        if 0 <= block < len(codes):
            codes[block] = max(codes[block], _CODES[state])
    same = [
        wait
        for wait in waits
        if first is not None and (wait.kernel, wait.grid, wait.rank) == (first.kernel, first.grid, first.rank)
    ]
    for wait in same:
        at = _linear(wait.block, grid)
        if 0 <= at < len(codes) and codes[at] != _CODES["running"]:
            codes[at] = _CODES["spinning"]
    sizes = {
        sum(len(getattr(group, state)) for state in ("exited", "unknown", "never_started", "running", "spinning"))
        for group in ledger
    }
    others = {(wait.kernel, wait.grid, wait.rank) for wait in waits} - {(w.kernel, w.grid, w.rank) for w in same}
    return GridPicture(
        kernel=first.kernel if first else "",
        grid=grid,
        codes=bytes(codes),
        total=total,
        ctas_per_group=sizes.pop() if len(sizes) == 1 else 0,
        groups=len(ledger),
        from_ledger=bool(ledger),
        inferred=tuple(inferred_lines(ledger)),
        other_kernels=len(others),
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """``per``: blocks in a square; ``size``: its side; ``pitch`` from one to the next; ``columns``; ``gap`` after a group."""

    per: int
    size: float
    columns: int
    group_cells: int
    gap: float
    numbered: bool


def _layout(picture: GridPicture, width: float) -> _Layout:
    blocks = len(picture.codes)
    per = -(-blocks // _MOST_CELLS)
    cells = -(-blocks // per)
    numbered = cells <= 128 and per == 1
    size = 30.0 if numbered else 14.0 if cells <= 1024 else 8.0
    group = picture.ctas_per_group if per == 1 and picture.ctas_per_group > 1 else 0
    gap = 6.0 if group and group <= 64 else 0.0
    pitch = size + 2
    left = 0.0 if numbered else 62.0
    room = width - left - 2
    columns = max(int(room / pitch), 1)
    if group and gap:
        groups_in_row = max(int((room + gap) / (group * pitch + gap)), 1)
        columns = min(groups_in_row * group, columns)
        if group > columns:
            gap = 0.0
    return _Layout(per, size, columns, group, gap, numbered)


def _square(x: float, y: float, s: float) -> str:
    return f"M{x:.1f} {y:.1f}h{s:g}v{s:g}h-{s:g}z"


def _mark(state: str, x: float, y: float, s: float, *, numbered: bool = False) -> str:
    """What distinguishes a state without colour: a cross, a stroke, a slash; nothing for the others. Small under a number."""
    if numbered:
        x, y, s = x + s * 0.28, y + s * 0.5, s * 0.44
    a, b = s * 0.24, s * 0.76
    if numbered:
        a, b = s * 0.08, s * 0.92
    if state == "spinning":
        return f"M{x + a:.1f} {y + a:.1f}L{x + b:.1f} {y + b:.1f}M{x + b:.1f} {y + a:.1f}L{x + a:.1f} {y + b:.1f}"
    if state == "never_started":
        return f"M{x + a:.1f} {y + s / 2:.1f}H{x + b:.1f}"
    if state == "unknown":
        return f"M{x + a:.1f} {y + b:.1f}L{x + b:.1f} {y + a:.1f}"
    return ""


def _legend(drawing: Drawing, picture: GridPicture, y: float) -> float:
    x = 2.0
    for name, words in reversed(STATES):
        number = picture.count(name)
        if not number:
            continue
        text = f"{words}: {number}"
        need = 24 + text_width(text, 12) + 12
        if x > 2 and x + need > drawing.width:
            x, y = 2.0, y + 22
        drawing.path(_square(x, y - 8, 16), f"cell cell-{name}")
        if mark := _mark(name, x, y - 8, 16):
            drawing.path(mark, f"mark mark-{name}")
        drawing.text(x + 22, y + 4, text, "t t-note")
        x += need
    return y + 20


def grid_svg(picture: GridPicture, width: float, prefix: str) -> str:
    """The figure, ``width`` user units wide."""
    layout = _layout(picture, width)
    counts = ", ".join(f"{picture.count(name)} {words}" for name, words in reversed(STATES) if picture.count(name))
    drawing = Drawing(width, title="Blocks of the stuck kernel", description=f"{picture.total} blocks: {counts}", prefix=prefix)
    y = _legend(drawing, picture, 12)
    notes = []
    if layout.per > 1:
        notes.append(
            f"One square stands for {layout.per} neighbouring blocks and shows the highest state among them, as ordered above."
        )
    if picture.total > len(picture.codes):
        notes.append(f"Only the first {len(picture.codes)} of {picture.total} blocks are drawn.")
    if layout.gap:
        notes.append(f"Neighbours without a gap form one group of {picture.ctas_per_group} blocks.")
    for note in notes:
        y = drawing.lines(2, y + 6, wrap_words(note, width - 4, 12), "t t-note", 16)
    y += 2
    cells = -(-len(picture.codes) // layout.per)
    squares: dict[int, list[str]] = {}
    marks: dict[int, list[str]] = {}
    left = 0.0 if layout.numbered else 62.0
    pitch, size = layout.size + 2, layout.size
    for cell in range(cells):
        code = max(picture.codes[cell * layout.per : (cell + 1) * layout.per])
        row, column = divmod(cell, layout.columns)
        shift = layout.gap * (column // layout.group_cells) if layout.gap else 0.0
        x, top = left + 1 + column * pitch + shift, y + row * (pitch + (6 if layout.numbered else 0))
        squares.setdefault(code, []).append(_square(x, top, size))
        if mark := _mark(STATES[code][0], x, top, size, numbered=layout.numbered):
            marks.setdefault(code, []).append(mark)
        if column == 0 and not layout.numbered and row % -(-14 // int(pitch)) == 0:
            drawing.text(left - 6, top + size - 1, str(cell * layout.per), "t t-num", anchor="end")
    for code in sorted(squares):
        drawing.path("".join(squares[code]), f"cell cell-{STATES[code][0]}")
    for code in sorted(marks):
        drawing.path("".join(marks[code]), f"mark mark-{STATES[code][0]}")
    rows = -(-cells // layout.columns)
    if layout.numbered:
        for cell in range(cells):
            row, column = divmod(cell, layout.columns)
            shift = layout.gap * (column // layout.group_cells) if layout.gap else 0.0
            state = STATES[picture.codes[cell]][0]
            middle = left + 1 + column * pitch + shift + size / 2
            drawing.text(
                middle,
                y + row * (pitch + 6) + size * (0.45 if _mark(state, 0, 0, size) else 0.62),
                str(cell),
                f"t t-cell t-cell-{state}",
                anchor="middle",
            )
        return drawing.render(y + rows * (pitch + 6) + 2, "fig")
    return drawing.render(y + rows * pitch + 2, "fig")
