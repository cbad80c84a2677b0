"""What removes the wedge: each change is put to the same three layers as the recipe itself, never recited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .recipe import Recipe
from .recipe_answer import RecipeJudge
from .verdicts import BuildAudit, MitigationFinding, RecipeAnswer, Word

__all__ = ["UPGRADE", "check_mitigations", "check_upgrade"]

UPGRADE = "upgrade"


def _every_size(recipe: Recipe) -> Recipe:
    sizes = tuple(recipe.next_n * count for count in range(1, recipe.max_num_seqs + 1))
    return replace(recipe, capture_sizes=sizes)


def _changes(recipe: Recipe) -> list[tuple[str, str, Recipe]]:
    every = _every_size(recipe)
    sizes = ",".join(map(str, every.capture_sizes or ()))
    return [
        ("capture every size", f"--compilation-config '{{\"cudagraph_capture_sizes\":[{sizes}]}}'", every),
        ("piecewise graphs", '--compilation-config \'{"cudagraph_mode":"PIECEWISE"}\'', replace(recipe, graph_mode="PIECEWISE")),
        ("plain decode", "no --speculative-config", replace(recipe, mtp=0, method="none")),
    ]


def check_mitigations(judge: RecipeJudge, recipe: Recipe, answer: RecipeAnswer) -> list[MitigationFinding]:
    """For an architecture on which the recipe wedges: does each change remove every wedging count? Empty where it does not
    wedge."""
    if answer.word != "VULNERABLE":
        return []
    sm = int(answer.arch.removeprefix("sm_"))
    findings: list[MitigationFinding] = []
    for name, change, changed in _changes(recipe):
        after = judge.answer(changed, sm)
        word: Word = "HOLDS" if after.word in ("HOLDS", "PROVED", "NOT PRESENT") else after.word
        if word == "VULNERABLE":
            why = f"still wedges at {', '.join(map(str, after.wedges_at))} live requests"
        elif word == "HOLDS":
            why = "no live-request count wedges any more"
        else:
            why = after.why
        findings.append(MitigationFinding(name=name, change=change, arch=answer.arch, word=word, why=why))
    return findings


def check_upgrade(build: BuildAudit, others: Mapping[str, BuildAudit]) -> list[MitigationFinding]:
    """Which of the other builds audited in the same run is rid of it; without one, the command that would tell."""
    vulnerable = [item for item in build.recipe if item.word == "VULNERABLE"]
    findings: list[MitigationFinding] = []
    for answer in vulnerable:
        fixed = [
            other for other in others.values()
            if other.target != build.target and other.build.known
            and _kernel_word(other, answer.arch) == "PROVED" and all(item.word != "VULNERABLE" for item in other.recipe if
            item.arch == answer.arch)
        ]  # fmt: skip
        if fixed:
            best = fixed[0]
            why = "its kernel is proved for this architecture and the recipe wedges at no count, in this run"
            findings.append(
                MitigationFinding(name=UPGRADE, change=f"pip install '{best.build.name}'", arch=answer.arch, word="PROVED", why=why)
            )
        else:
            why = "no other build was audited in this run; ask: dsv4-repro audit vllm==0.28.0"
            findings.append(
                MitigationFinding(name=UPGRADE, change="a release with the guard", arch=answer.arch, word="CANNOT TELL", why=why)
            )
    return findings


def _kernel_word(build: BuildAudit, arch: str) -> str:
    words = {item.word for item in build.consumer if item.question == "agreement" and item.arch == arch}
    return "PROVED" if words == {"PROVED"} else "not proved"
