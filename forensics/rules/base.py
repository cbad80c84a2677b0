"""What a rule is: a function over the view of a case that answers supported, contradicted or unknown, with the lines it used.

A rule that raises is unknown with its error; it never stops the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..evidence.refs import Ref
from ..records import CLASSES
from .view import View

__all__ = ["FAIR", "STRONG", "WEAK", "Finding", "Rule", "contradicted", "run_rules", "supported", "unknown"]

#: How far a rule's support reaches: the confidence that the verdict may carry by it alone.
WEAK, FAIR, STRONG = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule's answer for one class. ``strength``: WEAK, FAIR or STRONG for supported; the same for contradicted; 0 for unknown.

    ``cause`` may be None. ``missing``: for unknown, what would let the rule answer. ``error``: the rule failed.
    """

    rule: str
    class_: str
    answer: Literal["supported", "contradicted", "unknown"]
    strength: int
    text: str
    refs: tuple[Ref, ...] = ()
    cause: str | None = None
    missing: str = ""
    error: str = ""

    def __post_init__(self) -> None:
        if self.class_ not in CLASSES or (self.cause is not None and self.cause not in CLASSES[self.class_][0]):
            raise ValueError(f"rule {self.rule}: no such class or cause: {self.class_}/{self.cause}")


Rule = Callable[[View], Iterable[Finding]]


def _refs(refs: Iterable[Ref]) -> tuple[Ref, ...]:
    unique: dict[tuple[str, int, int, str], Ref] = {}
    for ref in refs:
        unique.setdefault((ref.source, ref.first, ref.last, ref.unit), ref)
    return tuple(unique.values())[:24]


def supported(rule: str, class_: str, strength: int, text: str, refs: Iterable[Ref], cause: str | None = None) -> Finding:
    return Finding(rule, class_, "supported", strength, text, _refs(refs), cause)


def contradicted(rule: str, class_: str, text: str, refs: Iterable[Ref], strength: int = FAIR) -> Finding:
    return Finding(rule, class_, "contradicted", strength, text, _refs(refs))


def unknown(rule: str, class_: str, text: str, missing: str = "", refs: Iterable[Ref] = ()) -> Finding:
    return Finding(rule, class_, "unknown", 0, text, _refs(refs), missing=missing)


def run_rules(rules: Sequence[tuple[str, str, Rule]], view: View) -> tuple[Finding, ...]:
    """``rules``: (name, the class to blame if it fails, function). Every rule answers, whatever happens inside."""
    findings: list[Finding] = []
    for name, class_, rule in rules:
        try:
            answers = list(rule(view))
        except Exception as error:
            findings.append(Finding(name, class_, "unknown", 0, "the rule failed", error=f"{type(error).__name__}: {error}"[:300]))
            continue
        findings.extend(answers or [Finding(name, class_, "unknown", 0, "nothing in the evidence speaks to it")])
    return tuple(findings)
