"""Large texts: what could matter is kept, memory and lines are bounded, line numbers are right."""

from __future__ import annotations

import io
import random

import pytest

from dsv4_repro.forensics.evidence.sieve import _LINE_NEEDLES, MAX_LINE, SMALL, keep_lines

BORING = b"(Worker_TP3 pid=4123) DEBUG 11-28 09:12:41 [gpu_model_runner.py:1] step of 16 tokens, nothing to see here\n"


class Trickle(io.BytesIO):
    """Gives odd amounts, like a pipe or a decompressor."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size or 1, random.Random(self.tell()).randint(1, 90_000)))


def big(*lines: bytes, copies: int = 9000) -> bytes:
    block = BORING * copies
    return block + b"".join(line + b"\n" + block for line in lines)


def test_small_texts_are_kept_whole() -> None:
    kept = keep_lines(io.BytesIO(b"a\nb\n\nc"))
    assert kept.lines == [(1, b"a"), (2, b"b"), (3, b""), (4, b"c")]
    assert kept.complete


@pytest.mark.parametrize("needle", _LINE_NEEDLES)
def test_every_needle_is_found_at_its_line(needle: str) -> None:
    line = b"prefix " + needle.encode() + b" suffix"
    kept = keep_lines(io.BytesIO(big(line, copies=4000)))
    assert (4001, line) in kept.lines
    assert not kept.complete
    assert kept.total == 8001


def test_blocks_keep_the_lines_that_follow() -> None:
    stack = [b'Thread 5 (idle): "MainThread"', *(b"    f%d (a.py:%d)" % (i, i) for i in range(60))]
    kept = keep_lines(Trickle(big(b"\n".join(stack))))
    at = [line for _, line in kept.lines].index(stack[0])
    assert [line for _, line in kept.lines[at : at + 61]] == stack


def test_line_numbers_are_those_of_the_file_whatever_the_chunks() -> None:
    rng = random.Random(3)
    lines = [BORING.strip() + b" %d" % i for i in range(30_000)]
    marks = sorted(rng.sample(range(30_000), 40))
    for mark in marks:
        lines[mark] = b"NVRM: Xid (PCI:0): 31, mark %d" % mark
    kept = keep_lines(Trickle(b"\n".join(lines)))
    assert [(number, line) for number, line in kept.lines if b"Xid (" in line] == [(mark + 1, lines[mark]) for mark in marks]


def test_one_endless_line_is_cut_and_said() -> None:
    class Endless:
        left = 300 << 20

        def read(self, size: int = -1, /) -> bytes:
            count = min(size, self.left)
            self.left -= count
            return b"a" * count

    kept = keep_lines(Endless())
    assert sum(len(line) for _, line in kept.lines) <= MAX_LINE
    assert any("longer than" in note for note in kept.notes)


def test_the_line_after_a_cut_one_is_read() -> None:
    data = b"x" * (3 * MAX_LINE) + b"\nNVRM: Xid (PCI:0): 31, after\n"
    kept = keep_lines(io.BytesIO(data))
    assert any(line.endswith(b"after") for _, line in kept.lines)


def test_what_occurs_everywhere_is_thinned_but_both_ends_stay() -> None:
    lines = [b"ERROR RuntimeError: x%d" % i for i in range(200_000)]
    kept = keep_lines(io.BytesIO(b"\n".join(lines)))
    assert len(kept.lines) <= 80_000
    assert kept.lines[0][1] == lines[0]
    assert kept.lines[-1][1] == lines[-1]
    assert any("thinned" in note for note in kept.notes)


def test_everything_keeps_all_lines_up_to_the_caps() -> None:
    lines = [b"row %d" % i for i in range(70_000)]
    kept = keep_lines(io.BytesIO(b"\n".join(lines)), everything=True)
    assert [line for _, line in kept.lines] == lines
    assert kept.complete
    assert len(b"\n".join(lines)) > SMALL
