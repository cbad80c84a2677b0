"""Published releases, from their wheels on the package index: the words of the public record, proved anew. Skipped offline."""

from __future__ import annotations

from functools import lru_cache

import pytest

from dsv4_repro.errors import DownloadError
from dsv4_repro.forensics.audit.build_audit import AuditOptions, audit_build
from dsv4_repro.forensics.audit.recipe import Recipe
from dsv4_repro.forensics.audit.targets import open_target
from dsv4_repro.forensics.audit.verdicts import BuildAudit

pytestmark = pytest.mark.release_wheel


@lru_cache(maxsize=8)
def audited(release: str, sm: int) -> BuildAudit:
    try:
        opened = open_target(f"vllm=={release}", arch=sm)
    except DownloadError as error:
        pytest.skip(f"the package index cannot be read: {error}")
    return audit_build(opened, AuditOptions(sm=sm, network=False))


@pytest.mark.parametrize("sm", [90, 120])
def test_the_last_release_without_the_guard(sm: int) -> None:
    found = audited("0.27.1", sm)
    assert found.build.known
    assert found.kernel_word == "VULNERABLE"
    witnesses = [item.witness for item in found.consumer if item.question == "agreement"]
    assert len(witnesses) == 9
    for witness in witnesses:
        assert witness is not None
        assert (witness.length, witness.replayed) == (-1, True)
    assert found.producer_word == "VULNERABLE"
    (answer,) = found.recipe
    assert (answer.word, answer.wedges_at) == (("VULNERABLE", (3,)) if sm == 120 else ("HOLDS", ()))
    assert {item.name: item.word for item in found.relatives}["histogram ring"] == "VULNERABLE"


@pytest.mark.parametrize("sm", [90, 100, 120])
def test_the_fixed_release_is_proved(sm: int) -> None:
    found = audited("0.33.0", sm)
    assert found.kernel_word == "PROVED"
    assert found.bounds_word in ("PROVED", "HOLDS")
    assert {item.word for item in found.recipe} == {"PROVED"}
    assert {item.name: item.word for item in found.relatives}["histogram ring"] == "HOLDS"


@pytest.mark.parametrize(
    ("release", "kernel", "recipe", "operator"),
    [
        ("0.19.1", "NOT PRESENT", "NOT PRESENT", "large_context_topk"), ("0.20.0", "VULNERABLE", "HOLDS", "persistent_topk"),
        ("0.24.0", "VULNERABLE", "HOLDS", "cooperative_topk"), ("0.28.0", "PROVED", "PROVED", "persistent_topk"),
    ],
)  # fmt: skip
def test_the_history(release: str, kernel: str, recipe: str, operator: str) -> None:
    found = audited(release, 120)
    assert (found.kernel_word, found.recipe_word, found.dispatch[0].operator) == (kernel, recipe, operator)


def test_the_server_that_was_seen_to_wedge() -> None:
    """vLLM 0.23.0, DeepSeek-V3.2 (no compression), max_model_len 16384, on an H200: it wedged at three live requests."""
    try:
        opened = open_target("vllm==0.23.0", arch=90)
    except DownloadError as error:
        pytest.skip(f"the package index cannot be read: {error}")
    recipe = Recipe(max_model_len=16384, compress=1, top_k=2048, max_num_batched_tokens=2048)
    found = audit_build(opened, AuditOptions(recipe=recipe, sm=90, network=False, relatives=False))
    assert [(item.word, item.wedges_at) for item in found.recipe] == [("VULNERABLE", (3,))]
