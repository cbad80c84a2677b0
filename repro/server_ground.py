"""The server ground: a real ``vllm serve``, ours or somebody's, a drain over HTTP, an observer beside it, capture while it hangs.

A step of the run is a live count of the drain: it has ended when the load has fallen below that count, or when every request still
open has received a further token at it. The last one ends with the load. What the batch really was is never assumed from the plan:
the windows that were reached come from the flight recorder or the engine's counters (``steering``). A fault of the client side is
no hang; without a sign from the device the state stays suspect, and the answer is inconclusive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..clock import SYSTEM, Clock, Deadline
from ..errors import ReproError, UsageError
from ..forensics.records import Diagnosis, Evidence
from ..scenarios.drain_steps import DecodeStep
from .ground import CaptureOutcome, CloseOutcome, Emit, GroundRequest, Ready, StepOutcome, UnwedgeOutcome
from .server_opening import ServerSetup, find_running, launch_of, ready_record, tell_found, wait_until_ready
from .server_steps import Passing, nothing_answered, standing_end, step_detail
from .serving.drain_windows import DrainWindows
from .serving.interrupts import Interrupts
from .serving.records import Assessment, LoadSample, ServerTarget, Snapshot
from .serving.server_diagnosis import ServerFacts, clean_drain, judge_server

if TYPE_CHECKING:
    from .serving.drain_load import DrainLoad
    from .serving.observer import Observer
    from .serving.recipe import LaunchSpec
    from .serving.server_process import ServerProcess

__all__ = ["ServerGround"]

_LOOK_S = 0.05
#: A drain that has ended is clean if the server completes one more request within this, seconds.
_LAST_ANSWER_S = 15.0


class ServerGround:
    """One server and its load. ``folder``: the run's directory (``leftovers.mark_run`` names it where it is not given)."""

    name: Literal["server", "gpu", "cpu"] = "server"

    def __init__(self, setup: ServerSetup | None = None, folder: Path | None = None, *, clock: Clock = SYSTEM) -> None:
        self._setup = setup
        self._folder = folder
        self._clock = clock
        self._process: ServerProcess | None = None
        self._spec: LaunchSpec | None = None
        self._target: ServerTarget | None = None
        self._observer: Observer | None = None
        self._load: DrainLoad | None = None
        self._headers: Mapping[str, str] = {}
        self._deadline: Deadline | None = None
        self._loads = 0
        self._captured: tuple[Path, Sequence[CaptureOutcome]] | None = None
        self._last: tuple[Snapshot, Assessment] | None = None
        self._left: list[Any] = []
        self._interrupts = Interrupts()

    # -- set-up --------------------------------------------------------------------------------------------------------------

    def open(self, request: GroundRequest, emit: Emit) -> Ready:
        """Start the server (or find it), wait until it answers a completion, start the observer.

        Raises UsageError, ServerError (it cannot start, the port is taken, it does not answer), DeadlineError, UnavailableError.
        """
        if self._setup is None or self._folder is None:
            raise UsageError("the server ground needs a model or a server: --model PATH, --model dummy, or --url http://HOST:PORT")
        self._emit = emit
        self._request = request
        self._interrupts.install()  # a server that outlives us would keep its GPUs
        if self._setup.url is None:
            took = self._start_own(self._setup)
        else:
            self._headers = self._setup.headers
            self._target, took = find_running(self._setup, self._setup.url, self._clock)
            tell_found(self._target, emit)  # after it is kept: what is said at the end must hold where this cannot be written
        assert self._target is not None
        from .serving.observer import Observer

        self._observer = Observer(
            self._target,
            load=self,
            emit=emit,
            clock=self._clock,
            exit_status=self._process.poll if self._process is not None else None,
        )
        self._observer.start()
        return ready_record(self._target, took, self._spec.shown if self._spec is not None else ())

    def bound(self, deadline: Deadline) -> None:
        """When the whole run has to be over."""
        self._deadline = deadline

    def _start_own(self, setup: ServerSetup) -> float:
        from .serving.server_process import ServerProcess

        assert self._folder is not None
        spec = launch_of(setup, self._folder, self._emit)
        self._spec, self._headers = spec, spec.headers
        process = self._process = ServerProcess(spec, self._clock)  # kept before it starts: a half-started server is ended too
        process.start()
        took = wait_until_ready(process, setup, self._emit, self._interrupts.check, self._clock)
        self._target = process.target()
        return took

    def drain_again(self, seed: int) -> Sequence[DecodeStep]:
        """The next drain on this server, of another seed: its steps. Campaigns make many trials on one server. PlanError."""
        assert self._setup is not None
        if self._setup.reseed is not None:
            plan, windows, load = self._setup.reseed(seed)
            facts = dataclasses.replace(self._setup.facts, plan=plan)
            self._setup = dataclasses.replace(self._setup, windows=windows, load_plan=load, facts=facts)
            self._request = dataclasses.replace(self._request, plan=plan, steps=windows.steps, launches=windows.launches, seed=seed)
        return self._request.steps

    @property
    def windows(self) -> DrainWindows:
        """Where an unfixed build can wedge in the drain of now."""
        assert self._setup is not None
        return self._setup.windows

    @property
    def load(self) -> DrainLoad | None:
        """The load that runs or ran last."""
        return self._load

    def sample(self) -> LoadSample:
        """The load of now, for an observer that outlives one load."""
        return self._load.sample() if self._load is not None else LoadSample(at=self._clock.monotonic())

    # -- the drain -----------------------------------------------------------------------------------------------------------

    def run_step(self, step: DecodeStep) -> StepOutcome:
        """Wait until the drain has passed this live count, or until something else is certain."""
        assert self._setup is not None
        began = self._clock.monotonic()
        if self._load is None or step is self._request.steps[0]:
            self._start_load()
        assert self._load is not None
        last = step is self._request.steps[-1]
        while True:
            self._interrupts.check()
            outcome = self._ended(step, began) or self._stands(step, began)
            if outcome is not None:
                return outcome
            if self._load.done():
                return self._over(step, began)
            here = (self._load.wave, self._load.live(), self._load.stream_tokens())
            if not last and self._passing.passed(step.live_requests, *here):
                return self._outcome(step, "done", began)
            self._clock.sleep(_LOOK_S)

    def _start_load(self) -> None:
        from .serving.drain_load import DrainLoad
        from .serving.load_sources import engine_counters, ring_reader

        assert self._setup is not None
        assert self._target is not None
        assert self._folder is not None
        assert self._observer is not None
        if self._load is not None:
            self._load.stop()
        self._loads += 1
        place = self._folder if self._loads == 1 else self._folder / f"load-{self._loads}"
        base = self._target.base_url or ""
        agent = self._target.agent_folder
        self._load = DrainLoad(
            base,
            self._target.model or "",
            self._setup.load_plan,
            clock=self._clock,
            folder=place,
            headers=self._headers,
            counters=engine_counters(base, clock=self._clock),
            ring_steps=ring_reader(agent) if agent is not None else None,
        )
        self._passing = Passing(self._request.steps[0].live_requests, self._setup.load_plan)
        self._load.start()
        self._emit("load", state="started", plan_sha256=self._setup.load_plan.sha256, folder=str(place))

    def _look(self) -> tuple[Snapshot, Assessment] | None:
        assert self._observer is not None
        latest = self._observer.latest()
        if latest is not None:
            self._last = latest
        return latest

    def _ended(self, step: DecodeStep, began: float) -> StepOutcome | None:
        """The server's own end, by its process or by the observer."""
        look = self._look()
        status = self._process.poll() if self._process is not None else None
        if status is not None:
            self._settle()
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            return self._outcome(step, "died", began, (f"the server's process ended ({how})",))
        if look is not None and look[1].state in ("exited", "crashed"):
            return self._outcome(step, "died", began, look[1].reasons)
        return None

    def _settle(self) -> None:
        """The observer's word on an end comes a second after it: it knows which process went first."""
        until = Deadline(2.5, self._clock)
        while not until.expired:
            look = self._look()
            if look is not None and look[1].state in ("exited", "crashed"):
                return
            self._clock.sleep(_LOOK_S)

    def _stands(self, step: DecodeStep, began: float) -> StepOutcome | None:
        assert self._setup is not None
        assert self._load is not None
        end = standing_end(
            self._last,
            self._load.sample(),
            now=self._clock.monotonic(),
            began=began,
            suspect_s=self._setup.suspect_s,
            out_of_time=self._deadline is not None and self._deadline.expired,
        )
        return None if end is None else self._outcome(step, end[0], began, end[1])

    def _over(self, step: DecodeStep, began: float) -> StepOutcome:
        """The load has ended: done, if something of it was answered and the server still answers. A server that has died ends a
        load too, with errors, and a moment before its own end is seen."""
        assert self._load is not None
        sample = self._load.sample()
        if not sample.tokens:
            return self._outcome(step, "unfinished", began, (nothing_answered(sample, self._load.error),))
        answered, why = self._still_answers()
        if sample.faults or not answered:
            self._settle()
            outcome = self._ended(step, began) or (None if answered else self._stands(step, began))
            if outcome is not None:
                return outcome
        if not answered:
            return self._outcome(
                step, "unfinished", began, (f"the drain ended, and the server completes no further request: {why}",)
            )
        return self._outcome(step, "done", began)

    def _still_answers(self) -> tuple[bool, str]:
        from .serving.completions import complete_once

        assert self._target is not None
        base, model = self._target.base_url or "", self._target.model or ""
        outcome = complete_once(base, model, timeout_s=_LAST_ANSWER_S, headers=self._headers, clock=self._clock)
        return outcome.completed, f"{outcome.kind} {outcome.detail}".strip()[:200]

    def _outcome(self, step: DecodeStep, state: Any, began: float, reasons: Sequence[str] = ()) -> StepOutcome:
        assert self._load is not None
        sample, now = self._load.sample(), self._clock.monotonic()
        detail = step_detail(self._load.wave, sample, self._load.windows(), self._last, now, state)
        return StepOutcome(step.index, state, milliseconds=(now - began) * 1e3, reasons=tuple(reasons), detail=detail)

    # -- evidence ------------------------------------------------------------------------------------------------------------

    def capture(self, folder: Path, emit: Emit, *, allow_dump: bool, attach: bool = True) -> Sequence[CaptureOutcome]:
        """Everything on all ranks, least disturbing first, within the budget (``server_capture``)."""
        from .serving.server_capture import capture_server

        assert self._target is not None
        assert self._setup is not None
        self._interrupts.check()
        captures = capture_server(
            self._target,
            folder,
            emit,
            snapshot=self._last[0] if self._last is not None else None,
            budget_s=self._setup.budget_s,
            attach=attach and self._setup.attach,
            allow_dump=allow_dump,
            clock=self._clock,
            dump=self._spec.dumps if self._spec is not None else None,
            moved=self._moved,
            left=self._left,
            # Stacks pause each process for a moment: of somebody else's server only what disturbs nothing is read unless allowed.
            stacks=self._target.owned or self._setup.attach,
            told=False,
        )
        self._captured = (folder, captures)
        return captures

    def _moved(self) -> str:
        """Why the server is no longer hung, as the observer sees it; "" while it stands."""
        look = self._look()
        if look is not None and look[1].state not in ("hung", "suspect"):
            return f"the observer says {look[1].state}: {'; '.join(look[1].reasons)[:200]}"
        return ""

    def judge(
        self, captures: Sequence[CaptureOutcome], step: DecodeStep, outcome: StepOutcome, *, evidence: Sequence[Evidence]
    ) -> Diagnosis:
        """The diagnosis of a step that did not end well: hung, died or stopped."""
        assert self._setup is not None
        live = self._load.live() if self._load is not None else None
        if self._last is not None and self._last[1].live_requests is not None:
            live = self._last[1].live_requests
        known = self._setup.windows.step_of(live)
        diagnosis = judge_server(
            captures,
            self._last,
            self._captured[0] if self._captured is not None else self._folder or Path(),
            outcome=outcome,
            step=known or step,
            live=live,
            windows=self._setup.windows,
            seen=self._load.windows() if self._load is not None else (),
            facts=self._facts(),
            evidence=evidence,
            target=self._target,
        )
        if self._process is not None and "--attach" in diagnosis.next:
            # Our server is ended after this: what can still be measured is another run of it.
            return diagnosis.model_copy(update={"next": self._setup.again})
        return diagnosis

    def judge_clean(self) -> tuple[Diagnosis, bool]:
        """(the diagnosis of a drain that ended, whether a window was reached in which an unfixed build can wedge)."""
        assert self._setup is not None
        assert self._load is not None
        self._load.stop()
        found, reached = clean_drain(
            self._load.windows(), self._load.sample(), self._setup.windows, self._facts(), self._load.error
        )
        return (found.model_copy(update={"next": self._setup.retry}) if found.next else found), reached

    def _facts(self) -> ServerFacts:
        assert self._setup is not None
        if self._target is None:
            return self._setup.facts
        return dataclasses.replace(self._setup.facts, agent_folder=self._target.agent_folder)

    def unwedge(self, address: int, value: int) -> UnwedgeOutcome:
        """Not done by a run: a release frees one launch, and the next wedges again until the batch changes."""
        return UnwedgeOutcome(
            attempted=False,
            retired=False,
            address=address,
            value=value,
            why_not="a server is released by its own verb: dsv4-repro unwedge",
        )

    # -- the end -------------------------------------------------------------------------------------------------------------

    def close(self) -> CloseOutcome:
        """End the load, the observer, and the server if it is ours. Safe at any time and more than once."""
        self._interrupts.raised()
        try:
            return self._close()
        finally:
            self._interrupts.restore()

    def _close(self) -> CloseOutcome:
        problems: list[BaseException] = []
        thrown: BaseException | None = None
        for stop in (self._stop_load, self._stop_observer):
            try:
                stop()
            except (ReproError, OSError, RuntimeError) as error:
                problems.append(error)
            except BaseException as error:
                thrown = error  # whatever it is, a server that is ours is ended all the same: it would keep its GPUs
        if self._process is None:
            owned = "no server was started" if self._target is None else "not ours: left as found"
            closed = CloseOutcome("clean", device_idle=None, detail="; ".join([owned, *map(str, problems)]))
        else:
            try:
                closed = self._process.end()
            finally:
                self._end_debuggers()
        if thrown is not None:
            raise thrown
        if problems and self._process is not None:
            closed = dataclasses.replace(closed, detail="; ".join([closed.detail, *map(str, problems)]))
        return closed

    def _end_debuggers(self) -> None:
        if self._left:
            from .gpu_capture import end_left_debuggers

            end_left_debuggers(self._left)

    def _stop_load(self) -> None:
        if self._load is not None:
            self._load.stop()

    def _stop_observer(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.stop()
