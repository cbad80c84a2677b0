"""The run loop above any ground: steps, and on a hang capture, diagnosis, the unwedge experiment, a dump; then the outcome.

Order on the first hang of a run, least disturbing first: capture without debugger and dump; write a large count into the stuck
counter and see whether the kernel retires (``unwedge``); replay the step - it hangs again, and that it does is part of the
evidence - for the debugger and the dump; diagnose. On a GPU the experiment has to come first (measured on an H200): a dump ends
the context, and after a debugger was attached the process's own side stream writes nothing any more and no dump can be had of
it, so that one is taken of a second child. Later trials that hang at the same step are released and counted; one that hangs
elsewhere is captured in full too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..clock import SYSTEM, Clock, Deadline
from ..errors import ReproError, RunStoreError
from ..forensics.device_state import DeviceState, Unread
from ..forensics.records import Diagnosis, Evidence
from ..kernels.abi import RELEASE_COUNT
from ..scenarios.drain_steps import DecodeStep
from .captured import all_unread, counter_of_row_states, keep_captures, merge_states, only_counter, standing_counter
from .ground import (
    Bounded,
    CaptureOutcome,
    Ground,
    GroundRequest,
    JudgesItself,
    ReadsRowStates,
    StepOutcome,
    UnwedgeOutcome,
)
from .run_findings import Findings, RunResult
from .runstore import RunStore
from .verdicts import (
    clean_diagnosis,
    completed,
    failed_diagnosis,
    livelock,
    stopped_diagnosis,
    stuck_counter,
    unreadable_hang,
    window_of,
)

__all__ = ["Diagnose", "RunSettings", "Watcher", "run_workload"]

#: Different hangs of one run that are captured in full; further ones are counted.
_FULL_CAPTURES = 3


class Diagnose(Protocol):
    """``forensics.diagnose.diagnose_state`` with the step's facts bound: from a device state to a diagnosis."""

    def __call__(
        self, state: DeviceState, *, step: DecodeStep, evidence: Sequence[Evidence], unwedge: UnwedgeOutcome | None
    ) -> Diagnosis: ...


class Watcher(Protocol):
    """Who watches: told what is going on, never asked."""

    def step(self, trial: int, step: DecodeStep) -> None: ...

    def waiting(self, what: str) -> None: ...


@dataclass(frozen=True, slots=True)
class RunSettings:
    """``window``: indices of the steps that can wedge an unfixed build; ``why_no_window``: why there is none, where that is known.

    ``dump_ends_context``: a dump costs the ground its context (a GPU), so it comes last. ``timeout_s``: of the whole run.
    """

    trials: int = 1
    allow_dump: bool = True
    unwedge: bool = True
    timeout_s: float | None = None
    window: frozenset[int] = frozenset()
    why_no_window: str = ""
    dump_ends_context: bool = True


