"""The verb ``autopsy``: what is it that somebody has, who reads it, and what is said about it.

A GPU core dump (plain, .gz, .xz), a run directory, any mixture of transcripts, logs, stacks and archives; a live process only with
``--attach``. Files are judged where they lie, without GPU, driver or toolkit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..clock import SYSTEM, Clock
from ..errors import EvidenceError, RefusedError, ReproError, RunStoreError, SeveralServersError, UsageError
from ..forensics.device_state import Unread
from ..forensics.records import ChainLink, Diagnosis
from ..reports.document import ReportSource
from ..scenarios.registry import scenario_for_signature
from .console import Screen
from .drain_flags import parse_expectation
from .exits import exit_status
from .narrate import autopsy_lines
from .report_files import fixes_of, reports_of, write_reports
from .run_end import write_end
from .runread import RunView, is_run_directory, open_run
from .runstore import RunStore
from .server_names import asked_by
from .step_summary_file import append_step_summary
from .unpack import head_of, peek, plain_file
from .verdicts import completed, unfinished_diagnosis

if TYPE_CHECKING:
    from .options import Common

__all__ = ["autopsy_file", "autopsy_run", "moving_now", "run_autopsy"]

_ELF = b"\x7fELF"
#: What an attach with everything around it took at most, seconds.
_ATTACH_S = 30.0
_ATTACH_HELP = (
    "Attaching freezes the process for about a second (10 s and more if cuda-gdb loads host symbols), needs ptrace, and a failed "
    "attach can end it. If that is acceptable: dsv4-repro autopsy {pid} --attach"
)


def autopsy_file(path: Path) -> Diagnosis:
    """The diagnosis of one file, by what is in it: a core dump, else a debugger's transcript. EvidenceError, CoreFileError,
    TranscriptError.
    """
    from ..forensics.diagnose import diagnose_dump, diagnose_transcript

    with plain_file(path) as plain:
        reader: Callable[[Path], Diagnosis] = diagnose_dump if head_of(plain).startswith(_ELF) else diagnose_transcript
        try:
            diagnosis = reader(plain)
        except EvidenceError as error:
            if plain == path:
                raise
            # What was unpacked is gone in a moment, and nobody knows it by that name.
            why = str(error).replace(f"{plain}: ", "").replace(str(plain), str(path))
            raise type(error)(why, path=str(path), place="unpacked", help_text=error.help_text) from error
    return diagnosis if plain == path else _under_its_own_name(diagnosis, path)


def _under_its_own_name(diagnosis: Diagnosis, path: Path) -> Diagnosis:
    """Evidence that was unpacked is named, and hashed, as the file that was given."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    evidence = [{**item.model_dump(mode="json"), "path": str(path), "sha256": digest} for item in diagnosis.evidence]
    return completed(diagnosis, evidence=evidence)


def autopsy_run(path: Path) -> Diagnosis:
    """Judge a run directory again, from its artefacts: the core dump, else the transcript; its own diagnosis if there is neither.

    The window, the plan's facts and the experiment come from the run's records. RunStoreError if there is nothing to judge.
    """
    view = open_run(path)
    problems: list[Unread] = list(view.missing)
    for kind in ("gpu-core", "cuda-gdb"):
        for entry in view.evidence:
            if entry.kind != kind:
                continue
            try:
                judged = autopsy_file(view.artefact(entry))
            except EvidenceError as error:
                problems.append(Unread(f"{entry.id} ({entry.kind})", str(error)))
                continue
            return _with_run(judged, view, problems)
    if view.diagnosis is not None:
        problems.append(Unread("device state", "the run holds no core dump and no transcript; its own diagnosis is repeated"))
        return completed(view.diagnosis, unread=problems)
    raise RunStoreError(
        "nothing to judge: neither a core dump, nor a transcript, nor a diagnosis", path=str(path), help_text="dsv4-repro doctor"
    )


def _with_run(judged: Diagnosis, view: RunView, problems: Sequence[Unread]) -> Diagnosis:
    """A diagnosis from an artefact with what only the run knew: evidence under its own ids, window, upper links, experiment."""
    if view.diagnosis is None:
        return completed(judged, unread=problems)
    own = view.diagnosis
    known = {link.link: link for link in own.chain}
    listed = {item.id for item in own.evidence} | {item.id for item in judged.evidence}
    chain = [_stronger(link, known.get(link.link), listed) for link in judged.chain]
    extra: dict[str, Any] = {key: value for key, value in (own.model_extra or {}).items() if key in ("unwedge", "trials", "timing")}
    agrees = (own.verdict.class_, own.verdict.cause) == (judged.verdict.class_, judged.verdict.cause)
    return completed(
        judged,
        window=own.window,
        unread=problems,
        chain=[link.model_dump(mode="json") for link in chain],
        evidence=[item.model_dump(mode="json") for item in (*judged.evidence, *own.evidence)],
        agrees_with_run=agrees,
        ground=own.ground,
        **extra,
    )


_STRENGTH = ("not observed", "inferred", "computed", "interpreted", "measured")


