"""The verb ``hunt``: plan and store opened, workers started, the loop, then what the first hang of each kind needs, and the
outputs.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...clock import SYSTEM, Clock, Deadline
from ...errors import ReproError, UsageError
from ..atomic import write_atomic
from ..console import Screen
from ..grounds import require_card
from .compare import Change, compare_summaries
from .hunt import Hunt
from .outputs import campaign_status, junit_of, markdown_summary, summary_lines
from .page import campaign_page
from .plan import HuntPlan, load_hunt_plan
from .pools import LocalPool, Pool
from .sampler import Sampler
from .screen import LiveScreen
from .store import CampaignStore

if TYPE_CHECKING:
    from ..options import Common

__all__ = ["HUNT_SCHEMA", "HuntFlags", "run_hunt"]

HUNT_SCHEMA = "dsv4-repro/hunt/1"
#: Trials of one cell in a row: on a GPU a new cell costs a new process and context.
#: On a server a start, of a minute or more.
BATCH = {"cpu": 4, "gpu": 50, "server": 10}


@dataclass(frozen=True, slots=True)
class HuntFlags:
    """What the command line says."""

    plan: Path | None = None
    resume: bool = False
    status: Path | None = None
    workers: int | None = None
    gpus: str | None = None
    ray: str | None = None
    compare: Path | None = None
    fail_on: str = "any"
    junit: Path | None = None


def _devices(plan: HuntPlan, flags: HuntFlags) -> Sequence[str | None]:
    """One entry a worker: its GPU, or None on the CPU."""
    if plan.on == "cpu":
        if flags.gpus is not None:
            raise UsageError("--gpus: this plan runs on the CPU")
        return [None] * (flags.workers or len(os.sched_getaffinity(0)))
    if flags.gpus is not None:
        names = flags.gpus.split(",")
        if not all(name.isdecimal() for name in names) or len(set(names)) != len(names):
            raise UsageError(f"--gpus {flags.gpus[:60]!r}: numbers of GPUs, each once, such as 0,1,2")
        return list(names)
    from ..machine import probe_machine

    found = probe_machine(version=lambda _argv: None).gpus or ()
    return [str(number) for number in range(len(found))][: flags.workers or None] or ["0"]


def _pool(plan: HuntPlan, flags: HuntFlags, folder: Path, left_s: float, clock: Clock) -> tuple[Pool, int]:
    if plan.on == "server":
        from .server_pool import ServerPool

        given = [word for word, on in (("--ray", flags.ray), ("--gpus", flags.gpus), ("--workers", flags.workers)) if on]
        if given:
            raise UsageError(
                f"{', '.join(given)}: a hunt on servers makes one trial at a time",
                help_text="A server takes the cards it sees: CUDA_VISIBLE_DEVICES, and tp in [fixed]",
            )
        return ServerPool(folder / "servers", deadline=Deadline(left_s, clock), clock=clock), 1
    if flags.ray is not None:
        from .ray_runner import RayPool

        cluster = RayPool(flags.ray, gpu=plan.on == "gpu", clock=clock)
        return cluster, max(cluster.slots(), 1)
    devices = _devices(plan, flags)
    return LocalPool(devices, clock=clock), len(devices)


def run_hunt(common: Common, flags: HuntFlags, *, clock: Clock = SYSTEM) -> int:
    """The verb. 3 a hang (with ``--fail-on new`` only what is new or changed), 4 other failures, 5 no danger window, 0 clean."""
    screen = Screen(as_json=common.as_json, clock=clock)
    if flags.fail_on not in ("any", "new"):
        raise UsageError(f"--fail-on {flags.fail_on[:40]!r}: any or new")
    if flags.fail_on == "new" and flags.compare is None:
        raise UsageError("--fail-on new needs --compare: new against which campaign?")
    if flags.status is not None:
        with CampaignStore.read(flags.status) as store:
            return _finish(store, flags, common, screen, "so far; it may still run", write=False)
    if flags.plan is None:
        raise UsageError("hunt needs a plan", help_text="dsv4-repro hunt PLAN.toml --out DIR; keys: docs/campaigns.md")
    plan = load_hunt_plan(flags.plan)
    if common.seed is not None:
        plan = plan.model_copy(update={"search": plan.search.model_copy(update={"seed": common.seed})})
    if common.timeout is not None:
        shorter = min(common.timeout / 60, plan.budget.minutes or float("inf"))
        plan = plan.model_copy(update={"budget": plan.budget.model_copy(update={"minutes": shorter})})
    folder = common.out or Path("campaigns") / plan.name.replace("/", "_")
    if plan.on == "gpu" and flags.ray is None and flags.gpus is None:  # before there is a store; a cluster's cards are its own
        from ..machine import probe_machine

        require_card(probe_machine(version=lambda _argv: None).gpus)
    goes_on = flags.resume and (folder / "campaign.sqlite").exists()  # the first night of a standing job has nothing to resume
    store = CampaignStore.resume(folder, plan, clock=clock) if goes_on else CampaignStore.create(folder, plan, clock=clock)
    with store:
        kept = "resumed" if goes_on else "new"
        size = f"{plan.cells:.6g} cells, {plan.search.mode} search"
        screen.tell([f"hunt {plan.name}: {size}, on {plan.on}; store {folder}, {kept}"])
        why = _hunt(plan, store, flags, screen, clock)
        if plan.minimise and plan.on != "server":  # what a hung server gave was kept when it hung, in servers/
            _artefacts(store, plan, screen, clock)
        return _finish(store, flags, common, screen, why, write=True)


def _hunt(plan: HuntPlan, store: CampaignStore, flags: HuntFlags, screen: Screen, clock: Clock) -> str:
    before = sum(float(detail.get("seconds", 0)) for _at, _kind, detail in store.events("invocation"))
    left = max(plan.budget.minutes * 60 - before, 0.1) if plan.budget.minutes is not None else float("inf")
    pool, workers = _pool(plan, flags, store.folder, left, clock)
    live = LiveScreen(screen)
    sampler = Sampler(plan, batch=BATCH[plan.on], counts=store.window_counts)
    hunt = Hunt(plan, store, pool, sampler, watch=live, clock=clock, workers=workers, before_s=before)
    began = clock.monotonic()
    try:
        return hunt.run()
    finally:
        live.close()
        pool.close()
        store.event("invocation", seconds=clock.monotonic() - began, workers=workers)


def _artefacts(store: CampaignStore, plan: HuntPlan, screen: Screen, clock: Clock) -> None:
    """The first hang of each kind: run once more in full, shrunk, bundled. What fails is said and noted, and the hunt's answer
    stays.
    """
    from .first_of_kind import write_first_of_kind

    root = Path(os.path.abspath(store.folder))  # a run directory's path is absolute, and these are written down relative to it
    for hang in store.summary().hangs:
        if hang.minimised is not None or hang.identity == "not identified":
            continue
        cell_number, seed = store.first_trial(hang.identity)
        screen.progress(f"{hang.identity}: run in full, shrunk, bundled")
        try:
            written = write_first_of_kind(plan.cell(cell_number), seed, hang.identity, root / "hangs" / hang.identity, clock)
        except ReproError as error:
            store.event("artefact", identity=hang.identity, error=f"{type(error).__name__}: {error}"[:1000])
            screen.note(f"{hang.identity}: {error}")
            continue
        relative = {name: str(path.relative_to(root)) for name, path in written.items()}
        store.note_artefact(hang.identity, minimised=relative.get("minimised"), bundle=relative.get("bundle"))


def _finish(store: CampaignStore, flags: HuntFlags, common: Common, screen: Screen, why: str, *, write: bool) -> int:
    summary = store.summary()
    changes: list[Change] | None = None
    if flags.compare is not None:
        with CampaignStore.read(flags.compare) as earlier:
            changes = compare_summaries(summary, earlier.summary())
    outcome, status = campaign_status(summary, changes, flags.fail_on)
    events = [f"{at} {kind}: {json.dumps(detail)}" for at, kind, detail in store.events() if kind != "invocation"]
    if write:
        _write(store.folder, summary, changes, store, events, flags.junit)
    screen.end_progress()
    budget = why in ("trials", "minutes", "gpu_hours", "hangs")
    ended = f"the budget of {why.replace('_', ' ')} is used up" if budget else why
    screen.tell([f"{outcome.upper()}: {ended}"], style={"hang": "bad", "other": "bad", "clean": "good"}.get(outcome, "note"))
    screen.tell([*summary_lines(summary, changes), *([f"page: {store.folder / 'campaign.html'}"] if write else [])])
    first = next((store.folder / hang.minimised for hang in summary.hangs if hang.minimised is not None), None)
    if first is not None:
        screen.say(f"next: python {shlex.quote(str(first))}    # the smallest launch that hangs, on a GPU: exit status 3")
    screen.document(
        {
            "schema": HUNT_SCHEMA,
            "outcome": outcome,
            "ended_by": why,
            **summary.document(),
            "compared": [change.document() for change in changes] if changes is not None else None,
            "store": str(store.folder),
            "exit_status": status,
        }
    )
    return status


def _write(
    folder: Path, summary: Any, changes: list[Change] | None, store: CampaignStore, events: Sequence[str], junit: Path | None
) -> None:
    page = campaign_page(summary, store.times_to_hang(), changes, events)
    write_atomic(folder / "campaign.html", page.encode("utf-8", "replace"), mode=0o644)
    xml = junit_of(summary, changes).encode()
    for path in filter(None, (folder / "junit.xml", junit)):
        write_atomic(path, xml, mode=0o644)
    markdown = markdown_summary(summary, changes)
    write_atomic(folder / "summary.md", markdown.encode(), mode=0o644)
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if target:
        try:
            with Path(target).open("a", encoding="utf-8") as stream:
                stream.write(markdown)
        except OSError as error:
            store.event("summary", error=f"{target}: {error.strerror or error}")
