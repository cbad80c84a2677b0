"""The answer for a recipe on a build of our own: producer, dispatch and kernel composed; which counts wedge, and what helps."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics.audit.conditions import LaunchConditions
from dsv4_repro.forensics.audit.mitigations import check_mitigations, check_upgrade
from dsv4_repro.forensics.audit.recipe import Recipe
from dsv4_repro.forensics.audit.recipe_answer import RecipeJudge
from dsv4_repro.forensics.audit.release_source import ReleaseSource
from dsv4_repro.forensics.audit.slices import SliceStore
from dsv4_repro.forensics.audit.verdicts import BuildAudit, BuildIdentity, ConsumerFinding, RecipeAnswer, Word
from dsv4_repro.kernels.build import builtin_image
from dsv4_repro.kernels.plan import release_profile
from dsv4_repro.kernels.shipped import ShippedKernels

_SPEC = importlib.util.spec_from_file_location("audit_conftest", Path(__file__).with_name("conftest.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
_CONFTEST: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_CONFTEST)
release = _CONFTEST.release


def judge(variant: str, source: ReleaseSource | None, sm: int = 120) -> RecipeJudge:
    images = tuple(builtin_image(variant, sm, 512, vec) for vec in (4, 2, 1))
    kernels = ShippedKernels("builtin", None, None, "here", None, "", (f"sm_{sm}",), images)
    return RecipeJudge(kernels, source, release_profile("0.27.1"), "assumed", LaunchConditions(SliceStore()))


ALL_COUNTS = (3, 5, 6, 7, 9, 10, 11, 13, 14, 15)


@pytest.mark.parametrize(
    ("max_model_len", "wedges"),
    [(46080, ()), (65536, (3,)), (98304, (3,)), (131072, ALL_COUNTS), (131080, ())],
)  # fmt: skip
def test_the_table_of_live_counts_on_a_card_with_99_kib(max_model_len: int, wedges: tuple[int, ...]) -> None:
    """As computed for vLLM 0.27.1's recipe (MTP 1, default capture sizes); lengths divisible by 1024 do not depend on the row
    stride."""
    found = judge("unguarded", release(clamped=False)).answer(Recipe(max_model_len=max_model_len), 120)
    assert (found.word, found.wedges_at) == ("VULNERABLE" if wedges else "HOLDS", wedges)


def test_lengths_between_the_edges_depend_on_the_row_stride() -> None:
    """46084 to 47075: one CTA holds the row at its width, two where rows are padded to 256 floats. Neither is claimed."""
    found = judge("unguarded", release(clamped=False)).answer(Recipe(max_model_len=46100), 120)
    assert found.word == "CANNOT TELL"
    assert "depends on the row stride" in found.why


def test_each_fix_alone_is_enough() -> None:
    assert judge("guard", release(clamped=False)).answer(Recipe(), 120).word == "HOLDS"
    assert judge("unguarded", release(clamped=True)).answer(Recipe(), 120).word == "HOLDS"


def test_the_uncompressed_promise_keeps_the_peers() -> None:
    found = judge("unguarded", release(clamped=False, promised="metadata.max_seq_len")).answer(Recipe(), 120)
    assert found.word == "HOLDS"
    # ... but not where there is no compression and the context fits the threshold (seen on a real server: V3.2, 16384).
    plain = Recipe(max_model_len=16384, compress=1)
    assert judge("unguarded", release(clamped=False, promised="metadata.max_seq_len")).answer(plain, 120).wedges_at == (3,)


def test_another_operator_is_not_this_defect() -> None:
    found = judge("unguarded", release(clamped=False), 90).answer(Recipe(), 90)
    assert found.word == "HOLDS"
    padded = [item for item in found.counts if item.operator]
    assert {item.word for item in padded} == {"NOT PRESENT"}
    assert {item.operator for item in padded} == {"cooperative_topk"}


def test_data_parallel_ranks_with_fewer_requests_wedge() -> None:
    found = judge("unguarded", release(clamped=False)).answer(Recipe(dp=2), 120)
    assert found.word == "VULNERABLE"
    assert {1, 2, 3} <= set(found.wedges_at)
    assert {item.word for item in found.counts if item.live == 0} == {"CANNOT TELL"}


def test_deeper_speculation_takes_the_variable_path_and_is_safe() -> None:
    assert judge("unguarded", release(clamped=False)).answer(Recipe(mtp=2), 120).word == "HOLDS"


def test_what_is_not_modelled_or_not_at_hand_is_cannot_tell() -> None:
    assert judge("unguarded", release(clamped=False)).answer(Recipe(method="eagle3"), 120).word == "CANNOT TELL"
    assert judge("unguarded", None).answer(Recipe(), 120).word == "CANNOT TELL"
    assert judge("unguarded", release(clamped=False)).answer(Recipe(), 42).word == "CANNOT TELL"
    empty = RecipeJudge(None, release(clamped=False), release_profile("0.27.1"), "", LaunchConditions(SliceStore()))
    assert empty.answer(Recipe(), 120).word == "CANNOT TELL"


def test_mitigations_are_checked_not_recited() -> None:
    found = judge("unguarded", release(clamped=False))
    checked = {item.name: item for item in check_mitigations(found, Recipe(), found.answer(Recipe(), 120))}
    assert {name: item.word for name, item in checked.items()} == {
        "capture every size": "HOLDS",
        "piecewise graphs": "HOLDS",
        "plain decode": "HOLDS",
    }
    # With data parallelism a rank is padded to the largest whatever is captured: capturing every size does not help.
    recipe = Recipe(dp=2)
    checked = {item.name: item for item in check_mitigations(found, recipe, found.answer(recipe, 120))}
    assert checked["capture every size"].word == "VULNERABLE"
    assert "still wedges at" in checked["capture every size"].why
    fixed = judge("guard", release(clamped=False))
    assert check_mitigations(fixed, Recipe(), fixed.answer(Recipe(), 120)) == []


def build(target: str, word: Word, recipe_word: Word) -> BuildAudit:
    consumer = ConsumerFinding(
        arch="sm_120", top_k=512, vec=4, question="agreement", word=word, why="x" if word == "CANNOT TELL" else ""
    )
    answer = RecipeAnswer(arch="sm_120", word=recipe_word, wedges_at=(3,) if recipe_word == "VULNERABLE" else ())
    return BuildAudit(target=target, build=BuildIdentity(name=target, known=True), consumer=(consumer,), recipe=(answer,))


def test_an_upgrade_is_only_named_when_it_was_audited() -> None:
    old = build("vllm==1", "PROVED", "VULNERABLE")
    new = build("vllm==2", "PROVED", "PROVED")
    assert [item.word for item in check_upgrade(old, {"vllm==1": old})] == ["CANNOT TELL"]
    (found,) = check_upgrade(old, {"vllm==1": old, "vllm==2": new})
    assert (found.word, found.change) == ("PROVED", "pip install 'vllm==2'")
    assert check_upgrade(new, {"vllm==2": new}) == []


def test_the_dispatch_says_what_max_seq_len_is() -> None:
    found = judge("unguarded", release(clamped=False)).dispatch(Recipe(), 120)
    assert (found.operator, found.rows, found.max_seq_len, found.max_seq_len_is) == (
        "persistent_topk",
        8,
        16384,
        "the row width (logits.shape[1])",
    )
    other = judge("unguarded", release(clamped=False, promised="metadata.max_seq_len")).dispatch(Recipe(), 120)
    assert (other.max_seq_len, other.max_seq_len_is) == (65536, "the batch's maximum, uncompressed")
