"""``run NAME`` for the relatives: one row of a scenario (its defect, or a fix), or all rows side by side, with a run directory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..clock import SYSTEM, Clock, Deadline, utc_stamp
from ..errors import NoDriverError, ReproError, UsageError
from ..forensics.records import Evidence
from ..reports.document import verdict_words
from ..scenarios.launches import CooperativeLaunch, CrossRank, DrainBatches, HostLaunch, IndexWorkspace, Launch, Row, SamplerLaunch
from ..scenarios.registry import Scenario, scenario
from .console import Screen
from .cooperative_cpu import code_for
from .drain_flags import DEFAULT_ARCH, parse_arch, parse_expectation
from .exits import Expectation, exit_status
from .leftovers import mark_run
from .narrate import proof_lines
from .relative_cpu import judge_row
from .relative_matrix import MATRIX_STATUS, matrix_document, run_gpu_rows, run_rows, tell_matrix
from .row_tries import Tried
from .run_end import breaks_noted, finish_row
from .run_records import KernelRecord, RunRecord, TrialCounts
from .runstore import RunStore, require_room

if TYPE_CHECKING:
    from .options import Common, RelativeFlags

__all__ = ["EXPLORE_SCHEMA", "choose_row", "run_relative"]

EXPLORE_SCHEMA = "dsv4-repro/explore/1"


def choose_row(entry: Scenario, fix: str | None, kernel: str | None, ground: str = "cpu") -> Row:
    """The row to run: the first defect of the ground, or the named one; ``kernel`` replaces its code. UsageError lists the rows."""
    rows = [row for row in entry.variants() if ground in row.grounds]
    if not rows:
        what = f": {len(entry.not_reproduced)} defects are told, none is reproduced here" if entry.not_reproduced else ""
        raise UsageError(
            f"{entry.name} has nothing to run on the {ground} ground{what}",
            help_text=f"Each, and what it would take: dsv4-repro show {entry.name}",
        )
    if fix is None:
        found = next((row for row in rows if not row.fixed), rows[0])
    else:
        named = [row for row in rows if row.name == fix]
        elsewhere = next((row for row in entry.variants() if row.name == fix), None)
        if not named and elsewhere is not None:
            where = " and ".join(elsewhere.grounds)
            raise UsageError(
                f"row {fix} of {entry.name} runs on the {where} ground only", help_text=f"dsv4-repro show {entry.name}"
            )
        if not named:
            raise UsageError(f"{entry.name} has no row {fix[:80]!r}; there are: {', '.join(row.name for row in rows)}")
        found = named[0]
    if kernel is None:
        return found
    if not isinstance(found.what, Launch | CrossRank | CooperativeLaunch | IndexWorkspace | SamplerLaunch) or (
        isinstance(found.what, CrossRank) and found.what.held is None
    ):
        raise UsageError(f"row {found.name} launches no kernel: --kernel does not apply")
    return replace(found, kernel=kernel)


def _what_lines(row: Row, sm: int) -> list[str]:
    what = row.what
    if isinstance(what, HostLaunch):
        return [f"computed: {what.rows} rows of {what.stride}, k {what.top_k}, on {what.device}, launcher of vLLM {what.release}"]
    if isinstance(what, DrainBatches):
        return [f"computed: the drain plan with {dict(what.plan)}, producer {what.producer}, sm_{what.sm}"]
    if isinstance(what, CooperativeLaunch):
        shown = ", ".join(map(str, what.lengths[:8]))
        return [f"cooperative_topk of {row.kernel}, sm_{code_for(sm)} code interpreted, one cluster a row; lengths {shown}"]
    if isinstance(what, IndexWorkspace):
        held = "no workspace is given" if what.old is None else f"the workspace holds {what.old:#x} before"
        return [f"combine_topk_swa_indices of {row.kernel}, its own statements over NumPy, nothing of a GPU; {held}"]
    if isinstance(what, SamplerLaunch):
        order = f"up to {what.schedules} random orders of execution"
        return [
            f"top-k mask of {row.kernel}, its source compiled here for sm_{sm} and interpreted; {order}",
            f"one row of {what.vocabulary} logits, k {what.top_k}, shared as a card of 99 KiB shares it",
        ]
    if isinstance(what, CrossRank):
        rank_0 = f"{row.kernel}, then the all-reduce" if what.held is not None else "nothing"
        read = " and ".join(f"rank {rank}" for rank in what.devices)
        return [
            f"two interpreted sm_{sm} devices over one memory; rank 0 launches {rank_0}; rank 1 the all-reduce; read: {read}",
        ]
    case = what.case
    slots = f"{what.resident} CTA slots" if what.resident else "room for all CTAs"
    order = "one order of execution" if what.schedule == "smallest-pc" else f"up to {what.schedules} random orders of execution"
    order += ", weak memory order" if what.weak else ""
    shown = ", ".join(map(str, case.lengths[:8])) + (", …" if len(case.lengths) > 8 else "")
    return [
        f"kernel {row.kernel} for sm_{sm}, interpreted: {case.groups} groups of {case.ctas_per_group} CTAs, {slots}, {order}",
        f"lengths {shown}; stride {case.stride}, max_seq_len {case.max_seq_len}, counters start at {what.counter}",
    ]


def _first_lines(entry: Scenario, row: Row, sm: int) -> list[str]:
    return [
        "ground cpu: nothing is measured on a GPU",
        f"{entry.name}, row {row.name}: {row.text}",
        *_what_lines(row, sm),
        f"expected: {row.class_}{' / ' + row.cause if row.cause else ''}",
    ]


def _record(entry: Scenario, row: Row, sm: int, seed: int, command: tuple[str, ...], started: str) -> RunRecord:
    from .machine import run_versions

    launches: dict[str, Any] = {row.name: {"lines": _what_lines(row, sm)}}
    if isinstance(row.what, Launch):
        launches[row.name]["grid"] = row.what.case.grid
    kernel = _kernel_record(row, row.what, sm) if isinstance(row.what, Launch) else None
    return RunRecord(
        scenario=entry.name,
        ground="cpu",
        command=command,
        started=started,
        seed=seed,
        versions=run_versions(),
        environment={"device": f"sm_{sm}, interpreted", "sm": sm},
        kernel=kernel,
        launches=launches,
    )


def _kernel_record(row: Row, what: Launch, sm: int) -> KernelRecord:
    """Whose code: function and hash too, where it is to be had here (where not, the run itself says why)."""
    from ..kernels.select import select_kernel

    try:
        image = select_kernel(row.kernel, sm=sm, top_k=what.case.k, vec=what.case.vec)
    except ReproError:
        return KernelRecord(origin=row.kernel, sm=sm)
    return KernelRecord(
        origin=image.origin, function=image.function, sha256=image.cubin_sha256, sm=image.sm, guarded=image.guarded,
        label=image.label,
    )  # fmt: skip


@dataclass(slots=True)
class _Keeper:
    """Writes artefacts of the first failure into the run's evidence."""

    store: RunStore
    kept: list[Evidence] = field(default_factory=list)

    def __call__(self, kind: str, name: str, content: bytes | str) -> Evidence:
        from ..forensics.collect import write_artefact

        folder = self.store.evidence_folder
        stem, dot, tail = name.partition(".")
        number, path = 1, folder / name
        while path.exists():
            number += 1
            path = folder / f"{stem}-{number}{dot}{tail}"
        entry = self.store.add_evidence(kind, write_artefact(path, content), "interpreted", collector="interpreter")
        item = Evidence(
            id=entry.id, kind=entry.kind, path=entry.path, sha256=entry.sha256, origin=entry.origin, when=entry.when
        )  # fmt: skip
        self.kept.append(item)
        return item


