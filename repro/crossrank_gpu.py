"""A row of two ranks on two GPUs: one child process over both, watched, read through a core dump or cuda-gdb, and diagnosed.

The child (``kernels.crossrank_child``) launches rank 0's kernel and an all-reduce of ours on both. Which ranks' devices are looked
at is the row's; what it expects is not. One process has both devices, so that a dump shows both ranks at one moment.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..clock import SYSTEM, Clock, Deadline, utc_stamp
from ..errors import DeadlineError, NoDeviceError, NoDriverError, RefusedError, ReproError, UnavailableError
from ..forensics.collect import Collected, run_collector
from ..forensics.collect.core_trigger import CoreDumpCollector, DumpSettings
from ..forensics.collect.cuda_gdb import CudaGdbCollector, find_cuda_gdb, probe_cuda_gdb
from ..forensics.collect.nvml import Nvml
from ..forensics.corefile import open_core
from ..forensics.diagnose import diagnose_state
from ..forensics.records import CLASSES, Diagnosis, Evidence, UnreadItem, Verdict, Window
from ..scenarios.launches import CrossRank, Launch, Row
from .child import package_path, raise_from
from .exits import exit_status
from .gpu_rows import GpuOptions, GpuTried
from .leftovers import mark_run
from .run_end import breaks_noted, finish_row
from .run_records import KernelRecord, RunRecord, TrialCounts
from .runstore import RunStore

if TYPE_CHECKING:
    from ..forensics.device_state import DeviceState
    from ..kernels.devices import DeviceDescription
    from ..scenarios.registry import Scenario
    from .exits import Expectation

__all__ = ["run_crossrank_row"]

_MODULE = "dsv4_repro.kernels.crossrank_child"
#: What has not finished after so long will not: the same launches take milliseconds.
_WATCH_S = 3.0
_OPEN_S, _GDB_S, _DUMP_S = 90.0, 60.0, 60.0


@dataclasses.dataclass(slots=True)
class _Seen:
    """One child's end."""

    hung: bool
    diagnosis: Diagnosis


def run_crossrank_row(
    entry: Scenario, row: Row, options: GpuOptions, *, command: tuple[str, ...], out: Path | None, expect: Expectation | None,
    tell: Callable[[list[str]], None], progress: Callable[[str], None], describe: Callable[[int], DeviceDescription],
    nvml: Callable[[], Nvml] = Nvml, clock: Clock = SYSTEM,
) -> GpuTried:  # fmt: skip
    """As ``relative_gpu_run.run_gpu_row``, on GPUs ``options.ordinal`` and ``options.second``.

    NoDeviceError where there is no second GPU, RefusedError where one holds somebody's process, PlanError where the two cannot
    read each other's memory.
    """
    from .machine import run_versions

    what = row.what
    assert isinstance(what, CrossRank)
    ordinals = (options.ordinal, options.second if options.second is not None else options.ordinal + 1)
    devices: list[DeviceDescription] = []
    for ordinal in ordinals:
        progress(f"asking the driver about GPU {ordinal}")
        try:
            devices.append(describe(ordinal))
        except NoDeviceError as error:
            raise NoDeviceError(
                f"{entry.name} needs two GPUs that read each other's memory, {ordinals[0]} and {ordinals[1]}: {error}",
                help_text=f"dsv4-repro run {entry.name} --on cpu; or --device A,B on a machine with two",
            ) from None
    named = f"{devices[0].name} and {devices[1].name}"
    tell([
        f"ground gpu: GPUs {ordinals[0]} and {ordinals[1]}, {named}",
        f"{entry.name}, row {row.name}: {row.text}",
        f"rank 0 launches {row.kernel + ', then the all-reduce' if what.held is not None else 'nothing'}; rank 1 the all-reduce; "
        f"read: {' and '.join(f'rank {rank}' for rank in what.devices)}; {options.trials} launches",
        f"expected: {row.class_}{' / ' + row.cause if row.cause else ''}",
    ])  # fmt: skip
    with RunStore.create(entry.name, out=out, clock=clock) as store:
        mark_run(store.path)
        began = clock.monotonic()
        record = RunRecord(
            scenario=entry.name, ground="gpu", command=command, started=utc_stamp(clock), seed=options.seed,
            versions=run_versions(),
            environment={"device": named, "sm": devices[0].sm, "devices": ", ".join(map(str, ordinals))},
            kernel=KernelRecord(origin=row.kernel, sm=devices[0].sm), launches={row.name: {"ranks_read": list(what.devices)}},
        )  # fmt: skip
        store.write_run(record)
        limit = Deadline(options.timeout_s, clock) if options.timeout_s is not None else None
        counts: dict[str, int] = {}
        first: _Seen | None = None
        with breaks_noted(store, record, clock):
            for trial in range(options.trials):
                if limit is not None and limit.expired:
                    break
                progress(f"{row.name}: launch {trial + 1}")
                folder = store.evidence_subfolder(f"launch-{trial + 1}")
                seen = _launch(row, what, ordinals, devices, options, folder, store, first is None or not first.hung, nvml, clock)
                kind = seen.diagnosis.outcome if seen.diagnosis.outcome != "inconclusive" or not seen.hung else "hang"
                counts[kind] = counts.get(kind, 0) + 1
                store.emit("launch", number=trial + 1, hung=seen.hung)
                if first is None or (seen.hung and not first.hung):
                    first = seen
            if first is None:
                raise DeadlineError(f"no launch was begun within {options.timeout_s or 0:g} s")
        diagnosis = first.diagnosis
        trials = TrialCounts(
            asked=options.trials, hang=counts.get("hang", 0), clean=counts.get("clean", 0), other=counts.get("other", 0)
        )
        status, seconds = exit_status(diagnosis.outcome, expect), clock.monotonic() - began
        finish_row(store, entry, record, diagnosis, trials, status=status, seconds=seconds, clock=clock)
    return GpuTried(row, diagnosis, trials, store.path, status, f"{named} ({devices[0].arch})", seconds)


