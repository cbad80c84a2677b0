"""Host stacks folded: threads of all ranks that stand in the same place become one stack with its members named.

Two folds. Threads whose frames are the same function by function (line numbers aside) are one group. Then groups of the same kind
of thread whose frames are mostly the same are shown as variants of the largest: a rank that stands elsewhere is what a reader
looks for, so variants are told frame by frame and never averaged away. What a frame means is the classifier's business, not this
module's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

__all__ = ["FoldedStack", "HostThread", "Variant", "fold_stacks", "folded_lines"]

_MOST_THREADS = 4096
_MOST_FRAMES = 128
_MOST_GROUPS = 400
_SIMILAR = 0.6
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class HostThread:
    """One thread at one look. ``frames``: innermost first, ``function (file:line)`` as the tool wrote them. ``state``: idle …

    ``rank``, ``pid`` None: not known. ``waits``: what the classifier made of it, a word or empty. ``sample``: which look (0, 1 …).
    """

    frames: tuple[str, ...]
    thread: str = ""
    process: str = ""
    rank: int | None = None
    pid: int | None = None
    state: str = ""
    waits: str = ""
    sample: int = 0
    source: str = ""

    @property
    def label(self) -> str:
        """``rank 2 MainThread`` or ``pid 4123 MainThread``, as much as is known."""
        where = f"rank {self.rank}" if self.rank is not None else f"pid {self.pid}" if self.pid is not None else self.process[:40]
        return " ".join(part for part in (where, self.thread) if part) or "a thread"


@dataclass(frozen=True, slots=True)
class Variant:
    """Members whose stack differs from the folded one. ``frames``: theirs; ``innermost_differs``: whether it differs at the top."""

    members: tuple[str, ...]
    frames: tuple[str, ...]
    innermost_differs: bool


@dataclass(frozen=True, slots=True)
class FoldedStack:
    """``members``: who stands here; ``threads``: how many threads that are; ``moved``: labels seen elsewhere in another look."""

    frames: tuple[str, ...]
    members: tuple[str, ...]
    threads: int
    kind: str
    waits: str
    variants: tuple[Variant, ...] = ()
    moved: tuple[str, ...] = ()
    cut: int = 0


def _function(frame: str) -> str:
    """A frame without its line number: two ranks at two lines of one function stand in the same place."""
    return re.sub(r":\d+\)$", ")", frame)


def _kind(thread: HostThread) -> str:
    """Threads of one kind: same name but for numbers, same process but for numbers."""
    return _DIGITS.sub("#", f"{thread.thread or 'thread'}")


def _runs(labels: Iterable[str]) -> tuple[str, ...]:
    """``rank 0 Main``, ``rank 1 Main`` … as ``ranks 0-3 Main``; the others as they are, each once with its count."""
    by_name: dict[str, list[int]] = defaultdict(list)
    rest: dict[str, int] = defaultdict(int)
    for label in labels:
        found = re.match(r"rank (\d+) ?(.*)$", label)
        if found:
            by_name[found.group(2)].append(int(found.group(1)))
        else:
            rest[label] += 1
    shown = []
    for name, ranks in sorted(by_name.items()):
        unique = sorted(set(ranks))
        parts: list[str] = []
        start = last = unique[0]
        for rank in [*unique[1:], -1]:
            if rank == last + 1:
                last = rank
                continue
            parts.append(str(start) if start == last else f"{start}-{last}")
            start = last = rank
        shown.append(f"rank{'s' if len(unique) > 1 else ''} {', '.join(parts)} {name}".strip())
    return (*shown, *(label if count == 1 else f"{label} (x{count})" for label, count in sorted(rest.items())))


def _moved(threads: Sequence[HostThread]) -> frozenset[str]:
    """Labels whose frames differ between two looks."""
    seen: dict[tuple[object, ...], set[tuple[str, ...]]] = defaultdict(set)
    labels: dict[tuple[object, ...], str] = {}
    looks: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for thread in threads:
        key = (thread.pid, thread.rank, thread.process, thread.thread)
        seen[key].add(tuple(map(_function, thread.frames)))
        looks[key].add(thread.sample)
        labels[key] = thread.label
    return frozenset(labels[key] for key, stacks in seen.items() if len(stacks) > 1 and len(looks[key]) > 1)


def fold_stacks(threads: Sequence[HostThread]) -> tuple[FoldedStack, ...]:
    """The folded stacks: kinds with the most members first; within a kind the largest group, its variants inside."""
    moved = _moved(threads[:_MOST_THREADS])
    groups: dict[tuple[str, tuple[str, ...]], list[HostThread]] = defaultdict(list)
    for thread in threads[:_MOST_THREADS]:
        key = (_kind(thread), tuple(_function(frame) for frame in thread.frames[:_MOST_FRAMES]))
        if key in groups or len(groups) < _MOST_GROUPS:
            groups[key].append(thread)
    by_kind: dict[str, list[tuple[tuple[str, ...], list[HostThread]]]] = defaultdict(list)
    for (kind, frames), members in groups.items():
        by_kind[kind].append((frames, members))
    folded: list[FoldedStack] = []
    for kind, stacks in by_kind.items():
        stacks.sort(key=lambda item: (-len(item[1]), item[0]))
        while stacks:
            base, members = stacks.pop(0)
            near = [item for item in stacks if _alike(base, item[0])]
            stacks = [item for item in stacks if item not in near]
            folded.append(_folded(kind, base, members, near, moved))
    folded.sort(key=lambda item: (-item.threads - sum(len(v.members) for v in item.variants), item.kind, item.frames))
    return tuple(folded)


def _alike(first: tuple[str, ...], second: tuple[str, ...]) -> bool:
    """Whether two stacks share most of their frames, in order."""
    if not first or not second:
        return False
    matcher = SequenceMatcher(None, first, second, autojunk=False)
    return matcher.real_quick_ratio() >= _SIMILAR and matcher.quick_ratio() >= _SIMILAR and matcher.ratio() >= _SIMILAR


def _folded(
    kind: str,
    base: tuple[str, ...],
    members: list[HostThread],
    near: list[tuple[tuple[str, ...], list[HostThread]]],
    moved: frozenset[str],
) -> FoldedStack:
    labels = [thread.label for thread in members]
    waits = {thread.waits for thread in members if thread.waits}
    variants = tuple(
        Variant(_runs(thread.label for thread in others), others[0].frames[:_MOST_FRAMES], frames[:1] != base[:1])
        for frames, others in near
    )
    everyone = {*labels, *(thread.label for _, others in near for thread in others)}
    return FoldedStack(
        frames=members[0].frames[:_MOST_FRAMES],
        members=_runs(labels),
        threads=len({(thread.pid, thread.rank, thread.process, thread.thread) for thread in members}),
        kind=kind,
        waits=waits.pop() if len(waits) == 1 else "",
        variants=variants,
        moved=_runs(sorted(everyone & moved)),
        cut=max(len(members[0].frames) - _MOST_FRAMES, 0),
    )


def folded_lines(stacks: Sequence[FoldedStack], *, most_stacks: int = 12, most_frames: int = 16) -> list[str]:
    """The same as text, innermost frame first, for reports without markup."""
    lines: list[str] = []
    for stack in stacks[:most_stacks]:
        head = ", ".join(stack.members)
        lines.append(
            head + (f" [{stack.waits}]" if stack.waits else "") + (f" (moved: {', '.join(stack.moved)})" if stack.moved else "")
        )
        lines += [f"    {frame}" for frame in stack.frames[:most_frames]]
        if len(stack.frames) + stack.cut > most_frames:
            lines.append(f"    … {len(stack.frames) + stack.cut - most_frames} more frames")
        for variant in stack.variants[:6]:
            lines.append(f"  differs: {', '.join(variant.members)}")
            lines += [f"    {frame}" for frame in variant.frames[:4]]
        if len(stack.variants) > 6:
            lines.append(f"  … {len(stack.variants) - 6} more variants")
    if len(stacks) > most_stacks:
        lines.append(f"… {len(stacks) - most_stacks} more stacks")
    return lines
