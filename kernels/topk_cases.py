"""Launches that a top-k kernel must get right: every path's edge lengths, and data that breaks approximate selection.

The same list drives the interpreter, a GPU and the tests: a case is a frozen launch plus seeded data, nothing else.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .abi import FIXED_SMEM_LARGE, RADIX_THRESHOLD, ROW_STATE_SIZE, SMEM_MEDIUM, TOP_K_VALUES, VECTOR_WIDTHS, TopKParams

__all__ = ["DATA_KINDS", "TopKCase", "all_cases", "make_row", "random_cases", "sample_cases"]

#: What fills a row; ``make_row`` says how.
DATA_KINDS = (
    "normal", "equal", "ascending", "descending", "two-values", "denormal", "signed-zeros", "infinities", "dense", "huge", "nan",
    "byte-ladder",
)  # fmt: skip


def make_row(kind: str, width: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """float32 [width] of one of DATA_KINDS; ValueError for another."""
    normal = rng.standard_normal(width).astype(np.float32)
    if kind == "normal":
        return normal
    if kind == "equal":
        return np.full(width, normal[0] if width else 0.0, dtype=np.float32)
    if kind in ("ascending", "descending"):
        ordered = np.sort(normal)
        return ordered if kind == "ascending" else np.ascontiguousarray(ordered[::-1])
    if kind == "two-values":
        return np.where(rng.random(width) < 0.01, np.float32(2.5), np.float32(-1.0)).astype(np.float32)
    if kind == "denormal":
        bits = rng.integers(0, 1 << 12, width, dtype=np.uint32) | (rng.integers(0, 2, width, dtype=np.uint32) << np.uint32(31))
        return bits.view(np.float32)
    if kind == "signed-zeros":
        return np.where(rng.random(width) < 0.5, np.float32(-0.0), np.float32(0.0)).astype(np.float32)
    if kind == "infinities":
        pick = rng.random(width)
        return np.where(pick < 0.02, np.float32(np.inf), np.where(pick > 0.4, np.float32(-np.inf), normal)).astype(np.float32)
    if kind == "dense":  # many values in one bin of a half-precision histogram
        return (np.float32(1000.0) + rng.random(width, dtype=np.float32) * np.float32(0.01)).astype(np.float32)
    if kind == "huge":
        return np.clip(normal, -3.0, 3.0) * np.float32(1e38)
    if kind == "nan":
        # Of both signs, with any payload.
        noise = rng.integers(0x7F800001, 0x80000000, width, dtype=np.uint32) | rng.integers(
            0, 2, width, dtype=np.uint32
        ) << np.uint32(31)
        return np.where(rng.random(width) < 0.005, noise, normal.view(np.uint32)).astype(np.uint32).view(np.float32)
    if kind == "byte-ladder":  # decisions fall in a different byte of the key for every row
        shift = np.uint32(8 * int(rng.integers(0, 4)))
        return (np.uint32(0x3F800000) ^ (rng.integers(0, 256, width, dtype=np.uint32) << shift)).astype(np.uint32).view(np.float32)
    raise ValueError(f"no data of kind {kind!r}")


@dataclass(frozen=True, slots=True)
class TopKCase:
    """One launch. ``lengths`` int32 of each row; ``data``: a kind a row, used in turn; the rest as in TopKParams."""

    name: str
    k: int
    vec: int
    lengths: tuple[int, ...]
    stride: int
    max_seq_len: int
    ctas_per_group: int
    groups: int
    chunk_size: int
    data: tuple[str, ...] = ("normal",)
    seed: int = 0

    @property
    def grid(self) -> int:
        return self.groups * self.ctas_per_group

    @property
    def dynamic_smem(self) -> int:
        """Bytes of dynamic shared memory."""
        return max(SMEM_MEDIUM, FIXED_SMEM_LARGE + 4 * self.chunk_size)

    @property
    def state_bytes(self) -> int:
        return self.groups * ROW_STATE_SIZE

    def logits(self) -> NDArray[np.float32]:
        """float32 [rows, stride]; beyond a row's length the values are the largest there are, so that reading them shows."""
        rng = np.random.default_rng([self.seed, zlib.crc32(self.name.encode())])
        result = np.full((len(self.lengths), self.stride), np.float32(np.inf), dtype=np.float32)
        for row, length in enumerate(self.lengths):
            bounded = min(max(length, 0), self.stride)
            result[row, :bounded] = make_row(self.data[row % len(self.data)], bounded, rng)
        return result

    def params(self, *, input: int, output: int, lengths: int, row_states: int) -> TopKParams:
        """The kernel's parameters for these device addresses."""
        return TopKParams(
            input, output, lengths, row_states,
            len(self.lengths), self.stride, self.k, self.chunk_size, self.ctas_per_group, self.max_seq_len,
        )  # fmt: skip

    def counters(self) -> tuple[int, ...]:
        """What each group's arrival_counter must hold at the end: six arrivals of each CTA for each row over 32768."""
        bounded = [min(max(length, 0), self.stride, self.max_seq_len) for length in self.lengths]
        return tuple(
            6 * self.ctas_per_group * sum(length > RADIX_THRESHOLD for length in bounded[group :: self.groups])
            for group in range(self.groups)
        )