def _stronger(judged: ChainLink, own: ChainLink | None, listed: Set[str]) -> ChainLink:
    """The better known of two statements about a link; the artefact's own where they are equally well known."""
    if own is None or not set(own.evidence) <= listed or _STRENGTH.index(own.status) <= _STRENGTH.index(judged.status):
        return judged
    return own


def moving_now(base_url: str, *, clock: Clock = SYSTEM, seconds: float = 1.0) -> str:
    """What a server does meanwhile, by two readings of its own counters; "" where nothing moved, or that could not be read."""
    from ..forensics.collect.engine_metrics import scrape

    first = scrape(base_url, timeout_s=0.7, clock=clock, health=False).values
    clock.sleep(seconds if first else 0.0)
    second = scrape(base_url, timeout_s=0.7, clock=clock, health=False).values if first else {}
    names = ("generation_tokens", "iterations", "prompt_tokens")
    return "; ".join(
        f"{name} {first[name]:g} -> {second[name]:g}"
        for name in names
        if name in first and name in second and first[name] != second[name]
    )


def _look_before(pid: int, freeze: bool, clock: Clock) -> None:
    """RefusedError where the process is not one that computes, or its server moves: a debugger that was attached to a worker that
    had recovered ended it (measured on an H200)."""
    from .serving.ranks import find_server

    try:
        with asked_by("autopsy --attach"):
            target = find_server(pid, clock=clock)
    except SeveralServersError:
        raise  # it is above the servers, and holds no kernel itself
    except ReproError:
        return
    workers = [rank.pid for rank in target.ranks]
    seen = not any(item.what == "the server" for item in target.unread)
    if seen and workers and pid not in workers:
        raise RefusedError(
            f"process {pid} was not touched: it is no worker of its server, so it holds no kernel",
            help_text=f"dsv4-repro autopsy {workers[0]} --attach{' --freeze' if freeze else ''}",
        )
    if target.base_url is not None and (moves := moving_now(target.base_url, clock=clock)):
        raise RefusedError(
            f"process {pid} was not touched: its server moves ({moves})",
            help_text="Attached, a debugger ended a worker that had recovered. If only another engine of the server moves, and "
            f"this one hangs: dsv4-repro autopsy {pid} --attach --yes\n  Look again: dsv4-repro why {pid}",
        )


def _frozen_attach(pid: int, store: RunStore, screen: Screen, clock: Clock) -> Diagnosis:
    """``_attach`` while the engine process above the worker is stopped; what that means is said first."""
    from .serving.freeze import freeze_warning, frozen
    from .serving.why_look import deadline_of, engine_above

    engine, target = engine_above(pid, clock=clock)
    began = clock.monotonic()
    deadline = deadline_of(target, clock=clock)
    screen.say(*freeze_warning(deadline, _ATTACH_S), style="note")
    store.emit("capture", what="freeze", engine=engine, deadline=deadline.text, remaining_s=deadline.remaining_s)
    with frozen(engine, clock=clock) as held:
        diagnosis = _attach(pid, store, clock)
    how = f"engine {engine} was stopped for {held.seconds:.1f} s" + ("" if held.thawed else " and did not go on: kill -CONT")
    store.emit("capture", what="thaw", engine=engine, seconds=held.seconds, thawed=held.thawed)
    screen.say(how, style="" if held.thawed else "bad")
    if deadline.remaining_s is not None:
        left = deadline.remaining_s - (clock.monotonic() - began)
        if left > 0:
            screen.say(f"about {left:.0f} s of its deadline are left")
        else:
            screen.say("its deadline passed meanwhile: it ends now, unless the wait is gone", style="note")
    return completed(diagnosis, freeze={"engine": engine, "seconds": round(held.seconds, 3), "thawed": held.thawed})


def _attach(pid: int, store: RunStore, clock: Clock) -> Diagnosis:
    """Attach cuda-gdb to a process, read, detach; the transcript stays in the run directory."""
    from ..forensics.collect import run_collector
    from ..forensics.collect.cuda_gdb import CudaGdbCollector, find_cuda_gdb, probe_cuda_gdb
    from ..forensics.diagnose import diagnose_state
    from ..forensics.records import Evidence

    folder = store.evidence_subfolder("attach")
    tool = probe_cuda_gdb(find_cuda_gdb(), folder, clock=clock)
    collected = run_collector(CudaGdbCollector(pid, folder, tool, clock=clock), clock)
    for item in collected.files:
        store.add_evidence(item.kind, item.path, item.origin, collector=collected.collector)
    store.add_rest(folder)
    evidence = [
        Evidence(id=entry.id, kind=entry.kind, path=entry.path, sha256=entry.sha256, when=entry.when) for entry in store.evidence
    ]
    if collected.state is None:
        why = "; ".join(item.why for item in collected.unread) or "cuda-gdb returned no state"
        diagnosis = unfinished_diagnosis("gpu", f"the state of process {pid} could not be read: {why}")
    else:
        diagnosis = diagnose_state(collected.state, ground="process", evidence=evidence)
    return completed(
        diagnosis, unread=collected.unread, evidence=[item.model_dump(mode="json") for item in evidence], ground="process"
    )


