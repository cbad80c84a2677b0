"""The run directory of a hang that ``watch`` found: the samples before it, the evidence, diagnosis and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ... import __version__
from ...clock import SYSTEM, Clock, utc_stamp
from ...errors import ReproError
from ...forensics.collect.process_table import boot_id, start_ticks
from ...forensics.device_state import Unread
from ...forensics.records import Diagnosis
from ...reports.document import ReportSource
from ...scenarios.registry import scenario_for_signature
from ..report_files import fixes_of, reports_of, write_reports
from ..run_end import write_end
from ..run_records import RunRecord
from ..runstore import RunStore
from ..verdicts import completed
from .live_evidence import evidence_text
from .watch_loop import Hang
from .why_look import deadline_of

__all__ = ["Keep", "diagnosis_of_samples", "keep_hang"]

#: Captures into the store and judges; None where no verdict could be reached.
Keep = Callable[[Hang, RunStore, bool], Diagnosis | None]


def _from_samples(hang: Hang, clock: Clock) -> Diagnosis:
    """The classifier's word on the observer's own samples: what is left where the capture gave nothing."""
    from ...forensics.autopsy import autopsy_case
    from ...forensics.evidence.gather import read_text

    text = evidence_text((hang.snapshot,), wall=clock.wall())
    return autopsy_case(read_text("samples", text), ground="server").diagnosis


def keep_hang(
    hang: Hang,
    root: Path,
    keep: Keep,
    *,
    attach: bool,
    command: Sequence[str],
    clock: Clock = SYSTEM,
    created: Callable[[Path], None] = lambda _path: None,
) -> tuple[RunStore, Diagnosis]:
    """Write the run directory; the (closed) store and the diagnosis. RunStoreError if it cannot be written at all.

    Order: the samples first (they are in memory and lost with us), then the engine's deadline, then the evidence. ``created`` is
    told the directory as soon as it is there.
    """
    with RunStore.create("watch", root=root, clock=clock) as store:
        created(store.path)
        record = RunRecord(
            scenario="watch",
            ground="server",
            command=tuple(command),
            started=utc_stamp(clock),
            versions={"dsv4-repro": __version__},
        )
        store.write_run(record)
        store.emit("start", ground="server", scenario="watch", base_url=hang.target.base_url)
        pids = [pid for pid in (hang.target.api_pid, *hang.target.engine_pids) if pid is not None]
        if pids:
            # unwedge RUN finds it by this, and tells it from a later process of the same number.
            store.emit(
                "server", state="found", url=hang.target.base_url, pid=pids[0], start_ticks=start_ticks(pids[0]), boot=boot_id()
            )
        for kind, fields in hang.recent:
            store.emit(kind, **{name: value for name, value in fields.items() if name not in ("t", "at", "kind")}, before_hang=True)
        store.emit("hung", reasons=hang.assessment.reasons, device_signals=hang.assessment.device_signals)
        unread: list[Unread] = []
        deadline = deadline_of(hang.target, clock=clock)
        store.emit("deadline", text=deadline.text, state=deadline.state, remaining_s=deadline.remaining_s, known=deadline.known)
        found: Diagnosis | None = None
        try:
            found = keep(hang, store, attach)
        except ReproError as error:
            unread.append(Unread("the capture", str(error), error.help_text))
        except Exception as error:
            # A defect of the capture must not cost the samples and the report.
            unread.append(
                Unread("the capture", f"{type(error).__name__}: {error}"[:300], "Please report this with the run directory.")
            )
        diagnosis = found if found is not None else diagnosis_of_samples(hang, clock=clock)
        extra: dict[str, Any] = {"deadline": {"text": deadline.text, "remaining_s": deadline.remaining_s, "known": deadline.known}}
        diagnosis = completed(diagnosis, unread=unread, **extra)
        final = record.model_copy(
            update={"state": "finished", "ended": utc_stamp(clock), "outcome": diagnosis.outcome, "exit_status": 3}
        )
        write_end(store, final, diagnosis, unwritten_status=3)
        store.emit("verdict", outcome=diagnosis.outcome, sentence=diagnosis.verdict.sentence)
        entry = scenario_for_signature(diagnosis.verdict.signature)
        source = ReportSource(
            diagnosis=diagnosis,
            run=final.document(),
            title=f"Watch of {hang.target.base_url or hang.target.api_pid}",
            fixes=fixes_of(entry) if diagnosis.outcome == "hang" else (),
            targets=(),
            version=__version__,
        )
        write_reports(reports_of(source), store.path)
    return store, diagnosis


def diagnosis_of_samples(hang: Hang, *, clock: Clock = SYSTEM) -> Diagnosis:
    """What the watchdog's own samples say of the hang: all there is where no evidence could be taken or kept."""
    return _as_hang(_from_samples(hang, clock), hang)


def _as_hang(diagnosis: Diagnosis, hang: Hang) -> Diagnosis:
    """The samples alone name no cause; that it hangs is the watchdog's finding, on the device's own signal."""
    if diagnosis.outcome == "hang":
        return diagnosis
    document = diagnosis.document()
    single = len(hang.target.ranks) == 1
    verdict = {
        "class": "gpu-kernel-stuck" if single else "unknown", "cause": None, "confidence": "low", "signature": None,
        "identity": None,
        "sentence": "; ".join((*hang.assessment.device_signals, *hang.assessment.reasons))[:1000],
    }  # fmt: skip
    return Diagnosis.model_validate({**document, "outcome": "hang" if single else "inconclusive", "verdict": verdict, "chain": []})