def _all_rows(entry: Scenario, common: Common, flags: RelativeFlags, sm: int, screen: Screen) -> int:
    screen.tell([f"ground cpu: nothing is measured on a GPU; all rows of {entry.name}, sm_{sm}"])
    tried, skipped = run_rows(
        entry, entry.variants(), sm=sm, seed=common.seed or 0, count_all=flags.count, timeout_s=common.timeout, screen=screen
    )  # fmt: skip
    screen.end_progress()
    document = matrix_document(entry, tried, skipped)
    tell_matrix(entry, document, screen)
    return MATRIX_STATUS[document["outcome"]]


def run_relative(name: str, common: Common, flags: RelativeFlags) -> int:
    """The verb. Exit status as of ``run``; with ``--all`` 0 if every row came to what it names, 1 if not, 5 if none could run."""
    screen = Screen(as_json=common.as_json)
    entry = scenario(name)
    expect = parse_expectation(flags.expect)
    sm = parse_arch(flags.arch) if flags.arch is not None else DEFAULT_ARCH
    if not flags.all_rows:
        require_room(common.out)
    if flags.on not in (None, "cpu", "gpu"):
        raise UsageError(
            f"run {name} --on {flags.on[:20]}: a relative's rows run on the cpu or the gpu ground",
            help_text=f"dsv4-repro show {name} (which row runs where)",
        )
    if flags.on == "gpu":
        try:
            return _on_gpu(entry, common, flags, screen, expect)
        except NoDriverError as error:
            error.help_text = f"The rows that need no GPU: dsv4-repro run {name} --on cpu"
            raise
    if flags.trials != 1 or flags.device is not None:
        raise UsageError(
            "--trials and --device go with --on gpu; on the cpu ground a row is tried under several orders of execution",
            help_text=f"dsv4-repro run {name} --count (all of them), --seed N (others)",
        )
    if flags.all_rows:
        return _all_rows(entry, common, flags, sm, screen)
    row = choose_row(entry, flags.fix, flags.kernel)
    if flags.explore:
        return _explored(entry, row, screen)
    screen.tell(_first_lines(entry, row, sm))
    done, folder, status = _run_one(entry, row, common, flags, sm, screen, expect)
    diagnosis = done.first.diagnosis
    style = {"hang": "bad", "other": "bad", "clean": "good"}.get(diagnosis.outcome, "note")
    screen.tell([f"{diagnosis.outcome.upper()}: {verdict_words(diagnosis)}"], style=style)
    lines = [diagnosis.verdict.sentence, *proof_lines(diagnosis)]
    if done.launches > 1:
        bad = sum(count for key, count in done.counts.items() if key[0] != "not-hung")
        lines.append(f"orders of execution: {bad} of {done.launches} did not end well (seeds from {common.seed or 0})")
    unwedge = done.first.detail.get("unwedge")
    if unwedge is not None:
        after = f"rows wrong afterwards: {unwedge['rows_wrong'] or 'none'}"
        ended = "the launch ended" if unwedge["retired"] else f"it did not end ({unwedge['kind']})"
        lines.append(f"experiment: a large count into every counter: {ended}; {after}")
    lines.append(f"run directory: {folder}")
    screen.tell([line for line in lines if line])
    if diagnosis.outcome in ("hang", "other"):
        # The cheapest measurement is told where one is open; where the cause is this scenario's own, its fixes come next.
        own = not diagnosis.next or diagnosis.next.startswith("dsv4-repro list")
        screen.say(f"next: {f'dsv4-repro show {name}    # the fixes, and what runs where' if own else diagnosis.next}")
    elif diagnosis.outcome == "inconclusive":
        screen.say(f"next: dsv4-repro run {name} --all    # every row side by side, defect and fixes")
    screen.document({**diagnosis.document(), "run": str(folder), "exit_status": status})
    return status


