"""A row of a scenario on a card with a run directory: the trials, the record, the reports. ``relative_run`` decides which row."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..clock import SYSTEM, Clock, utc_stamp
from ..forensics.records import Diagnosis, Window
from ..forensics.wrong_rows import PUBLISHED
from ..scenarios.launches import CrossRank, Row
from ..scenarios.registry import Scenario
from .exits import Expectation, exit_status
from .gpu_rows import GpuOptions, GpuTried
from .leftovers import mark_run
from .relative_gpu import DUMPED_CTAS, RelativeGround, gpu_request, image_of, launch_plan, on_device, relative_diagnose, row_on_gpu
from .run import RunSettings, run_workload
from .run_end import breaks_noted, finish_row, flat_environment
from .run_records import KernelRecord, RunRecord
from .runstore import RunStore
from .verdicts import completed

if TYPE_CHECKING:
    from ..kernels.devices import DeviceDescription

__all__ = ["command_of_row", "rerun", "run_gpu_row"]


def run_gpu_row(
    entry: Scenario, row: Row, options: GpuOptions, *, command: tuple[str, ...] = (), out: Path | None = None,
    expect: Expectation | None = None, tell: Callable[[list[str]], None] = lambda _lines: None,
    progress: Callable[[str], None] = lambda _text: None,
    make: Callable[..., RelativeGround] = RelativeGround, describe: Callable[[int], DeviceDescription] | None = None,
    clock: Clock = SYSTEM,
) -> GpuTried:  # fmt: skip
    """Run the row ``options.trials`` times on a card and write its directory. Whatever is raised, ``run.json`` says how it ended.

    Errors of the ground (no driver, a card in use, no kernel) pass through. ``make``, ``describe``: stand-ins in tests.
    """
    from .device_probe import describe_gpu
    from .machine import run_versions

    if isinstance(row.what, CrossRank):
        from .crossrank_gpu import run_crossrank_row

        return run_crossrank_row(
            entry, row, options, command=command, out=out, expect=expect, tell=tell, progress=progress,
            describe=describe or describe_gpu, clock=clock,
        )  # fmt: skip
    what = row_on_gpu(row)
    progress(f"asking the driver about GPU {options.ordinal}")
    device = (describe or describe_gpu)(options.ordinal)
    progress(f"getting the kernel {row.kernel}")
    image, note = image_of(row, what, device.sm)
    what = on_device(what, image, device)
    plan = launch_plan(what, image, device)
    beside = f", {what.leave} slots left by another kernel" if what.leave else ", a kernel queued behind it" if what.queued else ""
    tell([
        f"ground gpu: {device.name} ({device.arch}, {device.num_sms} SMs), GPU {options.ordinal}",
        f"{entry.name}, row {row.name}: {row.text}",
        note,
        *plan.lines(),
        f"{plan.resident_cap} CTAs of it can be resident{beside}; {options.trials} launches",
        f"expected: {row.class_}{' / ' + row.cause if row.cause else ''}",
    ])  # fmt: skip
    with RunStore.create(entry.name, out=out, clock=clock) as store:
        mark_run(store.path)
        began = clock.monotonic()
        record = RunRecord(
            scenario=entry.name, ground="gpu", command=command, started=utc_stamp(clock), seed=options.seed,
            versions=run_versions(),
            environment={"device": device.name, "sm": device.sm, "sm_count": device.num_sms, "described_by": device.source},
            kernel=KernelRecord(
                origin=image.origin, function=image.function, sha256=image.cubin_sha256, sm=image.sm, guarded=image.guarded,
                label=image.label,
            ),
            launches={row.name: {
                "lines": plan.lines(), "grid": plan.grid, "lengths": list(what.case.lengths), "counter": what.counter,
                "slots": plan.resident_cap, "leave": what.leave, "queued": what.queued,
            }},
        )  # fmt: skip
        store.write_run(record)
        grounds: list[RelativeGround] = []

        def new_ground() -> RelativeGround:
            grounds.append(make(what, keep=lambda kind, path, origin: store.add_evidence(kind, path, origin, collector="child")))
            return grounds[-1]

        with breaks_noted(store, record, clock):
            dump = options.dump and min(plan.grid, plan.resident_cap) <= DUMPED_CTAS
            # After a debugger a second child would have to be hung for the dump, and the first one's kernel holds all slots.
            attach = options.cuda_gdb and not (dump and what.leave)
            request = gpu_request(
                what, image, device, ordinal=options.ordinal, seed=options.seed, folder=store.evidence_subfolder("launch"),
                options={"share": options.share, "dump": dump, "cuda_gdb": attach},
            )  # fmt: skip
            settings = RunSettings(
                trials=options.trials,
                allow_dump=dump,
                unwedge=options.unwedge,
                timeout_s=options.timeout_s,
                window=frozenset({0}),
            )
            result = run_workload(
                request, new_ground, store, settings,
                diagnose=relative_diagnose(row, lambda: grounds[-1] if grounds else None), watch=_Watch(progress, row), clock=clock,
            )  # fmt: skip
        diagnosis = completed(result.diagnosis, window=Window(reached=result.diagnosis.window.reached))
        if diagnosis.verdict.class_ == "not-hung":
            rows = len(what.case.lengths)
            sentence = f"all {result.counts.clean} launches completed with the right answers in all {rows} rows"
            document = diagnosis.document()
            document["verdict"]["sentence"] = sentence
            diagnosis = Diagnosis.model_validate(document)
        if diagnosis.verdict.class_ == "wrong-result" and image.origin.startswith("vllm"):
            document = diagnosis.document()
            document["verdict"]["signature"] = PUBLISHED.get(diagnosis.verdict.cause or "")
            diagnosis = Diagnosis.model_validate(document)
        status = exit_status(diagnosis.outcome, expect)
        seconds = clock.monotonic() - began
        learnt = flat_environment(result.ready.environment if result.ready else {})
        finish_row(
            store, entry, record, diagnosis, result.counts, status=status, seconds=seconds, clock=clock, environment=learnt
        )  # fmt: skip
    return GpuTried(row, diagnosis, result.counts, store.path, status, f"{device.name} ({device.arch})", seconds)


def command_of_row(entry: Scenario, row: Row, options: GpuOptions, kernel: str | None) -> tuple[str, ...]:
    """The argument vector that runs this row again."""
    words = ["dsv4-repro", "run", entry.name, "--on", "gpu", "--fix", row.name, "--device", _devices(options)]
    words += ["--trials", str(options.trials), "--seed", str(options.seed)]
    return (*words, *(("--kernel", kernel) if kernel is not None else ()))


def _devices(options: GpuOptions) -> str:
    return str(options.ordinal) if options.second is None else f"{options.ordinal},{options.second}"


def rerun(tried: GpuTried) -> str:
    """The next command after a hang."""
    return tried.diagnosis.next or shlex.join(["dsv4-repro", "report", str(tried.folder)])


class _Watch:
    """The run loop's watcher: one progress line."""

    def __init__(self, progress: Callable[[str], None], row: Row) -> None:
        self._progress = progress
        self._row = row

    def step(self, trial: int, step: Any) -> None:
        self._progress(f"{self._row.name}: launch {trial}")

    def waiting(self, what: str) -> None:
        self._progress(f"{self._row.name} · {what}")