def _setup(row: Row, what: CrossRank, ordinals: tuple[int, int], devices: list[DeviceDescription], folder: Path) -> Path:
    """The child's set-up as a file. Compiles both kernels; errors as of ``kernels.select.select``."""
    from ..kernels.build import compile_kernel
    from ..kernels.select import select

    reduce: dict[str, str] = {}
    for sm in {device.sm for device in devices}:
        path = folder / f"companions-{sm}.cubin"
        path.write_bytes(compile_kernel("companions.cu", sm).cubin)
        reduce[str(sm)] = str(path.absolute())
    held: dict[str, Any] | None = None
    if what.held is not None:
        assert isinstance(what.held, Launch)
        case = what.held.case
        image = select(row.kernel, sm=devices[0].sm, top_k=case.k, vec=case.vec).image
        cubin, logits = folder / "kernel.cubin", folder / "logits.bin"
        cubin.write_bytes(image.cubin)
        logits.write_bytes(case.logits().astype(np.float32).tobytes())
        held = {
            "cubin": str(cubin.absolute()), "function": image.function, "logits": str(logits.absolute()),
            "lengths": list(case.lengths), "top_k": case.k, "stride": case.stride, "max_seq_len": case.max_seq_len,
            "chunk_size": case.chunk_size, "ctas_per_group": case.ctas_per_group, "groups": case.groups,
            "dynamic_smem": case.dynamic_smem,
        }  # fmt: skip
    target = folder / "setup.json"
    target.write_text(json.dumps({"devices": list(ordinals), "all_reduce": reduce, "held": held, "watch_s": _WATCH_S}))
    return target


def _launch(
    row: Row, what: CrossRank, ordinals: tuple[int, int], devices: list[DeviceDescription], options: GpuOptions, folder: Path,
    store: RunStore, capture: bool, nvml: Callable[[], Nvml], clock: Clock,
) -> _Seen:  # fmt: skip
    """One child from its start to its end."""
    setup = _setup(row, what, ordinals, devices, folder)
    settings = DumpSettings.in_folder(folder / "dump") if options.dump else None
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [package_path(), os.environ.get("PYTHONPATH")])),
        "CUDA_MODULE_LOADING": "EAGER", **(settings.environment() if settings is not None else {}),
    }  # fmt: skip
    errors = folder / "child.err"
    with errors.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(setup.absolute()), str(os.getpid())], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=sink, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        opened = _word(process, _OPEN_S, errors)
        if not options.share:
            _refuse_busy([str(device["uuid"]) for device in opened["devices"]], process.pid, nvml, clock)
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        found = _word(process, _WATCH_S + 30.0, errors)
        pending = [rank for rank in (0, 1) if found["launched"][rank] and not found["finished"][rank]]
        if not pending:
            sentence = "both ranks arrived in the all-reduce and left it"
            return _Seen(False, _diagnosis("not-hung", "high", sentence, window=Window(reached=True)))
        if not capture:
            return _Seen(True, _diagnosis("unknown", "low", f"ranks {pending} did not finish; not looked at again"))
        return _Seen(True, _read(process.pid, what, ordinals, found, settings, options, folder, store))
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)


