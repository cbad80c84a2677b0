"""One cell on one ground, trial after trial: run the steps around the danger window; on a hang identify, release, prove healthy.

The order on a hang follows the run loop: the row states are read without disturbing anything. The first hang of its kind is
identified from the machine's state - on the CPU at once, on a GPU after the release, by replaying the step for the debugger, since
that ends the context. Then the counter is written; only if the kernel retires **and** a healthy step is right afterwards is the
workload used on. Otherwise it is ended, and the device is shown idle (``hygiene``).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ...clock import SYSTEM, Clock, Deadline
from ...errors import OurFaultError, ReproError, UsageError
from ...kernels.abi import RELEASE_COUNT
from ...kernels.plan import DeviceDescription, device_for_sm, device_named, vector_width
from ...kernels.producer import Producer
from ...scenarios.drain_steps import DecodeStep
from ..captured import merge_states, standing_counter, standing_counters
from ..drain_flags import DEFAULT_ARCH
from ..drain_job import bound_diagnose
from ..gpu_trials import around_the_window
from ..ground import Ground, StepOutcome
from ..grounds import make_ground
from ..kernel_choice import ChosenKernel, choose_kernel
from ..prepare import PreparedRun, prepare_drain
from .cells import Cell, TrialKind, TrialResult
from .hygiene import show_idle

__all__ = ["TRIAL_FLOOR_S", "TrialSession", "device_of", "harmless", "steps_to_run", "trial_ground", "window_keys"]

#: On a GPU a step of a trial is first taken for hung after 50 x the median healthy step and at least so long, seconds (``run``
#: waits 0.25 s). That alone is not believed: the arrival counters must stand in the middle of a barrier, twice the same; else the
#: step gets its whole time-out to end by itself, and one that does is told as slow ("other"), never as a hang.
TRIAL_FLOOR_S = 0.008
_BETWEEN_LOOKS_S = 0.002
_LOOK_EVERY_S = 0.1

Emit = Callable[..., None]


def trial_ground(name: str) -> Ground:
    """A new ground whose watchdog is as quick as many trials need."""
    if name != "gpu":
        return make_ground(name)
    from ..watchdog import Limits

    return make_ground(name, limits=Limits(floor_s=TRIAL_FLOOR_S))


def device_of(cell: Cell) -> tuple[DeviceDescription, int]:
    """(description, CUDA ordinal). On the CPU a card of the table stands for the architecture."""
    if cell.ground == "cpu":
        device = device_named(cell.device) if cell.device else device_for_sm(cell.arch or DEFAULT_ARCH)
        return device, 0
    from ..device_probe import describe_gpu

    number = cell.device or "0"
    if not number.isdecimal():
        raise UsageError(f"device {number[:40]}: a GPU number is expected on the {cell.ground} ground", help_text="nvidia-smi -L")
    return describe_gpu(int(number)), int(number)


def steps_to_run(steps: Sequence[DecodeStep], window: frozenset[int]) -> tuple[DecodeStep, ...]:
    """One danger step of each shape with its neighbours; where there is no danger, the steps around the end of the drain."""
    if not window:
        return around_the_window(steps)
    kept: set[int] = set()
    seen: set[tuple[int, int]] = set()
    for place, step in enumerate(steps):
        shape = (step.live_requests, step.graph_rows)
        if step.index in window and shape not in seen:
            seen.add(shape)
            kept |= {place - 1, place, place + 1}
    return tuple(steps[place] for place in sorted(kept) if 0 <= place < len(steps))


def window_keys(cell: Cell, prepared: PreparedRun, window: frozenset[int]) -> dict[int, str]:
    """Step index -> what the danger window at it is: kernel, architecture, shape of the batch, CTAs of a group."""
    found = {}
    for step in prepared.request.steps:
        if step.index in window:
            launch = prepared.request.launches[step.graph_rows]
            found[step.index] = (
                f"{cell.kernel} sm_{prepared.device.sm} live {step.live_requests} rows {step.graph_rows} next_n {step.next_n} "
                f"ctas {launch.ctas_per_group} k {launch.top_k} width {launch.stride}"
            )
    return found


def harmless(step: DecodeStep, width: int) -> DecodeStep:
    """The same batch in the same graph with every length inside its row: what must be right after a release."""
    return replace(step, lengths=tuple(min(max(length, 0), width) for length in step.lengths), danger=False)


def _arrivals(states: Mapping[str, Any]) -> list[Any]:
    return list(states.get("arrivals") or [group.get("arrival") for group in states.get("groups", ())])


class TrialSession:
    """``coarse``: hangs are matched by kernel and counters alone, whatever the launch: for candidates whose smallest is diagnosed
    again in the end. ``identities``: fingerprints that were diagnosed before -> (identity, class, cause, signature); shared between
    sessions of one campaign. ``make``: a new ground. ``keep``: folder for the evidence of hangs that are diagnosed; None: a
    temporary one.
    """

    def __init__(
        self,
        cell: Cell,
        *,
        make: Callable[[str], Ground] = trial_ground,
        emit: Emit = lambda *_args, **_fields: None,
        identities: dict[str, tuple[str | None, str, str | None, str | None]] | None = None,
        keep: Path | None = None,
        identify: bool = True,
        coarse: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        self.cell = cell
        self._coarse = coarse
        self._make, self._emit, self._clock = make, emit, clock
        self._identities = {} if identities is None else identities
        self._keep, self._identify = keep, identify
        self._device: tuple[DeviceDescription, int] | None = None
        self._chosen: ChosenKernel | None = None
        self._ground: Ground | None = None
        self._opened: dict[int, Any] = {}
        self._prepared: PreparedRun | None = None
        self.device_idle: bool | None = None
        self.opened = 0

    def rebind(self, cell: Cell) -> None:
        """Go on with another cell of the same ground, kernel and device, in one process where the ground can. OurFaultError."""
        same = all(getattr(cell, name) == getattr(self.cell, name) for name in ("ground", "kernel", "device", "arch", "share"))
        if not same:
            raise OurFaultError("a session goes on with another cell of its own ground, kernel and device only")
        self.cell = cell
        self._chosen = None  # another width can take another instance

    # -- preparing ---------------------------------------------------------------------------------------------------------------

    def prepare(self, seed: int) -> PreparedRun:
        """What a trial with this seed would run; nothing is started, a kernel may be compiled or fetched."""
        plan = self.cell.drain(seed)
        if self._device is None:
            self._device = device_of(self.cell)
        device, ordinal = self._device
        if self._chosen is None:
            self._chosen = choose_kernel(self.cell.kernel, device.sm, plan.top_k, vector_width(plan.width))
        dump = self._identify and self.cell.ground == "gpu"
        options: dict[str, Any] = {"via": "driver", "share": self.cell.share, "dump": dump}
        if self.cell.ground == "cpu":
            options |= {"device_name": f"{device.name}, interpreted", "schedule": self.cell.schedule}
            options |= {name: value for name in ("sms", "slots_per_sm") if (value := getattr(self.cell, name)) is not None}
        return prepare_drain(
            plan, self.cell.ground, self._chosen, device,
            producer=cast("Producer", self.cell.producer), ordinal=ordinal, options=options,
        )  # fmt: skip

    def _ready(self, prepared: PreparedRun) -> Ground:
        """The open ground; a new one if this trial needs a captured size that it has not, or another random schedule."""
        needed = prepared.request.launches
        stale = any(self._opened.get(rows) != launch for rows, launch in needed.items()) or (
            self.cell.ground == "cpu" and self.cell.schedule != "smallest-pc"
        )
        if self._ground is not None and stale:
            again = getattr(self._ground, "prepare_again", None)
            if again is not None:
                again(prepared.request)
                self._opened = dict(needed)
            else:
                self.close()
        if self._ground is None:
            ground = self._make(self.cell.ground)
            self._ground = ground
            ground.open(prepared.request, self._emit)
            self.opened += 1
            self._opened = dict(needed)
        return self._ground

    # -- one trial ---------------------------------------------------------------------------------------------------------------

    def trial(self, seed: int) -> TrialResult:
        """One trial. What the ground cannot do becomes ``other`` with the reason; all else (UsageError, Ctrl-C) passes through,
        after the workload is closed."""
        began = self._clock.monotonic()
        try:
            prepared = self.prepare(seed)
            self._prepared = prepared
            ground = self._ready(prepared)
            result = self._run(ground, prepared, seed, began)
        except UsageError:
            self.close()
            raise
        except ReproError as error:
            self.close()
            result = TrialResult("other", seed, why=f"{type(error).__name__}: {error}"[:1000])
        except BaseException:
            self.close()
            raise
        return self._timed(result, began)

    def _timed(self, result: TrialResult, began: float) -> TrialResult:
        return replace(result, seconds=self._clock.monotonic() - began, device_idle=self.device_idle)

    def _run(self, ground: Ground, prepared: PreparedRun, seed: int, began: float) -> TrialResult:
        steps = steps_to_run(prepared.request.steps, prepared.window)
        keys = window_keys(self.cell, prepared, prepared.window)
        reached: list[str] = []
        for step in steps:
            outcome = ground.run_step(step)
            if step.index in prepared.window:
                reached.append(keys[step.index])
            if outcome.state == "hung":
                hit = tuple(dict.fromkeys(reached))
                return self._hung(ground, prepared, step, outcome, seed, hit, self._clock.monotonic() - began)
            if outcome.state != "done":
                why = f"step {step.index} {outcome.state}: {'; '.join(outcome.reasons)}"[:1000]
                if outcome.state != "wrong":
                    self.close()
                kind: TrialKind = "wrong" if outcome.state == "wrong" else "other"
                return TrialResult(kind, seed, bool(reached), hung_step=step.index, windows=tuple(dict.fromkeys(reached)), why=why)
        if not reached:
            return TrialResult("no window", seed, why=prepared.why_no_window)
        return TrialResult("clean", seed, True, windows=tuple(dict.fromkeys(reached)))

    # -- a hang ------------------------------------------------------------------------------------------------------------------

    def _hung(
        self, ground: Ground, prepared: PreparedRun, step: DecodeStep, outcome: StepOutcome, seed: int,
        windows: tuple[str, ...], to_hang: float,
    ) -> TrialResult:  # fmt: skip
        launch = prepared.request.launches[step.graph_rows]
        states, ended = self._settled(ground, launch.ctas_per_group, prepared.request.step_timeout_s)
        if ended:
            self.close()
            why = f"step {step.index} was slow: not over after {1e3 * to_hang:.0f} ms of the trial, and then it ended by itself"
            return TrialResult("other", seed, True, hung_step=step.index, windows=windows, why=why)
        print_ = self._fingerprint(prepared, step, outcome, states)
        known, how = self._identities.get(print_), "matched"
        if known is None and self._identify and self.cell.ground == "cpu":
            known, how = self._diagnosed(ground, prepared, step), "diagnosed"
        reused = self._release(ground, standing_counter(states, launch.ctas_per_group), harmless(step, launch.stride))
        if known is None and self._identify and self.cell.ground != "cpu":
            known, how = self._replayed(prepared, step, reused=reused), "diagnosed"
            reused = False
        if known is not None:
            self._identities[print_] = known
        identity, class_, cause, signature = known if known is not None else (None, "", None, None)
        return TrialResult(
            "hang", seed, True, identity=identity, class_=class_, cause=cause, signature=signature,
            identified=how if known is not None else "", hung_step=step.index, to_hang_s=to_hang, reused=reused, windows=windows,
            why="; ".join(outcome.reasons)[:1000],
        )  # fmt: skip

    def _settled(self, ground: Ground, ctas_per_group: int, timeout_s: float) -> tuple[Mapping[str, Any], bool]:
        """(the row states, whether the step ended meanwhile). On the CPU a hang is proved and one look is enough."""
        states = self._row_states(ground)
        if self.cell.ground != "gpu":
            return states, False
        self._clock.sleep(_BETWEEN_LOOKS_S)
        again = self._row_states(ground)
        if standing_counter(states, ctas_per_group) is None or _arrivals(states) != _arrivals(again):
            deadline = Deadline(timeout_s, self._clock)
            while getattr(ground, "step_is_pending", True) and not deadline.expired:
                self._clock.sleep(_LOOK_EVERY_S)
                again = self._row_states(ground)
        return again, not getattr(ground, "step_is_pending", True)

    @staticmethod
    def _row_states(ground: Ground) -> Mapping[str, Any]:
        reader = getattr(ground, "row_states", None)
        if reader is None:
            return {}
        try:
            return cast("Mapping[str, Any]", reader())
        except ReproError:
            return {}  # then nothing is released: the workload is ended instead

    def _fingerprint(self, prepared: PreparedRun, step: DecodeStep, outcome: StepOutcome, states: Mapping[str, Any]) -> str:
        arrivals = _arrivals(states)
        launch = prepared.request.launches[step.graph_rows]
        if self._coarse:
            standing = sorted({count for _, count in standing_counters(states, launch.ctas_per_group)})
            return f"{prepared.chosen.image.cubin_sha256[:16]} standing {standing} peers leave {launch.peers_leave}"
        signs = "".join("-" if length < 0 else "+" if length > 32768 else "0" for length in step.lengths)
        kernel = prepared.chosen.image.cubin_sha256[:16]
        return f"{kernel} {outcome.layer} {launch.lines()[0]} {signs} {arrivals}"

    def _diagnosed(self, ground: Ground, prepared: PreparedRun, step: DecodeStep) -> tuple[str | None, str, str | None, str | None]:
        with tempfile.TemporaryDirectory(prefix="dsv4-campaign-") as name:
            folder = self._keep or Path(name)
            captures = ground.capture(folder, self._emit, allow_dump=self.cell.ground != "cpu", attach=True)
            state = merge_states(captures)
            if state is None:
                return None, "gpu-kernel-stuck", None, None
            diagnose = bound_diagnose(self.cell.ground, prepared.request.plan, prepared)
            verdict = diagnose(state, step=step, evidence=(), unwedge=None).verdict
        return verdict.identity, verdict.class_, verdict.cause, verdict.signature

    def _replayed(
        self, prepared: PreparedRun, step: DecodeStep, *, reused: bool
    ) -> tuple[str | None, str, str | None, str | None] | None:
        """The released step once more - it hangs again - for the debugger and the dump, which cost the context."""
        if not reused or self._ground is None:
            return None
        try:
            if self._ground.run_step(step).state != "hung":
                return None
            return self._diagnosed(self._ground, prepared, step)
        finally:
            self.close()

    def _release(self, ground: Ground, address: int | None, healthy: DecodeStep) -> bool:
        """Whether the workload was released, was right afterwards, and may be used on; else it is ended."""
        if address is not None:
            experiment = ground.unwedge(address, RELEASE_COUNT)
            if experiment.retired and ground.run_step(healthy).state == "done":
                return True
            self._emit("not reused", why=experiment.why_not or "the healthy step afterwards was not right")
        self.close()
        return False

    # -- the end -----------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workload and see that the device is idle; may be called any number of times."""
        ground, self._ground = self._ground, None
        self._opened = {}
        if ground is None:
            return
        closed = ground.close()
        self.device_idle = closed.device_idle
        self._emit("close", how=closed.how, device_idle=closed.device_idle, detail=closed.detail)
        if self.cell.ground == "gpu" and closed.device_idle is False:
            self.device_idle = show_idle(self._device[1] if self._device else 0, self._emit)
