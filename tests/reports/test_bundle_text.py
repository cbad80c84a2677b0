"""Texts on their way into a bundle: nothing lost but what is said, in bounded memory, split only where it is safe."""

from __future__ import annotations

import io
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.reports.bundle_text import MAX_LINE, Cut, chunks, cut_text, lines_of


@given(st.binary(max_size=3000))
@settings(max_examples=150, deadline=None)
def test_bytes_survive_lines_and_chunks(data: bytes) -> None:
    text = "".join(text for text, _ in chunks(lines_of(io.BytesIO(data))))
    assert text.encode("utf-8", "surrogateescape") == data


def test_chunks_number_their_first_line() -> None:
    data = b"".join(b"line %d of the log, padded to be longer\n" % n for n in range(20_000))
    found = list(chunks(lines_of(io.BytesIO(data))))
    assert len(found) > 3
    for text, first in found:
        assert text.startswith(f"line {first - 1} ")


def test_a_private_key_is_never_split() -> None:
    filler = b"x" * 999 + b"\n"
    for before in range(125, 135):
        data = filler * before + b"-----BEGIN PRIVATE KEY-----\n" + b"QUJD\n" * 200 + b"-----END PRIVATE KEY-----\n" + filler * 200
        for text, _ in chunks(lines_of(io.BytesIO(data))):
            assert text.count("-----BEGIN") == text.count("-----END")


def test_a_line_without_an_end_is_cut_and_says_so() -> None:
    class Endless:
        left = 300 << 20

        def read(self, size: int = -1, /) -> bytes:
            take = min(size, self.left)
            self.left -= take
            return b"a" * take

    text = "".join(lines_of(Endless()))
    assert len(text) < MAX_LINE
    assert "more bytes of this line were left out]" in text
    joined = "".join(lines_of(io.BytesIO(b"b" * (2 * MAX_LINE) + b"\nnext\n")))
    assert joined.endswith("were left out]\nnext\n")


def cut(lines: list[str], how: Cut, cited: Any = ()) -> str:
    out = io.BytesIO()
    cut_text(iter(lines), out, how, cited)
    return out.getvalue().decode()


def test_a_cut_keeps_ends_and_cited_lines_and_numbers_the_gaps() -> None:
    lines = [f"line {n}\n" for n in range(1, 5001)]
    text = cut(lines, Cut(100, 100), cited={2500})
    kept = [line for line in text.splitlines() if line.startswith("line ")]
    assert kept[0] == "line 1"
    assert kept[-1] == "line 5000"
    assert "line 2500" in kept
    assert "line 2381" in kept
    assert "line 2200" not in kept
    gaps = [line for line in text.splitlines() if line.startswith("[…")]
    assert len(gaps) == 2
    first = int(kept[kept.index("line 2380")].split()[1])
    assert f"to {first - 1} (" in gaps[0]


@given(
    st.lists(st.text(alphabet="ab", max_size=30).map(lambda text: text + "\n"), max_size=80),
    st.integers(0, 300),
    st.integers(0, 300),
    st.sets(st.integers(1, 80), max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_a_cut_loses_only_what_its_gaps_count(lines: list[str], head: int, tail: int, cited: set[int]) -> None:
    text = cut(lines, Cut(head, tail), cited)
    gone = 0
    for line in text.splitlines():
        if line.startswith("[…"):
            words = line.split()
            gone += int(words[4]) - int(words[2]) + 1
    assert len(text.splitlines()) - text.count("[…") + gone == len(lines)
    for number in cited:
        if number <= len(lines):
            assert lines[number - 1] in text


def test_what_is_smaller_than_its_cut_is_left_alone() -> None:
    lines = ["a\n", "b\n"]
    assert cut(lines, Cut(1, 1 << 20)) == "a\nb\n"