def _shared(
    name: str, k: int, vec: int, lengths: tuple[int, ...], ctas: int, data: tuple[str, ...], groups: int, seed: int
) -> TopKCase:
    """Rows as wide as the longest, a little wider where the vector width allows, cut for ``ctas`` CTAs a group."""
    stride = math.ceil(max(*lengths, 1024) / vec) * vec
    if vec == 1:
        stride |= 1
    elif vec == 2:
        stride += 2 if stride % 4 == 0 else 0
    chunk = math.ceil(math.ceil(stride / ctas) / vec) * vec
    groups = min(groups, len(lengths))
    return TopKCase(name, k, vec, lengths, stride, stride, ctas, groups, chunk, data, seed)


def all_cases(seed: int = 0) -> Iterator[TopKCase]:
    """The whole sweep: k x vector width x edge lengths, every kind of data on every path, 2 to 8 CTAs, long-short-long rows."""
    for k in TOP_K_VALUES:
        for vec in VECTOR_WIDTHS:
            tag = f"k{k}v{vec}"
            edges = (0, 1, k - 1, k, k + 1, k + 2, k + 3, 4097, 8191, 8192, 8193, 20001, 32767, 32768, -1, -(2**31))
            yield _shared(f"{tag} edges", k, vec, edges, 1, ("normal", "dense"), 8, seed)
            for ctas in (2, 3, 8):
                radix = (32769, 32767 + 8 * ctas, 40001)
                yield _shared(f"{tag} {ctas} CTAs", k, vec, radix, ctas, ("normal", "byte-ladder", "dense"), 1, seed)
            ring = (40000, 1000, 39999, 25, 33000, 9000, 38000)
            yield _shared(f"{tag} long-short-long", k, vec, ring, 4, ("normal",), 1, seed)
            yield _shared(f"{tag} two groups", k, vec, (33001, 5, 9000, 34000, 35000, k, 36000, 0), 2, ("normal", "dense"), 2, seed)
    for kind in DATA_KINDS:
        for k in TOP_K_VALUES:
            yield _shared(f"{kind} k{k} one CTA", k, 4, (k + 1, 5000, 8192, 8193, 16384, 32768), 1, (kind,), 6, seed)
            yield _shared(f"{kind} k{k} four CTAs", k, 4, (33333, 65536), 4, (kind,), 1, seed)
    for ctas in (2, 4, 5, 6, 7, 8):
        yield _shared(f"{ctas} CTAs of uneven chunks", 512, 4, (32769 + 4 * ctas, 50001), ctas, ("normal", "two-values"), 1, seed)
    # Peers leave at once, as in the reproducer: no row can be longer than max_seq_len 16384.
    yield TopKCase(
        "peers leave", 512, 4, (16000, 16001, 12000, 12001, 9000, 9001, 0, 0), 16384, 16384, 2, 8, 8192, ("normal", "dense"), seed
    )  # fmt: skip


def sample_cases(count: int, seed: int = 0) -> list[TopKCase]:
    """A seeded choice of ``count`` cases of the sweep, in its order."""
    everything = list(all_cases(seed))
    chosen = np.random.default_rng(seed).choice(len(everything), size=min(count, len(everything)), replace=False)
    return [everything[index] for index in sorted(chosen)]


def random_cases(count: int, seed: int = 0) -> Iterator[TopKCase]:
    """``count`` random launches: any k, vector width, group size from 1 to 8, one to 12 rows, lengths drawn near every edge.

    Negative lengths stand for padded rows. No length exceeds max_seq_len, so that no build can hang on them for being too long.
    """
    rng = np.random.default_rng([seed, 0x70_6B])
    edges = (0, 1, 8191, 8192, 8193, 32767, 32768)
    for number in range(count):
        k, vec = int(rng.choice(TOP_K_VALUES)), int(rng.choice(VECTOR_WIDTHS))
        ctas = int(rng.integers(1, 9))
        longest = int(rng.choice((2 * k, 6000, 16000, 32768) if ctas == 1 else (32769, 33000 + 16 * ctas, 48000, 60000)))
        lengths = []
        for _ in range(int(rng.integers(1, 13 if ctas == 1 else 5))):
            drawn = (
                int(rng.integers(0, longest + 1)) if rng.random() < 0.6 else int(rng.choice((*edges, k - 1, k, k + 1, longest, -1)))
            )
            lengths.append(min(drawn, longest))
        data = tuple(str(kind) for kind in rng.choice(DATA_KINDS, size=2))
        yield _shared(f"random {number}", k, vec, tuple(lengths), ctas, data, int(rng.integers(1, 4 if ctas > 1 else 9)), seed)
