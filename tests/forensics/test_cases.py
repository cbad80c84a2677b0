"""Every labelled case, whole and with parts missing: the verdict may get weaker, never wrong at medium or high confidence."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsv4_repro.forensics.autopsy import autopsy_case
from dsv4_repro.forensics.classify import classify
from dsv4_repro.forensics.evidence.gather import read_text
from dsv4_repro.forensics.records import CLASSES, weaker_parent

FOLDER = Path(__file__).parent.parent / "cases"
FILES = sorted(FOLDER.glob("*.txt"))
LABEL = re.compile(r"^# expected: ([a-z-]+)(?: \((?:cause: ([a-z-]+)(?:;|\)))?.*?\)?)? confidence: (high|medium|low)$")
HEADING = re.compile(r"^=== .* ===$")


@dataclass(frozen=True)
class Label:
    class_: str
    cause: str | None
    confidence: str


def label_of(path: Path) -> Label:
    first = path.read_text("utf-8").split("\n", 1)[0]
    match = LABEL.match(first)
    assert match is not None, f"{path.name}: line 1 is no label: {first}"
    return Label(match.group(1), match.group(2), match.group(3))


def evidence_of(path: Path) -> str:
    """The text without its label and its remarks, as the folder's README says."""
    lines = path.read_text("utf-8").split("\n")[1:]
    return "\n".join(line for line in lines if not line.startswith("# ") or line.startswith(("# HELP", "# TYPE")))


def sections_of(text: str) -> list[str]:
    parts: list[list[str]] = [[]]
    for line in text.split("\n"):
        if HEADING.match(line):
            parts.append([])
        parts[-1].append(line)
    return ["\n".join(part) for part in parts if any(line.strip() for line in part)]


def lineage(class_: str) -> list[str]:
    found: list[str] = []
    current: str | None = class_
    while current is not None:
        found.append(current)
        current = weaker_parent(current)
    return found


def is_weaker_right(class_: str, cause: str | None, label: Label) -> bool:
    if class_ == label.class_:
        return cause is None or label.cause is None or cause == label.cause
    return class_ in lineage(label.class_)


def test_there_are_cases_of_every_class() -> None:
    missing = set(CLASSES) - {label_of(path).class_ for path in FILES}
    assert not missing


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_label_is_reached(path: Path) -> None:
    label = label_of(path)
    result = autopsy_case(read_text(path.name, evidence_of(path)))
    verdict = result.diagnosis.verdict
    explanation = "\n".join(
        f"{f.rule} {f.class_} {f.answer} {f.strength} {f.cause} {f.text} {f.error}"
        for f in result.classification.findings
        if f.answer != "unknown" or f.error
    )
    assert (verdict.class_, verdict.confidence) == (label.class_, label.confidence), explanation
    if label.cause is not None:
        assert verdict.cause == label.cause, explanation
    assert result.diagnosis.next, "every verdict names the next measurement"
    assert not [f for f in result.classification.findings if f.error]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_missing_sections_never_make_it_wrong(path: Path) -> None:
    label = label_of(path)
    parts = sections_of(evidence_of(path))
    for size in (1, 2):
        for drop in itertools.combinations(range(len(parts)), size):
            text = "\n".join(part for index, part in enumerate(parts) if index not in drop)
            found = classify(read_text(path.name, text))
            right = is_weaker_right(found.class_, found.cause, label)
            names = [parts[index].split("\n", 1)[0] for index in drop]
            assert right or found.confidence == "low", f"without {names}: {found.class_}/{found.cause} {found.confidence}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_one_section_alone_is_never_wrong(path: Path) -> None:
    """All but one section gone: an old Xid line alone, one healthy-looking reading alone, a victim's stack alone."""
    label = label_of(path)
    for part in sections_of(evidence_of(path)):
        found = classify(read_text(path.name, part))
        right = is_weaker_right(found.class_, found.cause, label)
        assert right or found.confidence == "low", f"only {part.splitlines()[0]}: {found.class_}/{found.cause} {found.confidence}"


@pytest.mark.parametrize("path", FILES[:24], ids=lambda path: path.stem)
def test_order_of_sections_does_not_change_the_class(path: Path) -> None:
    parts = sections_of(evidence_of(path))
    forward = classify(read_text(path.name, "\n".join(parts)))
    # Samples of one source must stay in order; whole kinds of evidence may come in any order.
    rotated = classify(read_text(path.name, "\n".join([*parts[1:], parts[0]])))
    assert rotated.class_ == forward.class_ or "low" in (rotated.confidence, forward.confidence)