def _is_pid(target: str) -> bool:
    return target.isascii() and target.isdigit() and not Path(target).exists()


def _judge(targets: Sequence[str], screen: Screen) -> Diagnosis:
    if not all(targets):  # an unset variable of a script: the folder one happens to be in is not what was meant
        raise UsageError("an empty name: give a file, a run directory or a process id")
    paths = [Path(target) for target in targets]
    for path in paths:
        if not path.exists() and not path.is_symlink():
            raise UsageError(f"{str(path)[:200]}: there is no such file, run directory or process id")
    if len(paths) == 1 and is_run_directory(paths[0]):
        screen.progress(f"judging the evidence in {paths[0]}")
        return autopsy_run(paths[0])
    from .bundling import is_bundle, opened_bundle

    # A file of stated size 0 may be one that the kernel makes while it is read: not a byte of it is taken before it is read.
    sized = len(paths) == 1 and paths[0].is_file() and paths[0].stat().st_size > 0
    if sized and is_bundle(paths[0]):
        screen.progress(f"judging the bundle {paths[0]}")
        with opened_bundle(paths[0]) as (folder, problems):
            judged = autopsy_run(folder)
            return completed(judged, unread=[Unread(str(paths[0]), problem) for problem in problems]) if problems else judged
    screen.progress(f"reading {', '.join(map(str, paths[:3]))}" + (" …" if len(paths) > 3 else ""))
    if sized and peek(paths[0], len(_ELF)) == _ELF:
        return autopsy_file(paths[0])
    from ..forensics.autopsy import autopsy_paths

    return autopsy_paths(paths).diagnosis


def run_autopsy(
    targets: Sequence[str], common: Common, *, attach: bool, expect: str | None, freeze: bool = False, clock: Clock = SYSTEM
) -> int:
    """The verb. Exit status: 3 a hang, 0 not hung, 4 another failure, 5 inconclusive. ``--out DIR`` keeps diagnosis and report.

    ``freeze``: stop the engine process above the PID while it is read.
    """
    screen = Screen(as_json=common.as_json)
    expectation = parse_expectation(expect)
    pids = [target for target in targets if _is_pid(target)]
    if pids and len(targets) > 1:
        raise UsageError("a process is looked at alone: give one PID and nothing else")
    if freeze and not pids:
        raise UsageError("--freeze needs a PID", help_text="dsv4-repro autopsy PID --attach --freeze")
    if pids and not Path("/proc", pids[0]).exists() and Path("/proc/self").exists():
        raise UsageError(f"{pids[0]}: there is no such file, run directory or process id", help_text="See which are here: ps -ef")
    if pids and not attach and not common.yes:
        raise RefusedError(f"process {pids[0]} was not touched", help_text=_ATTACH_HELP.format(pid=pids[0]))
    if attach and not pids:
        raise UsageError("--attach needs a PID", help_text="dsv4-repro autopsy PID --attach")
    if pids and not (attach and common.yes):
        _look_before(int(pids[0]), freeze, clock)
    store: RunStore | None = None
    if pids or common.out is not None:
        store = RunStore.create("autopsy", out=common.out, clock=clock)
    try:
        if pids:
            assert store is not None
            screen.progress(f"attaching to {pids[0]}")
            pid = int(pids[0])
            diagnosis = _frozen_attach(pid, store, screen, clock) if freeze else _attach(pid, store, clock)
        else:
            diagnosis = _judge(targets, screen)
        if store is not None:
            _keep(store, diagnosis, targets)
    finally:
        if store is not None:
            store.close()
    screen.end_progress()
    style = {"hang": "bad", "other": "bad", "clean": "good"}.get(diagnosis.outcome, "note")
    lines = autopsy_lines(diagnosis)
    screen.say(*lines[:1], style=style)
    screen.say(*lines[1:])
    if store is not None:
        screen.say(f"kept in {store.path}")
    status = exit_status(diagnosis.outcome, expectation)
    screen.document({**diagnosis.document(), "exit_status": status})
    return status


def _keep(store: RunStore, diagnosis: Diagnosis, targets: Sequence[str]) -> None:
    from .run_records import RunRecord

    entry = scenario_for_signature(diagnosis.verdict.signature)
    record = RunRecord(
        scenario="autopsy",
        ground=diagnosis.ground,
        state="finished",
        command=("dsv4-repro", "autopsy", *targets),
        outcome=diagnosis.outcome,
        exit_status=exit_status(diagnosis.outcome),
        versions={"dsv4-repro": __version__},
    )
    write_end(store, record, diagnosis, unwritten_status=RunStoreError.exit_status)
    source = ReportSource(
        diagnosis=diagnosis,
        run=record.document(),
        title="Autopsy of " + ", ".join(targets),
        fixes=fixes_of(entry) if diagnosis.outcome == "hang" else (),
        targets=tuple(targets),
        version=__version__,
    )
    write_reports(reports_of(source), store.path)
    append_step_summary(source)
