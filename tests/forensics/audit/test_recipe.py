"""Recipes: padding, data parallelism, what is read from a command line, and every wrong value refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.errors import PlanError
from dsv4_repro.forensics.audit.recipe import Recipe, padded_shapes
from dsv4_repro.forensics.audit.recipe_text import recipe_from_arguments, recipe_from_text

#: The command line of vLLM #51593.
COMMAND = (
    "vllm serve MODEL --tensor-parallel-size 4 --attention-backend FLASHINFER_MLA_SPARSE_DSV4 --moe-backend flashinfer_cutlass "
    """--speculative-config '{"method":"mtp","num_speculative_tokens":1}' --max-num-seqs 16 --max-num-batched-tokens 8192 """
    "--max-model-len 65536 --kv-cache-dtype fp8 --block-size 256 --gpu-memory-utilization 0.9 --tokenizer-mode deepseek_v4"
)


def test_the_default_is_the_recipe_of_the_report() -> None:
    recipe, notes = recipe_from_text(COMMAND)
    assert recipe == Recipe()
    assert any("compression ratio" in note for note in notes)
    assert Recipe().graph_sizes == (2, 4, 8, 16, 24, 32)


def test_three_live_requests_are_padded_to_eight_rows() -> None:
    shapes = {shape.live: shape for shape in padded_shapes(Recipe())}
    assert [(live, shapes[live].graph_rows, shapes[live].padding) for live in (1, 2, 3, 4, 5, 16)] == [
        (1, 2, 0), (2, 4, 0), (3, 8, 2), (4, 8, 0), (5, 16, 6), (16, 32, 0),
    ]  # fmt: skip


def test_ranks_are_padded_to_the_largest_so_fewer_than_three_can_wedge() -> None:
    one = [(shape.graph_rows, shape.largest) for shape in padded_shapes(Recipe(dp=4)) if shape.live == 1]
    assert one == [(2, 1), (4, 2), (8, 4), (16, 8), (24, 12), (32, 16)]
    assert min(shape.live for shape in padded_shapes(Recipe(dp=4))) == 0
    assert min(shape.live for shape in padded_shapes(Recipe())) == 1


@pytest.mark.parametrize("mode", ["PIECEWISE", "NONE"])
def test_without_full_graphs_nothing_is_padded(mode: str) -> None:
    assert all(shape.padding == 0 for shape in padded_shapes(Recipe(graph_mode=mode)))


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("max_model_len=131072", "max_model_len", 131072), ("max_model_len=128k", "max_model_len", 128000),
        ("max_model_len=128K", "max_model_len", 131072),
        ("mtp=0", "method", "none"), ("capture_sizes=2:4:6:8", "capture_sizes", (2, 4, 6, 8)), ("dp=8,mtp=2", "dp", 8),
        ("compress=1", "width", 65536),
        ("--max-model-len=32k --max-num-seqs 4", "max_model_len", 32000), ("vllm serve M --enforce-eager --max-model-len 4096",
        "graph_mode", "NONE"),
        ("vllm serve M --max-model-len 4096", "mtp", 0),
        ("vllm serve M -dp 4 --max-model-len 4096", "dp", 4),
        ("vllm serve M --cudagraph-capture-sizes 2 4 6 --max-model-len 4096", "capture_sizes", (2, 4, 6)),
        ("""vllm serve M --compilation-config '{"cudagraph_mode":"PIECEWISE","cudagraph_capture_sizes":[1,8]}'""", "graph_mode",
        "PIECEWISE"),
        ("""vllm serve M --speculative-config={"method":"deepseek_mtp","num_speculative_tokens":3}""".replace('"', '\\"'),
        "mtp", 3),
    ],
)  # fmt: skip
def test_what_is_understood(text: str, field: str, value: object) -> None:
    recipe, _ = recipe_from_text(text)
    assert getattr(recipe, field) == value


def test_another_speculative_method_is_not_modelled() -> None:
    recipe, _ = recipe_from_arguments(["--speculative-config", '{"method":"dspark","num_speculative_tokens":5}'])
    assert "dspark" in recipe.not_modelled
    assert Recipe().not_modelled == ""
    assert "ratio 3" in Recipe(compress=3).not_modelled


@pytest.mark.parametrize(
    "text",
    [
        "nothing", "max_model_len", "max_model_len=", "max_model_len=-5", "max_model_len=1e9", "unknown=3", "mtp=99", "dp=0",
        "top_k=100", "graph_mode=SOME",
        "capture_sizes=0", "capture_sizes=a:b", "max_model_len=2,compress=65536", "method=none,mtp=1", "max_num_seqs=5000",
        "vllm serve 'unclosed",
        "vllm serve --speculative-config notjson", "vllm serve --speculative-config [1]",
        """vllm serve --compilation-config '{"cudagraph_mode":"X"}'""",
        "/does/not/exist.json",
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        recipe_from_text(text)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"max_model_len": 8192, "capture_sizes": [2, 8]}')
    assert recipe_from_text(str(path))[0] == Recipe(max_model_len=8192, capture_sizes=(2, 8))
    path = tmp_path / "r.toml"
    path.write_text("max_model_len = 8192\nmtp = 2\n")
    assert recipe_from_text(str(path))[0] == Recipe(max_model_len=8192, mtp=2)
    for text in ("[1]", "{", "", "nul\x00"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(PlanError):
            recipe_from_text(str(tmp_path / "bad.json"))


@given(st.integers(1, 16), st.integers(0, 3), st.integers(1, 4), st.lists(st.integers(1, 64), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_padding_never_loses_a_row(seqs: int, mtp: int, dp: int, sizes: list[int]) -> None:
    recipe = Recipe(max_num_seqs=seqs, mtp=mtp, method="mtp" if mtp else "none", dp=dp, capture_sizes=tuple(sizes))
    for shape in padded_shapes(recipe):
        assert shape.graph_rows >= shape.rows
        assert shape.graph_rows == shape.rows or shape.graph_rows in recipe.graph_sizes
        assert shape.why


@given(st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_text_is_a_recipe_or_a_plan_error(text: str) -> None:
    try:
        recipe, _ = recipe_from_text(text)
    except PlanError:
        return
    assert isinstance(recipe, Recipe)