def _on_gpu(entry: Scenario, common: Common, flags: RelativeFlags, screen: Screen, expect: Expectation | None) -> int:
    """``--on gpu``: one row, or all that a card can run."""
    from .gpu_rows import gpu_options
    from .relative_gpu_run import command_of_row, rerun, run_gpu_row

    for given, flag in ((flags.explore, "--explore"), (flags.count, "--count"), (flags.arch is not None, "--arch")):
        if given:
            raise UsageError(f"{flag} is the interpreter's; with --on gpu --trials N gives a rate", help_text="Leave out --on gpu")
    options = gpu_options(
        flags.device, trials=flags.trials, seed=common.seed or 0, share=flags.share, dump=flags.dump, unwedge=flags.unwedge,
        timeout_s=common.timeout,
    )  # fmt: skip
    if flags.all_rows:
        screen.tell([f"ground gpu: all rows of {entry.name} that a card can show, {options.trials} launches each"])
        tried, skipped = run_gpu_rows(entry, entry.variants(), options, out=common.out, timeout_s=common.timeout, screen=screen)
        screen.end_progress()
        document = matrix_document(entry, tried, skipped, ground="gpu")
        tell_matrix(entry, document, screen)
        return MATRIX_STATUS[document["outcome"]]
    row = choose_row(entry, flags.fix, flags.kernel, "gpu")
    done = run_gpu_row(
        entry, row, options, command=command_of_row(entry, row, options, flags.kernel), out=common.out, expect=expect,
        tell=screen.tell, progress=screen.progress,
    )  # fmt: skip
    screen.end_progress()
    diagnosis, counts = done.diagnosis, done.counts
    style = {"hang": "bad", "other": "bad", "clean": "good"}.get(diagnosis.outcome, "note")
    screen.tell([f"{diagnosis.outcome.upper()}: {verdict_words(diagnosis)}"], style=style)
    lines = [diagnosis.verdict.sentence, *proof_lines(diagnosis)]
    lines.append(f"launches: {done.launches}, {counts.hang} hung, {counts.other} ended wrong, {counts.clean} clean")
    lines.append(f"run directory: {done.folder}")
    screen.tell([line for line in lines if line])
    if diagnosis.outcome == "hang":
        screen.say(f"next: {rerun(done)}")
    screen.document({**diagnosis.document(), "run": str(done.folder), "exit_status": done.status})
    return done.status


