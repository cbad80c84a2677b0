"""Code for warp-wide instructions: votes, shuffles, reductions over the active lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .decode import Instruction
from .emit_values import Value
from .operands import PT
from .semantics import NoSemanticsError

if TYPE_CHECKING:
    from .blocks import BlockWriter

__all__ = ["warp_operation"]


def _ballot(w: BlockWriter, truth: Value) -> Value:
    """The lanes of each thread's warp that are active and for which ``truth`` holds, as a word."""
    a = w.algebra
    if truth.const == 0:
        return a.word(0)
    if w.mode == "one":
        return a.choose(truth, a.stated("1 << (ix & 31)", "u", "w"), a.word(0))
    if w.mode == "all" and truth.const == 1:
        return a.word(0xFFFFFFFF)
    return a.stated(f"S.ballot({a.whole(truth) if truth.const is None else 'None'}, ix, n)", "v", "w")


def _vote(i: Instruction, w: BlockWriter) -> None:
    a = w.algebra
    (source,) = i.sources
    guard, w.guard = w.guard, a.truth(True)
    truth = w.truth(source)
    every = i.has("ALL")
    if every == i.has("ANY"):
        raise NoSemanticsError("vote")
    results: list[tuple[int, Value]] = []
    for dest in i.dests:
        if dest.kind in ("reg", "ureg"):
            if dest.index != 255:
                number = (dest.index or 0) + (256 if dest.kind == "ureg" else 0)
                results.append((number, _ballot(w, a.both(truth, guard))))
        elif dest.index != PT:
            number = (dest.index or 0) + (520 if dest.kind == "upred" else 512)
            if truth.kind == "u":
                results.append((number, truth))
            elif every:
                failing = _ballot(w, a.both(a.negation(truth), guard))
                results.append((number, a.eq(failing, a.word(0))))
            else:
                results.append((number, a.ne(_ballot(w, a.both(truth, guard)), a.word(0))))
    w.guard = guard
    for number, value in results:
        w.write(number, value)


def _shuffle(i: Instruction, w: BlockWriter) -> None:
    a = w.algebra
    kinds = [m for m in i.modifiers if m in ("IDX", "UP", "DOWN", "BFLY")]
    if len(kinds) != 1 or len(i.sources) != 3 or len(i.dests) != 2:
        raise NoSemanticsError("shuffle")
    inside, dest = i.dests
    value, lane, control = (w.word(source) for source in i.sources)
    guard = "None" if w.guard.const == 1 else a.whole(w.guard)
    if w.mode == "one":
        pair = a.stated(f"S.shuffle_one({kinds[0]!r}, {a.ref(value)}, {a.ref(lane)}, {a.ref(control)}, ix)", "u", "w")
    else:
        pair = a.stated(f"S.shuffle({kinds[0]!r}, {a.whole(value)}, {a.ref(lane)}, {a.ref(control)}, ix, n, {guard})", "v", "w")
    kind = "u" if w.mode == "one" else "v"
    name = a.ref(pair)
    if dest.index != 255:
        w.set_word(dest, a.stated(f"{name}[0]", kind, "w"))
    if inside.index != PT:
        w.set_truth(inside, a.stated(f"{name}[1]", kind, "t"))


def _reduce(i: Instruction, w: BlockWriter) -> None:
    a = w.algebra
    if w.guard.const != 1 or i.modifiers != ("SUM",):
        raise NoSemanticsError("reduction")
    value = w.word(i.sources[0])
    if w.mode != "one":
        value = a.stated(f"S.warp_sum({a.whole(value)}, ix, n)", "v", "w")
    w.set_word(i.dests[0], value)


def warp_operation(i: Instruction, w: BlockWriter) -> bool:
    """Write the code of a warp-wide instruction; False if ``i`` is none."""
    if i.opcode in ("VOTE", "VOTEU"):
        _vote(i, w)
    elif i.opcode == "SHFL":
        _shuffle(i, w)
    elif i.opcode == "REDUX":
        _reduce(i, w)
    else:
        return False
    return True
