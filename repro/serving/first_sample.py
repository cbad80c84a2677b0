"""The first sample of a server that hangs: everything that can be had without disturbing it, at once, on the disk in two seconds.

Rings of the flight recorder, metrics, the end of the log, ``/proc`` of every process, NVML of every GPU, and what the observer
knew. The sources are read side by side; one that does not answer in time is said to be silent and does not hold up the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...clock import SYSTEM, Clock, Deadline
from ...errors import EvidenceError, NoDeviceError, NoDriverError
from ...forensics.collect.engine_metrics import parse_metrics, read_page
from ...forensics.collect.nvml import GpuSample, Nvml
from ...forensics.collect.proc import read_process
from ...forensics.device_state import Unread
from ...forensics.evidence.opening import at_once
from ..ground import CaptureOutcome
from ..recorder import HEADER_SIZE, MAX_SLOTS, SLOT_SIZE, read_ring
from .capture_log import CaptureLog, PlannedFile, rank_folder, rank_tag, together
from .rank_numbers import agent_names
from .records import ServerTarget, Snapshot

__all__ = ["FIRST_SAMPLE_S", "first_sample", "ring_state"]

#: All of it is on the disk after so long, seconds; sources are waited for a little less.
FIRST_SAMPLE_S = 2.0
_LOG_TAIL = 4 << 20
_MOST_PROCESSES = 256


@dataclass
class _Found:
    """What a source gave, before it is written."""

    collector: str
    files: list[PlannedFile] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    unread: list[Unread] = field(default_factory=list)
    seconds: float = 0.0


def first_sample(
    target: ServerTarget,
    log: CaptureLog,
    *,
    snapshot: Snapshot | None,
    seconds: float = FIRST_SAMPLE_S,
    clock: Clock = SYSTEM,
    root: Path = Path("/proc"),
    nvml: Callable[[], Nvml] = Nvml,
) -> dict[str, Mapping[str, Any]]:
    """Read, write and tell; returns each source's facts by its name (``metrics`` and ``recorder_rings`` are where the server
    stood, to be compared with later)."""
    began = clock.monotonic()
    limit = max(seconds - 0.3, 0.1)
    until = Deadline(limit, clock)
    sources: list[tuple[str, Callable[[_Found], None]]] = [
        ("recorder_rings", lambda found: _rings(target, found, root)),
        ("metrics", lambda found: _metrics(target, found, limit)),
        ("engine_log", lambda found: _log_tail(target, found)),
        ("proc", lambda found: _processes(target, found, root, until)),
        ("nvml", lambda found: _gpus(target, found, nvml, clock)),
    ]

    def job(name: str, read: Callable[[_Found], None]) -> Callable[[], _Found]:
        def run() -> _Found:
            found, start = _Found(name), clock.monotonic()
            try:
                read(found)
            except Exception as error:  # a bug in one source must not cost the others their evidence
                found.unread.append(Unread(name, f"{type(error).__name__}: {error}"[:300]))
            found.seconds = clock.monotonic() - start
            return found

        return run

    if snapshot is not None:
        log.write([PlannedFile("observer.json", "observer", _json(_plain(snapshot)))])
    answers = together([job(name, read) for name, read in sources], seconds=limit)
    facts: dict[str, Mapping[str, Any]] = {}
    outcomes: list[CaptureOutcome] = []
    for (name, _), answer in zip(sources, answers, strict=True):
        found = answer or _Found(name, unread=[Unread(name, f"no answer within {limit:g} s; it is left alone")], seconds=limit)
        artefacts, lost = log.write(found.files)
        facts[name] = found.facts
        unread = (*found.unread, *lost)
        outcomes.append(CaptureOutcome(name, "none", found.seconds, artefacts, None, found.facts, unread))
    # The files are durable now; the timeline is told after that, so that a line never names a file that is not there.
    log.tell("first sample", seconds=round(clock.monotonic() - began, 4), files=sum(len(outcome.artefacts) for outcome in outcomes))
    for outcome in outcomes:
        log.add(outcome)
    return facts


def _plain(value: Any) -> Any:
    """Records as documents; ``dataclasses.asdict`` would copy mappings that do not let themselves be copied."""
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _json(document: Any) -> bytes:
    return json.dumps(document, indent=1, default=str).encode("utf-8", "replace")


# ---------------------------------------------------------------------------------------------------------------------------------
# Sources


def _rings(target: ServerTarget, found: _Found, root: Path) -> None:
    folder = target.agent_folder
    if folder is None:
        remedy = "Start the server with DSV4_REPRO_AGENT=1 (docs/agent.md)"
        found.unread.append(Unread("flight recorder", "this server has no agent", remedy))
        return
    names = agent_names(folder, target.ranks, root)
    states: dict[str, Any] = {}
    for rank in target.ranks:
        name = names.get(rank.pid)
        if name is None:
            found.unread.append(
                Unread(f"flight recorder of {rank_tag(rank)}", f"no ring of it in {folder}", "dsv4-repro doctor --pid PID")
            )
            continue
        place = rank_folder(rank, target.ranks)
        try:
            raw = _bytes(folder / f"ring-{name}.bin", HEADER_SIZE + MAX_SLOTS * SLOT_SIZE)
            found.files.append(PlannedFile(f"{place}/ring-{name}.bin", "recorder-ring", raw))
            states[str(rank.pid)] = ring_state(folder / f"ring-{name}.bin")
        except (EvidenceError, OSError) as error:
            why = str(error) if isinstance(error, EvidenceError) else error.strerror or str(error)
            found.unread.append(Unread(f"flight recorder of {rank_tag(rank)}", why, "dsv4-repro agent show"))
        with contextlib.suppress(OSError):  # the ring is the evidence; the status is written when there is something to say
            raw = _bytes(folder / f"status-{name}.json", 1 << 20)
            found.files.append(PlannedFile(f"{place}/agent-{name}.json", "agent-status", raw))
    found.facts["rings"] = states


def ring_state(path: Path) -> dict[str, Any]:
    """Where a recorder stands: steps begun, steps not seen to end, releases, and the step that the GPU is at."""
    contents = read_ring(path)
    unfinished = contents.unfinished
    current = unfinished[0] if unfinished else None
    return {
        "begun": contents.header.begun,
        "releases": contents.header.releases,
        "rank": contents.header.rank,
        "device": contents.header.device,
        "unfinished": [step.number for step in unfinished],
        "torn": contents.torn,
        "step": dataclasses.asdict(current) if current is not None else None,
        "before": dataclasses.asdict(previous) if (previous := _before(contents.steps, current)) is not None else None,
    }


def _before(steps: Sequence[Any], current: Any) -> Any:
    if current is None:
        return steps[-1] if steps else None
    return next((step for step in reversed(steps) if step.number < current.number), None)


def _metrics(target: ServerTarget, found: _Found, limit: float) -> None:
    if target.base_url is None:
        found.unread.append(Unread("/metrics", "the server's URL is not known", "Name it: --url http://HOST:PORT"))
        return
    page = read_page(target.base_url, "/metrics", timeout_s=limit - 0.1)
    if isinstance(page, Unread):
        found.unread.append(page)
        return
    status, body = page
    found.files.append(PlannedFile("metrics-1.prom", "metrics", body))
    values, _, bad, why = parse_metrics(body) if status == 200 else ({}, {}, 0, Unread("/metrics", f"HTTP status {status}"))
    found.facts.update(values=dict(values), bad_lines=bad)
    if why is not None:
        found.unread.append(why)


def _bytes(path: Path, most: int, *, tail: bool = False) -> bytes:
    with open(path, "rb", opener=at_once) as stream:
        if tail:
            stream.seek(max(stream.seek(0, os.SEEK_END) - most, 0))
        return stream.read(most)


def _log_tail(target: ServerTarget, found: _Found) -> None:
    if target.log_path is None:
        known = [item for item in target.unread if item.what.startswith("log of")]
        found.unread += known or [Unread("the server's log", "where it goes is not known", "Name it: --log FILE")]
        return
    raw = _bytes(target.log_path, _LOG_TAIL, tail=True)
    found.files.append(PlannedFile("engine_log.txt", "engine-log", raw, "reported"))
    found.facts.update(bytes=len(raw), source=str(target.log_path))


def _processes(target: ServerTarget, found: _Found, root: Path, until: Deadline) -> None:
    roles = {**{rank.pid: "worker" for rank in target.ranks}, **target.tree}
    pids = sorted(roles, key=lambda pid: (roles[pid] == "other", roles[pid] != "worker", pid))
    tags = {rank.pid: (f"{rank_folder(rank, target.ranks)}/", rank_tag(rank)) for rank in target.ranks}
    states: dict[str, Any] = {}
    text: list[str] = []
    if not pids:
        found.unread.append(Unread("/proc of the server", "its processes are not known", "Name the pid of the server."))
    for pid in pids[:_MOST_PROCESSES]:
        if until.expired:
            found.unread.append(Unread(f"/proc/{pid} and later", "the time of the first sample was over"))
            break
        try:
            document, unread = read_process(pid, root)
        except OSError as error:
            why = "it has ended" if isinstance(error, FileNotFoundError | ProcessLookupError) else error.strerror or str(error)
            found.unread.append(Unread(f"/proc/{pid} ({roles[pid]})", why))
            states[str(pid)] = {"role": roles[pid], "state": None}
            continue
        place, tag = tags.get(pid, ("", f"{roles[pid]}-pid-{pid}"))
        found.files.append(PlannedFile(f"{place}proc-{tag}.json", "proc", _json({"role": roles[pid], **document})))
        found.unread += [item for item in unread if item not in found.unread]
        threads = document["threads"]
        main = next((thread for thread in threads if thread["tid"] == pid), threads[0] if threads else {})
        states[str(pid)] = {
            "role": roles[pid], "state": main.get("state"), "wchan": main.get("wchan"), "threads": len(threads),
            "running": sum(thread["state"] == "R" for thread in threads),
            "blocked": sum(thread["state"] == "D" for thread in threads),
        }  # fmt: skip
        text += _as_text(pid, document, main)
    found.files.append(PlannedFile("processes.txt", "proc-text", "\n".join(text).encode("utf-8", "replace")))
    found.facts["processes"] = states


def _as_text(pid: int, document: Mapping[str, Any], main: Mapping[str, Any]) -> list[str]:
    """The same in the form in which people paste it, which the readers of evidence know."""
    lines = [f"=== /proc/{pid}/status ===", *str(document.get("status") or "").splitlines()[:12]]
    if main.get("wchan"):
        lines.append(f"wchan: {main['wchan']}")
    if main.get("stack"):
        lines += [f"=== /proc/{pid}/stack ===", *str(main["stack"]).splitlines()[:64]]
    return [*lines, ""]


def _gpus(target: ServerTarget, found: _Found, nvml: Callable[[], Nvml], clock: Clock) -> None:
    try:
        library = nvml()
        indices = sorted({rank.gpu_index for rank in target.ranks if rank.gpu_index is not None}) or list(
            range(min(library.count(), 64))
        )
    except (NoDriverError, NoDeviceError) as error:
        found.unread.append(Unread("NVML", str(error), "nvidia-smi -L"))
        return
    samples: dict[int, GpuSample] = {}
    names: dict[str, Any] = {}
    for index in indices:
        try:
            card = library.by_index(index)
            samples[index] = card.sample(processes=True, clock=clock)
            identity = card.identity()
            names[str(index)] = {"name": identity.name, "sm": identity.sm, "uuid": identity.uuid}
        except NoDeviceError as error:
            found.unread.append(Unread(f"GPU {index}", str(error), "nvidia-smi -L"))
    found.unread += [item for sample in samples.values() for item in sample.unread if item not in found.unread]
    found.facts["gpus"] = {str(index): sample.line() for index, sample in samples.items()}
    found.facts["utilisation"] = {str(index): sample.utilisation for index, sample in samples.items()}
    found.facts["names"] = names
    document = {str(index): dataclasses.asdict(sample) for index, sample in samples.items()}
    found.files.append(PlannedFile("gpus.json", "gpu-sample", _json(document)))
    moment = dt.datetime.fromtimestamp(clock.wall(), dt.UTC)
    stamp = f"{moment:%Y/%m/%d %H:%M:%S}.{moment.microsecond // 1000:03d}"
    rows = ["timestamp, index, utilization.gpu [%], utilization.memory [%], power.draw [W], clocks.sm [MHz]"]
    for index, sample in samples.items():
        cells = (
            (sample.utilisation, "%"), (sample.memory_utilisation, "%"), (sample.power_w, "W"), (sample.sm_clock_mhz, "MHz"),
        )  # fmt: skip
        rows.append(", ".join([stamp, str(index), *("[N/A]" if value is None else f"{value:g} {unit}" for value, unit in cells)]))
    found.files.append(PlannedFile("gpus.csv", "gpu-readings", ("\n".join(rows) + "\n").encode()))