def _explored(entry: Scenario, row: Row, screen: Screen) -> int:
    """The row's launch in every order of execution, over the barrier's model: 3 if one of them never ends, else 0."""
    from ..kernels.build import parse_builtin
    from ..scenarios.explore import explore, model_of

    parsed = parse_builtin(row.kernel)
    if parsed is None or not isinstance(row.what, Launch):
        raise UsageError(f"row {row.name} of {entry.name}: only launches of the builtin kernel have a model to explore")
    found = explore(model_of(row.what, parsed[0]))
    screen.tell([f"{entry.name}, row {row.name}: {row.text}", *found.lines()])
    screen.document({
        "schema": EXPLORE_SCHEMA,
        "outcome": "hang" if found.deadlocks else "clean",
        "scenario": entry.name,
        "row": row.name,
        "states": found.states,
        "ends": [{"name": end.name, "counters": list(end.state[1]), "path": list(end.path)} for end in found.ends],
    })  # fmt: skip
    return 3 if found.deadlocks else 0


def _command(entry: Scenario, row: Row, flags: RelativeFlags, sm: int, seed: int) -> tuple[str, ...]:
    words = ["dsv4-repro", "run", entry.name, "--on", "cpu", "--fix", row.name, "--arch", f"sm_{sm}", "--seed", str(seed)]
    return (*words, "--kernel", flags.kernel) if flags.kernel is not None else tuple(words)


def _run_one(
    entry: Scenario, row: Row, common: Common, flags: RelativeFlags, sm: int, screen: Screen, expect: Expectation | None,
    clock: Clock = SYSTEM,
) -> tuple[Tried, Path, int]:  # fmt: skip
    """Run a row and write its directory. Whatever is raised on the way, ``run.json`` says how it ended."""
    seed = common.seed or 0
    with RunStore.create(entry.name, out=common.out, clock=clock) as store:
        mark_run(store.path)
        began = clock.monotonic()
        record = _record(entry, row, sm, seed, _command(entry, row, flags, sm, seed), utc_stamp(clock))
        store.write_run(record)
        store.emit("start", row=row.name, kernel=row.kernel)
        deadline = Deadline(common.timeout, clock) if common.timeout is not None else None
        try:
            with breaks_noted(store, record, clock):
                done = judge_row(
                    row, sm=sm, seed=seed, count_all=flags.count, keep=_Keeper(store), deadline=deadline, progress=screen.progress
                )  # fmt: skip
        finally:
            screen.end_progress()
        diagnosis = done.first.diagnosis
        verdict = diagnosis.verdict
        store.emit("launch", detail=done.first.detail)
        store.emit("verdict", **{"class": verdict.class_, "cause": verdict.cause})
        status = exit_status(diagnosis.outcome, expect)
        finish_row(
            store, entry, record, diagnosis, _counts(done), status=status, seconds=clock.monotonic() - began, clock=clock
        )  # fmt: skip
        store.emit("end", outcome=diagnosis.outcome)
    return done, store.path, status


def _counts(done: Tried) -> TrialCounts:
    hang = sum(count for key, count in done.counts.items() if key[0].startswith("gpu-") and key[0] != "gpu-fault")
    clean = done.counts.get(("not-hung", None), 0)
    return TrialCounts(asked=done.launches, hang=hang, clean=clean, other=done.launches - hang - clean)
