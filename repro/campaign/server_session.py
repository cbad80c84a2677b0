"""One cell on the server ground, trial after trial: one server for many drains, a drain a trial.

A trial is one draining wave. Which windows it reached is what the recorder or the engine's counters show, never the plan. A server
that hung is captured and ended (one release frees one launch, and the next batch of that size wedges again), and so is one that
died or stood without an answer; the next trial starts another.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...clock import SYSTEM, Clock, Deadline
from ...errors import ReproError, UsageError
from ...scenarios.drain_steps import DecodeStep
from ..console import Screen
from ..ground import StepOutcome
from ..leftovers import mark_run
from ..options import Common, PlanFlags, RunFlags, ServerFlags
from ..server_run import server_job
from ..serving.drain_windows import reached_windows
from .cells import Cell, TrialResult

if TYPE_CHECKING:
    from ...forensics.records import Diagnosis
    from ..drain_job import DrainJob
    from ..server_ground import ServerGround

__all__ = ["ServerSession", "described", "server_job_of"]

#: Hangs of a cell at which a debugger is attached; further ones are judged by what disturbs nothing.
MOST_ATTACHED = 3


def server_job_of(cell: Cell, seed: int, *, screen: Screen | None = None, waves: int = 1) -> DrainJob:
    """The cell's server run, all choices made; nothing is started. UsageError, PlanError, UnavailableError (there is no vLLM)."""
    words: dict[str, Any] = {}
    for name, value in cell.plan.items():
        if name in ("seed", "top_k") or value is None:
            continue
        if name == "capture_sizes":
            value = value if isinstance(value, str) else ",".join(map(str, value))
        elif name in ("prompt", "output"):
            value = ":".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        words[name] = value
    server = dict(cell.server)
    flags = ServerFlags(
        model=server.get("model"), python=server.get("python"), guard=bool(server.get("guard")), rescue=bool(server.get("rescue")),
        engine=[str(word) for word in server.get("flags", ())] or None,
    )  # fmt: skip
    return server_job(
        Common(seed=seed), PlanFlags(**words), RunFlags(on="server", tp=int(server.get("tp") or 1)), flags,
        screen or Screen(stdout=io.StringIO(), stderr=io.StringIO()), why="a campaign's cell", expect=None, asked=frozenset(),
        waves=waves,
    )  # fmt: skip