@dataclass(slots=True)
class _Run:
    """One run in progress."""

    request: GroundRequest
    make: Callable[[], Ground]
    store: RunStore
    settings: RunSettings
    diagnose: Diagnose
    clock: Clock
    watch: Watcher
    found: Findings = field(default_factory=Findings)
    ground: Ground | None = None
    captured_steps: set[int] = field(default_factory=set)
    hanging: tuple[Ground, DecodeStep, StepOutcome] | None = None

    # -- the ground's life ---------------------------------------------------------------------------------------------------------

    def open(self) -> Ground:
        if self.ground is None:
            ground = self.make()
            self.watch.waiting(f"setting up the {ground.name} ground")
            self.store.emit("open", ground=ground.name)
            self.ground = ground  # before open: a half-opened ground is closed too
            self.found.ready = ground.open(self.request, self.store.emit)
            self.store.emit("ready", description=self.found.ready.description, environment=dict(self.found.ready.environment))
        return self.ground

    def close(self) -> None:
        ground, self.ground = self.ground, None
        if ground is None:
            return
        try:
            self.watch.waiting("ending the workload")
        finally:  # also where nobody can be told: a terminal or a pipe that is gone
            closed = self.found.closed = ground.close()
            self.store.emit("close", how=closed.how, device_idle=closed.device_idle, detail=closed.detail)

    # -- one trial -----------------------------------------------------------------------------------------------------------------

    def trial(self, number: int, deadline: Deadline) -> None:
        ground = self.open()
        if isinstance(ground, Bounded):
            ground.bound(deadline)
        reached: DecodeStep | None = None
        for step in self.request.steps:
            if deadline.expired:
                self.found.tally.unfinished += 1
                self.store.emit("deadline", trial=number, step=step.index)
                return
            self.watch.step(number, step)
            outcome = ground.run_step(step)
            self._log_step(number, step, outcome)
            if outcome.state == "hung":
                self._hung(ground, step, outcome)
                return
            if outcome.state != "done":
                self._failed(ground, step, outcome, reached=reached is not None or step.index in self.settings.window)
                return
            if step.index in self.settings.window and reached is None:
                reached = step
        if isinstance(ground, JudgesItself):
            diagnosis, learnt = ground.judge_clean()
            self.found.tally.clean += learnt
            self.found.tally.no_window += not learnt
            self.found.clean = self.found.clean or diagnosis
            return
        if reached is None:
            self.found.tally.no_window += 1
        else:
            self.found.tally.clean += 1
        if self.found.clean is None:
            self.found.clean = clean_diagnosis(
                ground.name,
                reached=reached is not None,
                window=reached,
                steps=len(self.request.steps),
                why_not=self.settings.why_no_window,
            )

    def _log_step(self, trial: int, step: DecodeStep, outcome: StepOutcome) -> None:
        self.store.emit(
            "hung" if outcome.state == "hung" else "step",
            trial=trial,
            step=step.index,
            live=step.live_requests,
            rows=step.rows,
            graph_rows=step.graph_rows,
            state=outcome.state,
            ms=round(outcome.milliseconds, 3),
            layer=outcome.layer,
            reasons=list(outcome.reasons),
            detail=dict(outcome.detail),
        )

    def _failed(self, ground: Ground, step: DecodeStep, outcome: StepOutcome, *, reached: bool) -> None:
        if isinstance(ground, JudgesItself):
            captures = self._capture(ground, self.found.tally.next_stop, allow_dump=False, attach=False)
            diagnosis = ground.judge(captures, step, outcome, evidence=self.evidence())
            if outcome.state == "unfinished":
                self.found.tally.unfinished += 1
                self.found.stopped = self.found.stopped or diagnosis
            else:
                self.found.tally.other += 1
                self.found.other = self.found.other or diagnosis
            self.close()
            return
        if outcome.state in ("fault", "unfinished") and not self.settings.dump_ends_context:
            # The context is still there: where everybody stood is worth a file.
            self._capture(ground, self.found.tally.next_stop, allow_dump=False, attach=False)
        if outcome.state == "unfinished":
            self.found.tally.unfinished += 1
            if self.found.stopped is None:
                self.found.stopped = stopped_diagnosis(ground.name, outcome, step, reached=reached)
            self.close()
            return
        self.found.tally.other += 1
        if self.found.other is None:
            self.found.other = failed_diagnosis(ground.name, outcome, step, reached=reached)
        if outcome.state != "wrong":
            self.close()  # the process or the context is gone; the next trial gets a new one

    # -- a hang --------------------------------------------------------------------------------------------------------------------

    def _hung(self, ground: Ground, step: DecodeStep, outcome: StepOutcome) -> None:
        self.found.tally.hang += 1
        self.hanging = (ground, step, outcome)
        if step.index in self.captured_steps or len(self.captured_steps) >= _FULL_CAPTURES:
            self._release(ground, step)
            return
        first = not self.captured_steps
        self.captured_steps.add(step.index)
        started = self.clock.monotonic()
        name = f"hang-{len(self.captured_steps)}"
        # A GPU context does not survive a dump, and after a debugger its own process can write nothing: the experiment comes first.
        wait = self.settings.unwedge and self.settings.dump_ends_context
        captures = self._capture(ground, name, allow_dump=self.settings.allow_dump and not wait, attach=not wait)
        diagnosis = None if wait else self._judge(ground, step, outcome, captures, None)
        address = stuck_counter(diagnosis) if diagnosis is not None else None
        launch = self.request.launches.get(step.graph_rows)
        if address is None and launch is not None:
            address = counter_of_row_states(captures, launch.ctas_per_group)
        experiment = None
        if self.settings.unwedge:
            experiment = self._experiment(ground, address)
            if wait:
                captures = self._rest_after(ground, name, step, experiment, captures)
        diagnosis = self._judge(ground, step, outcome, captures, experiment)
        if first:
            self.found.timing = {
                # A server's step is a live count and begins before the launch that hangs: its last movement is nearer.
                "launch_to_hung_s": round(float(outcome.detail.get("stood_still_s", outcome.milliseconds / 1e3)), 4),
                "hung_to_diagnosis_s": round(self.clock.monotonic() - started, 4),
            }
        if self.found.hang is None:
            self.found.hang, self.found.unwedge = diagnosis, experiment
        self.hanging = None
        self.store.emit("verdict", **{"class": diagnosis.verdict.class_, "cause": diagnosis.verdict.cause, "step": step.index})
        if self.settings.dump_ends_context or experiment is None or not experiment.retired:
            self.close()

    def _capture(self, ground: Ground, folder: str, *, allow_dump: bool, attach: bool) -> list[CaptureOutcome]:
        what = ["row states", "host stacks", *(["the debugger"] if attach else []), *(["a core dump"] if allow_dump else [])]
        self.watch.waiting("capturing: " + ", ".join(what))
        place = self.store.evidence_subfolder(folder)
        captures = list(ground.capture(place, self.store.emit, allow_dump=allow_dump, attach=attach))
        keep_captures(self.store, place, captures)
        return captures

    def _judge(
        self,
        ground: Ground,
        step: DecodeStep,
        outcome: StepOutcome,
        captures: Sequence[CaptureOutcome],
        experiment: UnwedgeOutcome | None,
    ) -> Diagnosis:
        self.watch.waiting("reading the waiting instruction out of what was captured")
        if isinstance(ground, JudgesItself):
            return ground.judge(captures, step, outcome, evidence=self.evidence())
        state = merge_states(captures)
        unread = all_unread(captures)
        if state is None or not state.grids:  # words of memory alone show no kernel
            diagnosis = unreadable_hang(ground.name, outcome, step, unread)
        else:
            diagnosis = self.diagnose(state, step=step, evidence=self.evidence(), unwedge=experiment)
        if outcome.detail.get("kind") == "livelock":
            diagnosis = livelock(diagnosis, outcome)
        return completed(diagnosis, window=window_of(step, reached=True), unread=unread)

    def _experiment(self, ground: Ground, address: int | None) -> UnwedgeOutcome:
        if address is None:
            experiment = UnwedgeOutcome(attempted=False, retired=False, why_not="the stuck counter's address is not known")
        else:
            self.watch.waiting(f"writing {RELEASE_COUNT:#x} into the counter at {address:#x}")
            experiment = ground.unwedge(address, RELEASE_COUNT)
        self.store.emit(
            "unwedge",
            attempted=experiment.attempted,
            retired=experiment.retired,
            ms=experiment.milliseconds,
            address=f"{address:#x}" if address is not None else None,
            why_not=experiment.why_not,
            detail=dict(experiment.detail),
        )
        return experiment

    def _rest_after(
        self, ground: Ground, name: str, step: DecodeStep, experiment: UnwedgeOutcome, captures: list[CaptureOutcome]
    ) -> list[CaptureOutcome]:
        """The debugger and the dump, which had to wait for the experiment. A released step is replayed first: it hangs again."""
        if experiment.retired:
            again = ground.run_step(step)
            self._log_step(0, step, again)
            if again.state != "hung":
                self.store.emit("capture", collector="debugger, dump", seconds=0.0, why_not=f"the replayed step is {again.state}")
                return captures
        more = self._capture(ground, f"{name}-again", allow_dump=self.settings.allow_dump, attach=True)
        return [*captures, *more]

    def _release(self, ground: Ground, step: DecodeStep) -> None:
        """A hang like one that was captured: note its counters, release it and go on, or end the workload."""
        address = None
        if isinstance(ground, ReadsRowStates):
            seen = dict(ground.row_states())
            self.store.emit("row states", **seen)
            launch = self.request.launches.get(step.graph_rows)
            address = standing_counter(seen, launch.ctas_per_group) if launch is not None else None
            address = only_counter(seen) if address is None else address
        if self.settings.unwedge and self._experiment(ground, address).retired:
            return
        self.close()

    def hung_without_evidence(self, error: RunStoreError) -> Diagnosis | None:
        """A hang whose evidence could not be written (a full disk): that it hung is known, and is worth more than its files."""
        if self.hanging is None or self.found.hang is not None:
            return self.found.hang
        ground, step, outcome = self.hanging
        gap = Unread("evidence", str(error)[:500], error.help_text)
        if isinstance(ground, JudgesItself):
            diagnosis = ground.judge((), step, outcome, evidence=())
        else:
            diagnosis = unreadable_hang(ground.name, outcome, step, (gap,))
        return completed(diagnosis, unread=(gap,))

    # -- the end -------------------------------------------------------------------------------------------------------------------

    def evidence(self) -> tuple[Evidence, ...]:
        return tuple(
            Evidence(id=entry.id, kind=entry.kind, path=entry.path, sha256=entry.sha256, origin=entry.origin, when=entry.when)
            for entry in self.store.evidence
        )

    def result(self) -> RunResult:
        return self.found.result(self.request.options.get("ground", "gpu"), self.settings.trials, self.evidence())