def _word(process: subprocess.Popen[bytes], seconds: float, errors: Path) -> dict[str, Any]:
    """The child's next line; its error raised as what it is."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    line = process.stdout.readline() if ready else b""
    try:
        answer: dict[str, Any] = json.loads(line)
    except ValueError:
        tail = errors.read_text(encoding="utf-8", errors="replace")[-400:]
        if not ready:
            raise DeadlineError(f"the GPU process said nothing within {seconds:g} s: {tail}") from None
        raise UnavailableError(f"the GPU process ended: {tail}") from None
    if "kind" in answer:
        raise_from(answer)
    return answer


def _refuse_busy(uuids: list[str], own: int, nvml: Callable[[], Nvml], clock: Clock) -> None:
    """RefusedError where a card holds somebody's compute process; what cannot be read refuses nothing."""
    for uuid in uuids:
        try:
            processes = nvml().by_uuid(uuid).sample(processes=True, clock=clock).processes or ()
        except (NoDriverError, NoDeviceError):
            continue
        others = [process.pid for process in processes if process.pid != own]
        if others:
            raise RefusedError(
                f"GPU {uuid} already holds compute processes ({', '.join(map(str, others[:5]))}). A hang here would stall them.",
                help_text="Choose free cards with --device A,B, or say --share.",
            )


def _read(
    pid: int, what: CrossRank, ordinals: tuple[int, int], found: Mapping[str, Any], settings: DumpSettings | None,
    options: GpuOptions, folder: Path, store: RunStore,
) -> Diagnosis:  # fmt: skip
    """The devices of the ranks that the row looks at, from a dump, else from cuda-gdb, and the verdict.

    Not both: a process that a debugger was attached to writes no dump afterwards.
    """
    evidence: list[Evidence] = []
    unread: list[UnreadItem] = []
    extra = {"ranks_read": list(what.devices), "ranks_not_read": [rank for rank in (0, 1) if rank not in what.devices]}
    wanted = {ordinals[rank] for rank in what.devices}

    def judged(state: DeviceState, **more: Any) -> Diagnosis:
        looked_at = dataclasses.replace(
            state, grids=tuple(grid for grid in state.grids if grid.device in wanted),
            devices={number: facts for number, facts in state.devices.items() if number in wanted},
        )  # fmt: skip
        found = diagnose_state(looked_at, ground="gpu", evidence=evidence, hung=True, extra=extra, **more)
        return found.model_copy(update={"unread": (*found.unread, *unread)})

    def keep(collected: Collected) -> None:
        unread.extend(UnreadItem(what=item.what, why=item.why, remedy=item.remedy) for item in collected.unread)
        for item in collected.files:
            kept = store.add_evidence(item.kind, item.path, "measured", collector=collected.collector)
            evidence.append(
                Evidence(id=kept.id, kind=kept.kind, path=kept.path, sha256=kept.sha256, origin=kept.origin, when=kept.when)
            )

    try:
        if settings is not None:
            dump = run_collector(CoreDumpCollector(pid, settings, folder, stderr=folder / "child.err", deadline_s=_DUMP_S))
            keep(dump)
            path = next((item.path for item in dump.files if item.kind == "gpu-core"), None)
            if path is not None:
                with open_core(path) as core:
                    return judged(core.state, memory=core.word, faults=core.faults)
        elif options.cuda_gdb:
            tool = probe_cuda_gdb(find_cuda_gdb(), folder)
            addresses = [*found["counters"], *found["words"]]
            seen = run_collector(CudaGdbCollector(pid, folder, tool, addresses=addresses, deadline_s=_GDB_S))
            keep(seen)
            if seen.state is not None:
                return judged(seen.state)
    except ReproError as error:
        unread.append(UnreadItem(what="the devices", why=str(error), remedy=error.help_text or ""))
    sentence = "a rank did not finish, and what its device does could not be read"
    return _diagnosis("unknown", "low", sentence, evidence=evidence, unread=unread, **extra)


def _diagnosis(class_: str, confidence: str, sentence: str, **more: Any) -> Diagnosis:
    verdict = Verdict.model_validate({"class": class_, "cause": None, "confidence": confidence, "sentence": sentence})
    return Diagnosis.model_validate({"outcome": CLASSES[class_][1], "ground": "gpu", "verdict": verdict, **more})
