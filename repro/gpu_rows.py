"""A row of a scenario on a card: how it is to be run, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..forensics.records import Diagnosis
from ..scenarios.launches import Row
from .row_tries import row_document
from .run_records import TrialCounts

__all__ = ["GpuOptions", "GpuTried", "gpu_options"]


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """How a row is run on a card. ``dump``: a GPU core dump of our own child at the first hang; ``timeout_s``: of the whole row.
    ``second``: the other GPU of a row of two ranks (None: the next number).
    """

    ordinal: int = 0
    trials: int = 1
    seed: int = 0
    share: bool = False
    dump: bool = True
    cuda_gdb: bool = True
    unwedge: bool = True
    timeout_s: float | None = None
    step_timeout_s: float = 10.0
    second: int | None = None


@dataclass(frozen=True, slots=True)
class GpuTried:
    """A row that was run. ``diagnosis``: of the first hang, else the first other failure, else of the clean run."""

    row: Row
    diagnosis: Diagnosis
    counts: TrialCounts
    folder: Path
    status: int
    device: str
    seconds: float

    @property
    def as_expected(self) -> bool:
        """The verdict is what the row names, in class and cause, or another end of the same defect that it names."""
        verdict = self.diagnosis.verdict
        return (verdict.class_, verdict.cause) in ((self.row.class_, self.row.cause), *self.row.also)

    @property
    def launches(self) -> int:
        """Trials that came to an end of some kind."""
        return self.counts.hang + self.counts.clean + self.counts.other + self.counts.no_window

    def document(self) -> dict[str, Any]:
        """As JSON, with the published case that it is, and where it ran."""
        verdict = self.diagnosis.verdict
        named: dict[str, tuple[str, str | None]] = {self.diagnosis.outcome: (verdict.class_, verdict.cause)}
        weaker = {"hang": ("gpu-kernel-stuck", None), "other": ("unknown", None), "clean": ("not-hung", None)}
        counted = (("hang", self.counts.hang), ("other", self.counts.other), ("clean", self.counts.clean))
        document = row_document(
            self.row, self.diagnosis, as_expected=self.as_expected, launches=self.launches,
            counts=[
                {"class": class_, "cause": cause, "launches": count}
                for name, count in counted
                if count
                for class_, cause in [named.get(name, weaker[name])]
            ],
        )  # fmt: skip
        document["found"]["signature"] = verdict.signature
        return {**document, "run": str(self.folder), "device": self.device, "seconds": round(self.seconds, 3)}


def gpu_options(device: str | None, **more: Any) -> GpuOptions:
    """Options from ``--device`` (a number, or two for a row of two ranks; UsageError otherwise) and the rest."""
    first, comma, second = (device or "0").partition(",")
    if not first.isdecimal() or (comma and not second.isdecimal()):
        raise UsageError(f"--device {str(device)[:40]}: a GPU number is expected with --on gpu", help_text="nvidia-smi -L")
    if comma and int(second) == int(first):
        raise UsageError(f"--device {str(device)[:40]}: two ranks need two GPUs", help_text="nvidia-smi -L")
    return GpuOptions(ordinal=int(first), second=int(second) if comma else None, **more)
