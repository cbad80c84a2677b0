"""The first hang of a kind: run once more in full as ``run drain`` does, shrunk, and bundled."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

from ...clock import Clock
from ...errors import InconclusiveError
from ..atomic import write_atomic
from ..console import Screen
from .cells import Cell
from .minimise import minimise_cell
from .reproducer import write_reproducer

__all__ = ["captured_run", "write_first_of_kind"]


def captured_run(cell: Cell, seed: int, folder: Path) -> Path:
    """The cell's ``run drain`` with every collector, in a run directory. InconclusiveError if it does not hang."""
    from ..drain_job import job_of
    from ..drain_run import execute
    from ..options import Common, PlanFlags, RunFlags

    plan_file = folder.parent / f"{folder.name}-plan.json"
    plan_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(plan_file, json.dumps(cell.drain(seed).document(), indent=1).encode(), mode=0o644)
    flags = RunFlags(
        on=cell.ground, kernel=cell.kernel, arch=f"sm_{cell.arch}" if cell.arch is not None else None, device=cell.device,
        sms=cell.sms, slots_per_sm=cell.slots_per_sm, schedule=cell.schedule, producer=cell.producer, share=cell.share,
    )  # fmt: skip
    screen = Screen(stdout=io.StringIO(), stderr=io.StringIO())  # the hunt's own screen is on
    job = job_of(Common(seed=seed), PlanFlags(plan=plan_file), flags, screen)
    if folder.exists():
        shutil.rmtree(folder)  # a capture that a kill interrupted
    done = execute(job, screen, out=folder)
    if done.result.outcome != "hang":
        raise InconclusiveError(f"run once more in full, it is {done.result.outcome}")
    return done.folder


def write_first_of_kind(cell: Cell, seed: int, identity: str, folder: Path, clock: Clock) -> dict[str, Path]:
    """``run`` (a run directory), ``minimised`` (the reproducer) and ``bundle``: what was written. InconclusiveError if it is not
    seen again.
    """
    from ..bundling import make_bundle
    from ..runread import open_run

    folder.mkdir(parents=True, exist_ok=True)
    run = captured_run(cell, seed, folder / "run")
    done = minimise_cell(cell, seed, identity=identity, clock=clock)
    path = write_reproducer(folder / "reproducer.py", done)
    write_atomic(folder / "minimised.json", (json.dumps(done.document(), indent=2) + "\n").encode(), mode=0o644)
    bundle = folder / "bundle.zip"
    bundle.unlink(missing_ok=True)
    make_bundle(open_run(run), bundle)
    return {"run": run, "minimised": path, "bundle": bundle}
