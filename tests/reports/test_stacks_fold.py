"""Threads of all ranks become few stacks, and the one that stands elsewhere is never folded away."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.reports.stacks_fold import HostThread, fold_stacks, folded_lines


def thread(*frames: str, **more: Any) -> HostThread:
    return HostThread(tuple(frames), **more)


def test_equal_stacks_are_one_with_ranks_as_ranges(made: Any) -> None:
    stacks = fold_stacks(made.threads(8))
    copy = next(stack for stack in stacks if stack.kind == "WorkerAsyncOutputCopy")
    assert copy.members == ("ranks 0-7 WorkerAsyncOutputCopy",)
    assert copy.threads == 8
    assert copy.waits == "waits for a CUDA event"
    main = next(stack for stack in stacks if stack.kind == "MainThread")
    assert main.members == ("ranks 0-1, 3-7 MainThread",)
    (variant,) = main.variants
    assert variant.members == ("rank 2 MainThread",)
    assert variant.innermost_differs
    assert variant.frames[0] == "_launch (triton/driver.py:712)"


def test_line_numbers_do_not_separate_and_threads_of_other_kinds_do() -> None:
    stacks = fold_stacks(
        [
            thread("wait (a.py:10)", "run (b.py:1)", thread="MainThread", rank=0),
            thread("wait (a.py:11)", "run (b.py:1)", thread="MainThread", rank=1),
            thread("wait (a.py:10)", "run (b.py:1)", thread="Other", rank=0),
        ]
    )
    assert sorted(stack.members for stack in stacks) == [("rank 0 Other",), ("ranks 0-1 MainThread",)]


def test_stacks_that_share_little_are_apart() -> None:
    stacks = fold_stacks(
        [thread("a (x)", "b (x)", "c (x)", thread="M", rank=0), thread("d (x)", "e (x)", "f (x)", thread="M", rank=1)]
    )
    assert len(stacks) == 2
    assert all(not stack.variants for stack in stacks)


def test_a_thread_that_moved_between_looks_is_named() -> None:
    first = thread("a (x:1)", "run (y:1)", thread="M", rank=0, pid=1)
    moved = thread("b (x:1)", "run (y:1)", thread="M", rank=0, pid=1, sample=1)
    still = [thread("c (x:1)", "run (y:1)", thread="M", rank=1, pid=2, sample=n) for n in (0, 1)]
    stacks = fold_stacks([first, moved, *still])
    assert {name for stack in stacks for name in stack.moved} == {"rank 0 M"}
    assert sum(stack.threads for stack in stacks) == 3


def test_pool_threads_of_one_process_are_counted() -> None:
    stacks = fold_stacks([thread("wait (x:1)", thread=f"pool-{n}", pid=7) for n in range(12)])
    assert len(stacks) == 1
    assert len(stacks[0].members) == 12


def test_text_has_every_member_and_is_bounded(made: Any) -> None:
    lines = folded_lines(fold_stacks(made.threads()))
    assert "ranks 0-1, 3 MainThread" in lines
    assert "  differs: rank 2 MainThread" in lines
    many = [thread(*(f"f{n}_{k} (x:{k})" for k in range(100)), thread="M", rank=n) for n in range(100)]
    assert len(folded_lines(fold_stacks(many))) < 300


def test_thousands_of_threads_take_bounded_time() -> None:
    threads = [thread(*(f"f{(n * k) % 97} (x:{k})" for k in range(60)), thread=f"T{n % 5}", rank=n) for n in range(6000)]
    began = time.process_time()
    stacks = fold_stacks(threads)
    assert time.process_time() - began < 20
    assert stacks


frames = st.lists(st.sampled_from(["a (x:1)", "a (x:2)", "b (y:1)", "c (z:9)", "d (w:4)"]), max_size=6)


@given(st.lists(st.tuples(frames, st.sampled_from(["M", "T-1", "T-2", ""]), st.integers(0, 5) | st.none()), max_size=20))
@settings(max_examples=200, deadline=None)
def test_nobody_is_lost(items: list[tuple[list[str], str, int | None]]) -> None:
    threads = [HostThread(tuple(f), name, rank=rank, pid=n) for n, (f, name, rank) in enumerate(items)]
    stacks = fold_stacks(threads)
    named = " ".join(member for stack in stacks for member in (*stack.members, *(m for v in stack.variants for m in v.members)))
    assert (not threads) == (not stacks)
    for item in threads:
        if item.rank is None:
            assert f"pid {item.pid}" in named
    assert sum(stack.threads for stack in stacks) <= len(threads)