class ServerSession:
    """``folder``: logs, loads and evidence of all trials; None: a temporary one. ``deadline``: of all trials of the cell.
    ``make``: (job, folder) -> ground. ``progress``: a line while a server starts.
    """

    def __init__(
        self,
        cell: Cell,
        *,
        identities: dict[str, Any] | None = None,
        emit: Callable[..., None] = lambda *_args, **_fields: None,
        folder: Path | None = None,
        deadline: Deadline | None = None,
        make: Callable[[DrainJob, Path], ServerGround] | None = None,
        screen: Screen | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self.cell = cell
        self._emit, self._clock, self._screen = emit, clock, screen
        self._deadline = deadline or Deadline(float("inf"), clock)
        self._make = make or _ground
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._kept = folder.absolute() if folder is not None else None
        self._place = Path()
        self._job: DrainJob | None = None
        self._ground: ServerGround | None = None
        self._steps: tuple[DecodeStep, ...] = ()
        self._attached = 0
        self.opened = 0
        self.device_idle: bool | None = None

    def bound(self, deadline: Deadline) -> None:
        """When all of the cell's trials have to be over; it bounds a start too."""
        self._deadline = deadline

    def prepare(self, seed: int) -> DrainJob:
        """Every choice of the cell's server made, nothing started. UsageError, PlanError, UnavailableError."""
        if self._job is None:
            self._job = server_job_of(self.cell, seed, screen=self._screen)
        return self._job

    # -- one trial ---------------------------------------------------------------------------------------------------------------

    def trial(self, seed: int) -> TrialResult:
        """One drain. What the server cannot do becomes ``other`` with the reason; UsageError and Ctrl-C pass through."""
        began = self._clock.monotonic()
        try:
            ground = self._ready(seed)
            result = self._run(ground, seed, began)
        except UsageError:
            self.close()
            raise
        except ReproError as error:
            self.close()
            result = TrialResult("other", seed, why=f"{type(error).__name__}: {error}"[:1000])
        except BaseException:
            self.close()
            raise
        return replace(result, seconds=self._clock.monotonic() - began, device_idle=self.device_idle)

    def _ready(self, seed: int) -> ServerGround:
        """The open server, or a new one. Errors of a start close it again."""
        if self._ground is not None:
            self._steps = tuple(self._ground.drain_again(seed))
            return self._ground
        job = self.prepare(seed)
        self.opened += 1
        if self._kept is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="dsv4-server-")
        place = self._place = (self._kept or Path(self._temporary.name if self._temporary else "")) / f"server-{self.opened}"
        place.mkdir(parents=True, exist_ok=True)
        mark_run(place)
        ground = self._make(job, place)
        self._ground = ground  # before open: one that is half open is closed too
        ground.bound(self._deadline)
        ground.open(job.prepared.request, self._emit)
        self._steps = tuple(ground.drain_again(seed))
        return ground

    def _run(self, ground: ServerGround, seed: int, began: float) -> TrialResult:
        ground.bound(self._deadline)
        for step in self._steps:
            outcome = ground.run_step(step)
            if outcome.state == "hung":
                return self._hung(ground, step, outcome, seed, began)
            if outcome.state != "done":
                reached = self._reached(ground)
                why = f"{outcome.state}: {'; '.join(outcome.reasons)}"[:1000]
                self.close()
                return TrialResult("other", seed, bool(reached), hung_step=step.index, windows=reached, why=why)
        diagnosis, reached_one = ground.judge_clean()
        windows = self._reached(ground)
        if reached_one:
            return TrialResult("clean", seed, True, windows=windows)
        kind: Any = "no window" if diagnosis.window.reached is False else "other"
        why = (ground.windows.why_not if kind == "no window" else "") or diagnosis.verdict.sentence
        return TrialResult(kind, seed, windows=windows, why=why[:1000])

    def _hung(self, ground: ServerGround, step: DecodeStep, outcome: StepOutcome, seed: int, began: float) -> TrialResult:
        to_hang = self._clock.monotonic() - began
        windows = self._reached(ground)
        place = self._place / "evidence"
        place.mkdir(parents=True, exist_ok=True)
        attach = self._attached < MOST_ATTACHED
        self._attached += attach
        captures = ground.capture(place, self._emit, allow_dump=False, attach=attach)
        diagnosis: Diagnosis = ground.judge(captures, step, outcome, evidence=())
        (place.parent / "diagnosis.json").write_text(diagnosis.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
        self.close()
        verdict = diagnosis.verdict
        if diagnosis.outcome != "hang":
            # It recovered while it was read, or the evidence says otherwise: that is no hang of this cell.
            return TrialResult("other", seed, bool(windows), windows=windows, why=f"{verdict.class_}: {verdict.sentence}"[:1000])
        return TrialResult(
            "hang", seed, True, identity=verdict.identity, class_=verdict.class_, cause=verdict.cause, signature=verdict.signature,
            identified="diagnosed" if verdict.identity else "", hung_step=step.index, to_hang_s=to_hang, reused=False,
            windows=windows or self._unconfirmed(diagnosis), why="; ".join(outcome.reasons)[:1000],
        )  # fmt: skip

    @staticmethod
    def _unconfirmed(diagnosis: Diagnosis) -> tuple[str, ...]:
        """A hang before recorder or counters told its window: the live count it hung at."""
        live = diagnosis.window.live_requests
        return (f"live {live} (hung there)",) if live is not None else ()

    @staticmethod
    def _reached(ground: ServerGround) -> tuple[str, ...]:
        """The windows that an unfixed build can wedge in, as far as they were measured or computed from counters, not planned."""
        load = ground.load
        if load is None:
            return ()
        return tuple(f"{one.aim.text} ({one.how})" for one in reached_windows(load.windows(), ground.windows.counts))

    # -- the end -------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the load and the server; may be called any number of times."""
        ground, self._ground = self._ground, None
        if ground is not None:
            closed = ground.close()
            self.device_idle = closed.device_idle
            self._emit("close", how=closed.how, device_idle=closed.device_idle, detail=closed.detail)
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            temporary.cleanup()


def _ground(job: DrainJob, folder: Path) -> ServerGround:
    from ..server_ground import ServerGround

    assert job.make_in is not None
    ground = job.make_in(folder)
    assert isinstance(ground, ServerGround)
    return ground


def described(server: Mapping[str, Any]) -> str:
    """What differs from the recipe, in a few words."""
    words = [f"--{name}" for name in ("guard", "rescue") if server.get(name)]
    return " ".join([*words, *(str(word) for word in server.get("flags", ()))]) or "the recipe"
