"""The launches of a row on the CPU: how each ended, and which of them is the row's answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..clock import Deadline
from ..forensics.records import Diagnosis, Evidence
from ..scenarios.launches import Row

__all__ = ["Ended", "Keep", "Tried", "row_document", "try_schedules"]

#: Adds an artefact: (kind, file name, content) -> what the diagnosis cites. Without one nothing is written.
Keep = Callable[[str, str, "bytes | str"], Evidence]


@dataclass(frozen=True, slots=True)
class Ended:
    """How one launch ended, diagnosed. ``detail``: schedule's seed, counters, blocks, experiment; JSON values only."""

    diagnosis: Diagnosis
    detail: dict[str, Any]


@dataclass(slots=True)
class Tried:
    """All launches of a row. ``first``: its answer, see ``try_schedules``. ``counts``: (class, cause) -> launches."""

    row: Row
    first: Ended
    counts: Counter[tuple[str, str | None]] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        return sum(self.counts.values())

    @property
    def as_expected(self) -> bool:
        """A defect: the first failure is what the row names. A repair: every launch ended well."""
        verdict = self.first.diagnosis.verdict
        return (verdict.class_, verdict.cause) == (self.row.class_, self.row.cause)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        counts = sorted(self.counts.items(), key=str)
        return row_document(
            self.row, self.first.diagnosis, as_expected=self.as_expected, launches=self.launches,
            counts=[{"class": key[0], "cause": key[1], "launches": count} for key, count in counts],
        )  # fmt: skip


def row_document(
    row: Row, diagnosis: Diagnosis, *, as_expected: bool, launches: int, counts: list[dict[str, Any]]
) -> dict[str, Any]:
    """What came of a row as JSON, on any ground: what was expected and found. ``counts``: launches by class and cause."""
    verdict = diagnosis.verdict
    return {
        "row": row.name,
        "kernel": row.kernel,
        "fixed": row.fixed,
        "expected": {"class": row.class_, "cause": row.cause},
        "found": {"class": verdict.class_, "cause": verdict.cause, "confidence": verdict.confidence},
        "as_expected": as_expected,
        "launches": launches,
        "counts": counts,
        "sentence": verdict.sentence,
    }


def try_schedules(
    row: Row, tries: int, launch: Callable[[int, Keep | None], Ended], *, count_all: bool, keep: Keep | None,
    deadline: Deadline | None, progress: Callable[[str], None],
) -> Tried:  # fmt: skip
    """So many launches of a row, each under an order of its own, up to the first that ends in a way the row does not pass over.

    ``launch``: number (from 0) -> how it ended; it is given ``keep`` as long as what it shows may become the row's answer.
    ``count_all``: go on to the last. At least one launch is made, whatever ``deadline`` says.
    """

    def clean(ended: Ended) -> bool:
        return ended.diagnosis.outcome == "clean"

    def passed_over(ended: Ended) -> bool:
        return (ended.diagnosis.verdict.class_, ended.diagnosis.verdict.cause) in row.also

    def tells(ended: Ended) -> int:
        # Of a repair a launch that ended well tells more than another defect that is passed over; of a defect it is the other way.
        return 1 if (clean(ended) if row.fixed else passed_over(ended)) else 0 if clean(ended) or passed_over(ended) else 2

    tried: Tried | None = None
    for number in range(tries):
        progress(f"{row.name}: schedule {number + 1} of at most {tries}")
        undecided = tried is None or tells(tried.first) < 2
        ended = launch(number, keep if undecided else None)
        if tried is None:
            tried = Tried(row, ended)
        elif undecided and tells(ended) >= tells(tried.first) and not (clean(ended) and clean(tried.first)):
            tried.first = ended
        verdict = ended.diagnosis.verdict
        tried.counts[verdict.class_, verdict.cause] += 1
        if (tells(ended) == 2 and not count_all) or (deadline is not None and deadline.expired):
            break
    assert tried is not None
    return tried