def run_workload(
    request: GroundRequest,
    make: Callable[[], Ground],
    store: RunStore,
    settings: RunSettings,
    *,
    diagnose: Diagnose,
    watch: Watcher,
    clock: Clock = SYSTEM,
) -> RunResult:
    """Run the trials of one workload; ``request.options["ground"]`` names the ground for a run that never opened one.

    Errors of the ground (no device, a refusal) pass through after the workload is closed, unless an earlier trial found a hang or
    another failure: that stays the answer, and the trials that are missing are named. Ctrl-C passes too: what was seen is on disk.
    """
    run = _Run(request=request, make=make, store=store, settings=settings, diagnose=diagnose, clock=clock, watch=watch)
    deadline = Deadline(settings.timeout_s if settings.timeout_s is not None else float("inf"), clock)
    store.emit("start", trials=settings.trials, window=sorted(settings.window))
    number = 0
    try:
        for number in range(1, settings.trials + 1):
            if deadline.expired:
                run.found.tally.unfinished += settings.trials - number + 1
                break
            run.trial(number, deadline)
    except BaseException as error:
        found = run.hung_without_evidence(error) if isinstance(error, RunStoreError) else None
        _close_after(run, error)
        if found is not None:
            run.found.hang = found
        elif isinstance(error, ReproError) and number > 1 and (run.found.hang or run.found.other) is not None:
            # What earlier trials found is an answer; that no further one could be had is part of it.
            run.found.tally.unfinished += settings.trials - number + 1
            left = f"trial {number}" if number == settings.trials else f"trials {number} to {settings.trials}"
            run.found.cut_short = (Unread(left, f"{type(error).__name__}: {error}"[:1000], error.help_text),)
        else:
            raise
        return run.result()
    run.close()
    result = run.result()
    store.emit("end", outcome=result.outcome)
    return result


def _close_after(run: _Run, error: BaseException) -> None:
    """Close the ground while an error is on its way; a second failure is noted, the first one stays the answer."""
    try:
        run.close()
    except ReproError as second:
        error.add_note(f"closing the workload failed too: {second}")
    finally:
        try:
            run.store.emit("end", error=type(error).__name__, message=str(error)[:2000])
        except RunStoreError as second:
            error.add_note(str(second))
