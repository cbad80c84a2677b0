"""A shipped function and its Triton kernel over NumPy: what is executed, and what is refused."""

from __future__ import annotations

import io
import json

import pytest

from dsv4_repro.errors import CubinError
from dsv4_repro.kernels.shipped_python import call_combine, main

KERNEL = """
import somewhere_that_is_not_here

_ALIGNMENT = 64 * 2

def combine_topk_swa_indices(
    topk_indices: torch.Tensor, query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk, M, N, out=None
):
    rows = topk_indices.shape[0]
    width = (topk + window_size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    if out is None:
        made, lens = torch.full((rows, width), fill_value=-1, dtype=torch.int32), torch.empty(rows)
    else:
        made, lens = out
        FILL
    _combine_topk_swa_indices_kernel[(seq_lens.shape[0], 4)](
        made, made.stride(0), lens, topk_indices, topk_indices.stride(0), query_start_loc, WINDOW_SIZE=window_size
    )
    return made, lens

@triton.jit
def _combine_topk_swa_indices_kernel(
    made_ptr, made_stride, lens_ptr, topk_ptr, topk_stride, starts_ptr, WINDOW_SIZE: tl.constexpr
):
    first, last = tl.load(starts_ptr + tl.program_id(0)), tl.load(starts_ptr + tl.program_id(0) + 1)
    for row in range(first + tl.program_id(1), last, tl.num_programs(1)):
        offset = tl.arange(0, 8)
        mask = offset < row + 1
        value = tl.load(topk_ptr + row * topk_stride + offset, mask=mask)
        tl.store(made_ptr + row * made_stride + offset, value, mask=mask)
        tl.store(lens_ptr + row, row + 1)
"""
CALL = {
    "topk_indices": [[7, 8, 9, 10]] * 3, "query_start_loc": [0, 2, 3], "seq_lens": [5, 6], "gather_lens": [5, 6], "window_size": 8,
    "compress_ratio": 4, "topk": 4, "M": 100, "N": 50,
}  # fmt: skip


def test_old_memory_stays_where_nothing_is_written() -> None:
    found = call_combine(KERNEL.replace("FILL", "pass"), {**CALL, "old": 77})
    assert found["lens"] == [1, 2, 3]
    assert [row[:4] for row in found["indices"]] == [[7, 77, 77, 77], [7, 8, 77, 77], [7, 8, 9, 77]]


@pytest.mark.parametrize("old", [77, None])
def test_a_filled_workspace_holds_minus_one(old: int | None) -> None:
    found = call_combine(KERNEL.replace("FILL", "made.fill_(-1)"), {**CALL, "old": old})
    assert [set(row[length:]) for row, length in zip(found["indices"], found["lens"], strict=True)] == [{-1}] * 3


def test_what_is_not_that_function_is_refused() -> None:
    with pytest.raises(CubinError, match="has no combine_topk"):
        call_combine("x = 1", CALL)
    with pytest.raises(CubinError, match="names open"):
        call_combine(KERNEL.replace("FILL", "open('x')"), {**CALL, "old": 1})


def test_the_child_answers_in_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for source, key in ((KERNEL.replace("FILL", "pass"), "indices"), ("def broken(:", "error"), (KERNEL, "error")):
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"source": source, "call": {**CALL, "old": 1}})))
        assert main() == 0
        assert key in json.loads(capsys.readouterr().out)
