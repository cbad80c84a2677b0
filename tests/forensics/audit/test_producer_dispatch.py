"""Producer and dispatch layers on a release written here: found by feature, run on the padded batch, refused where it cannot be
followed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics.audit.dispatch import run_dispatch
from dsv4_repro.forensics.audit.producer import PADDED_BATCH, build_metadata, examine_producer
from dsv4_repro.forensics.audit.recipe import Recipe
from dsv4_repro.forensics.audit.release_source import ReleaseSource
from dsv4_repro.forensics.audit.values import CannotDecideError
from dsv4_repro.forensics.audit.vllm_standin import Batch

_SPEC = importlib.util.spec_from_file_location("audit_conftest", Path(__file__).with_name("conftest.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
_CONFTEST: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_CONFTEST)
release = _CONFTEST.release


def words(source: ReleaseSource) -> dict[str, tuple[str, tuple[int | None, ...]]]:
    return {item.path: (item.word, item.padding) for item in examine_producer(source, Recipe(), 120, 188)}


def test_the_three_paths_without_the_clamp(vulnerable_release: ReleaseSource) -> None:
    assert words(vulnerable_release) == {
        "native": ("VULNERABLE", (-1, 0)), "uniform": ("VULNERABLE", (-2, -1, 0)), "variable": ("HOLDS", (0, 0, 0)),
    }  # fmt: skip


def test_the_three_paths_with_the_clamp(fixed_release: ReleaseSource) -> None:
    assert words(fixed_release) == {"native": ("HOLDS", (0, 0)), "uniform": ("HOLDS", (0, 0, 0)), "variable": ("HOLDS", (0, 0, 0))}


def test_only_the_clamp_changes_and_only_the_padding(vulnerable_release: ReleaseSource, fixed_release: ReleaseSource) -> None:
    raw, repaired = (
        next(item for item in examine_producer(source, Recipe(), 120, 188) if item.path == "native")
        for source in (vulnerable_release, fixed_release)
    )
    assert raw.lengths[:6] == repaired.lengths[:6] == (3058, 3059, 3059, 3060, 3059, 3060)
    assert raw.how == "interpreted"
    assert raw.where.startswith("vllm/v1/attention/indexer.py:")


def test_the_code_is_found_wherever_it_lies(vulnerable_release: ReleaseSource) -> None:
    members = {name.replace("attention/indexer", "elsewhere/new_name"): raw for name, raw in vulnerable_release.members.items()}
    assert words(ReleaseSource(members))["native"] == ("VULNERABLE", (-1, 0))


def test_code_that_cannot_be_followed_is_judged_from_its_statement_and_says_so() -> None:
    source = release(clamped=False)
    text = (
        source.members["vllm/v1/attention/indexer.py"]
        .decode()
        .replace(
            "        if use_native:", "        mystery_check(self)\n        if magic():\n            pass\n        if use_native:"
        )
    )
    broken = ReleaseSource({**source.members, "vllm/v1/attention/indexer.py": text.encode()})
    found = {item.path: item for item in examine_producer(broken, Recipe(), 120, 188)}
    assert (found["native"].word, found["native"].how, found["native"].padding) == ("VULNERABLE", "syntax", (-1, 0))
    assert (found["variable"].word, found["variable"].how) == ("CANNOT TELL", "syntax")
    assert "magic" in found["variable"].why


def test_the_statement_with_its_clamp_is_not_taken_without_it() -> None:
    source = release(clamped=True)
    text = (
        source.members["vllm/v1/attention/indexer.py"]
        .decode()
        .replace("        if use_native:", "        if magic():\n            pass\n        if use_native:")
    )
    broken = ReleaseSource({**source.members, "vllm/v1/attention/indexer.py": text.encode()})
    native = next(item for item in examine_producer(broken, Recipe(), 120, 188) if item.path == "native")
    assert (native.word, native.how, native.padding) == ("HOLDS", "syntax", (0, 0))


def test_a_build_without_the_indexer() -> None:
    found = examine_producer(ReleaseSource({"vllm/other.py": b"x = 1"}), Recipe(), 120, 188)
    assert {item.word for item in found} == {"NOT PRESENT"}


def test_compression_and_the_batch_s_maximum(vulnerable_release: ReleaseSource) -> None:
    built = build_metadata(vulnerable_release, Recipe(), PADDED_BATCH, 120, 188)
    assert built.lengths.tolist() == [[764, 764], [764, 765], [764, 765], [-1, 0]]
    assert built.batch_max == 65536


@pytest.mark.parametrize(
    ("sm", "promised", "operator", "value"),
    [(120, "logits.shape[1]", "persistent_topk", 16384), (120, "metadata.max_seq_len", "persistent_topk", 65536), (90,
    "logits.shape[1]", "cooperative_topk", 65536),
     (89, "logits.shape[1]", "persistent_topk", 16384)],
)  # fmt: skip
def test_which_operator_with_which_promise(sm: int, promised: str, operator: str, value: int) -> None:
    source = release(clamped=False, promised=promised)
    built = build_metadata(source, Recipe(), PADDED_BATCH, sm, 132)
    made = run_dispatch(source, Recipe(), built, 8)
    assert (made.operator, made.rows, made.stride, made.max_seq_len) == (operator, 8, 16384, value)
    assert made.lengths == (764, 764, 764, 765, 764, 765, -1, 0)
    assert made.sentinel is True
    assert made.place.startswith("vllm/layers/indexer_layer.py:")


def test_a_padded_row_stride_is_passed_on(vulnerable_release: ReleaseSource) -> None:
    recipe = Recipe(max_model_len=50000)
    built = build_metadata(vulnerable_release, recipe, PADDED_BATCH, 120, 188, row_stride=12544)
    made = run_dispatch(vulnerable_release, recipe, built, 8)
    assert (made.width, made.stride) == (12500, 12544)


def test_plain_decode_has_no_illegal_length(vulnerable_release: ReleaseSource) -> None:
    recipe = Recipe(mtp=0, method="none")
    built = build_metadata(vulnerable_release, recipe, Batch((9, 9, 9, 0), (1, 1, 1, 0), 4), 120, 188)
    assert built.lengths.tolist() == [[2], [2], [2], [0]]


def test_a_promise_that_is_not_known_is_not_guessed() -> None:
    source = release(clamped=False, promised="somewhere.else_()")
    built = build_metadata(source, Recipe(), PADDED_BATCH, 120, 188)
    with pytest.raises(CannotDecideError, match="max_seq_len that is not known"):
        run_dispatch(source, Recipe(), built, 8)


def test_a_dispatch_with_an_argument_that_nobody_knows() -> None:
    source = release(clamped=False)
    text = (
        source.members["vllm/layers/indexer_layer.py"]
        .decode()
        .replace("topk_indices_buffer):", "topk_indices_buffer, surprise):", 1)
    )
    changed = ReleaseSource({**source.members, "vllm/layers/indexer_layer.py": text.encode()})
    built = build_metadata(changed, Recipe(), PADDED_BATCH, 120, 188)
    with pytest.raises(CannotDecideError, match="surprise"):
        run_dispatch(changed, Recipe(), built, 8)
