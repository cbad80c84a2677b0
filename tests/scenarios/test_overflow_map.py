"""The map of the overflow, and that the shipped code does what it says."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4_repro.errors import UnavailableError
from dsv4_repro.forensics.wrong_rows import bins_of, shared_bin
from dsv4_repro.kernels.sass.program import Program
from dsv4_repro.kernels.sass.topk import run_topk
from dsv4_repro.kernels.select import select_kernel
from dsv4_repro.scenarios.overflow_map import LENGTHS, RATIOS, expected_crowd, overflow_map

#: (mean, deviation) of rows, on both sides of the edge.
KINDS = ((0.0, 1.0), (2.0, 1.0), (3.2, 0.3), (4.0, 1.0), (8.0, 1.0), (8.0, 0.1), (12.0, 1.0), (6.2, 0.7))


def rows(length: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return np.stack([(mean + sd * random.standard_normal(length)).astype(np.float32) for mean, sd in KINDS])


@pytest.mark.parametrize("length", LENGTHS)
def test_expected_and_counted_crowds_agree(length: int) -> None:
    for (mean, sd), row in zip(KINDS, rows(length), strict=True):
        expected, counted = expected_crowd(mean, sd, length), shared_bin(row, 512)
        # The k-th value is itself random: it may fall into the neighbouring bin, never far from the edge.
        assert abs(expected - counted) < 0.12 * length


def test_plain_rows_are_safe_and_narrow_ones_are_not() -> None:
    cells = {(cell.length, cell.ratio): cell.share for cell in overflow_map()}
    assert set(cells) == {(length, ratio) for length in LENGTHS for ratio in RATIOS}
    assert all(cells[length, 0.0] == 0.0 for length in LENGTHS)
    assert cells[16384, 50.0] > 0.8
    assert 0.0 < cells[16384, 8.0] < 1.0
    assert cells[8192, 8.0] == 0.0
    assert expected_crowd(8.0, 1.0, 400) == 0.0


@pytest.mark.release_wheel
@pytest.mark.parametrize("length", [8192, 9000, 16384, 32768])
def test_0_27_1_is_wrong_exactly_where_the_crowd_is_larger_than_the_buffer(length: int) -> None:
    try:
        program = Program.from_image(select_kernel("vllm==0.27.1", sm=120, top_k=512, vec=4))
    except UnavailableError as error:
        pytest.skip(f"needs the package index or a cached release: {error}")
    logits = rows(length)
    lengths = np.full(len(KINDS), length, np.int32)
    run = run_topk(
        program, logits, lengths, k=512, chunk_size=length, ctas_per_group=1, groups=len(KINDS), max_seq_len=length,
        dynamic_smem=35968,
    )  # fmt: skip
    wrong = [not verdict.ok for verdict in run.verdicts(logits, lengths)]
    assert wrong == [shared_bin(row, 512) > bins_of(length)[1] for row in logits]
