"""The server of a run: what was asked for, our own one started and waited for, or one that runs already found; and its record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..clock import Clock, Deadline
from ..errors import ServerError
from ..forensics.collect.process_table import boot_id, start_ticks
from ..scenarios.drain import DrainPlan
from .console import printable
from .ground import Emit, Ready
from .serving.drain_windows import DrainWindows
from .serving.records import ServerTarget
from .serving.server_diagnosis import ServerFacts

if TYPE_CHECKING:
    from .serving.load_plan import LoadPlan
    from .serving.recipe import LaunchSpec, ServeOptions
    from .serving.server_process import ServerProcess

__all__ = ["ServerSetup", "find_running", "launch_of", "ready_record", "tell_found", "wait_until_ready"]

#: Suspect for so long without a sign from the device: the run ends without an answer, seconds.
SUSPECT_S = 60.0
#: A capture may take so long, seconds.
CAPTURE_S = 40.0


@dataclass(frozen=True)
class ServerSetup:
    """What a server run was asked for. ``options``: its folder is not yet the run's; None with ``url``. ``attach``: a debugger may
    be attached to a hung worker. ``timeout_s``: of the whole run. ``again``: the command that takes a core dump too,
    ``retry``: the one that drains three times.
    ``progress``: shows a line on the screen."""

    windows: DrainWindows
    load_plan: LoadPlan
    options: ServeOptions | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    facts: ServerFacts = field(default_factory=ServerFacts)
    budget_s: float = CAPTURE_S
    suspect_s: float = SUSPECT_S
    timeout_s: float | None = None
    attach: bool = True
    again: str = ""
    retry: str = ""
    progress: Callable[[str], None] = lambda _line: None
    #: The drain of another seed on the same server: its plan, windows and load. None: the load is given, whatever the seed.
    reseed: Callable[[int], tuple[DrainPlan, DrainWindows, LoadPlan]] | None = None


def launch_of(setup: ServerSetup, folder: Path, emit: Emit) -> LaunchSpec:
    """How our own server is started, in the run's ``folder``; what differs from the plain command is said first. UsageError."""
    from .serving.recipe import build_launch

    assert setup.options is not None
    spec = build_launch(dataclasses.replace(setup.options, folder=folder))
    emit("server", state="starting", argv=list(spec.shown), log=str(spec.log_path))
    for change in spec.changes:
        emit("change", what=change.what, value=change.value, why=change.why)
    return spec


def wait_until_ready(process: ServerProcess, setup: ServerSetup, emit: Emit, check: Callable[[], None], clock: Clock) -> float:
    """Seconds until a server that was started answers. ``check``: raises what should end the wait. ServerError, DeadlineError."""
    phase = ""

    def on_phase(now: str, waits_for: str, seconds: float) -> None:
        nonlocal phase
        check()
        if now != phase:
            phase = now
            emit("server", state=now, waits_for=waits_for, seconds=round(seconds, 2))
        setup.progress(f"server {now}, {seconds:.0f} s · waits for {printable(waits_for, limit=120)}")

    limit = Deadline(setup.timeout_s, clock) if setup.timeout_s is not None else None
    took = process.wait_ready(limit, on_phase)
    emit("server", state="ready", seconds=round(took, 2), **_identity(process.pid))
    return took


def find_running(setup: ServerSetup, url: str, clock: Clock) -> tuple[ServerTarget, float]:
    """(the server at ``url``, which completes a request, seconds that it took to see so). ServerError if it completes none."""
    from .serving.completions import complete_once
    from .serving.ranks import find_server
    from .serving.served_model import served_model

    began = clock.monotonic()
    found = find_server(url, clock=clock)
    base = found.base_url or url.rstrip("/")
    model = setup.model or found.model or served_model(base, setup.headers)
    outcome = complete_once(base, model, timeout_s=30.0, headers=setup.headers, clock=clock)
    if not outcome.completed:
        raise ServerError(
            f"{base} does not complete a request ({outcome.kind} {outcome.detail}".rstrip() + ")",
            help_text=f"If it hangs already, see why: dsv4-repro why {base}",
        )
    return dataclasses.replace(found, base_url=base, model=model, owned=False), clock.monotonic() - began


def tell_found(target: ServerTarget, emit: Emit) -> None:
    """A server that runs already, for the timeline, with what of it could not be read."""
    emit("server", state="found", url=target.base_url, model=target.model, **_identity(target.api_pid))
    for item in target.unread:
        emit("unread", what=item.what, why=item.why, remedy=item.remedy)


def ready_record(target: ServerTarget, took: float, argv: Sequence[str]) -> Ready:
    """What a run says of its server once it answers. ``took``: seconds until then; ``argv``: of our own."""
    ranks = ", ".join(f"rank {one.rank if one.rank is not None else '?'} pid {one.pid}" for one in target.ranks)
    whose = "ours" if target.owned else "found running; left as found"
    environment: dict[str, Any] = {
        "base_url": target.base_url,
        "model": target.model,
        "ready_s": round(took, 1),
        "processes": {str(pid): role for pid, role in target.tree.items()},
        "ranks": [dataclasses.asdict(rank) for rank in target.ranks],
        "changes": [dataclasses.asdict(change) for change in target.changes],
        "argv": list(argv),
        "unread": [dataclasses.asdict(item) for item in target.unread],
    }
    return Ready(f"{target.base_url} ({whose}), {ranks or 'no worker was recognised'}; ready after {took:.0f} s", environment)


def _identity(pid: int | None) -> dict[str, Any]:
    """A process for the timeline, so that it is told from a later one of the same number (``unwedge RUN``)."""
    return {"pid": pid, "start_ticks": start_ticks(pid) if pid is not None else None, "boot": boot_id()}
