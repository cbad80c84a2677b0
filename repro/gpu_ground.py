"""The GPU ground: the workload in a spawned child on one card, the watchdog in this process; capture is ``gpu_capture``.

Order of opening: the child starts the driver and describes the card (no context yet); this process looks who holds it and refuses
if somebody does; only then the child makes its context, captures the graphs and replays each once with harmless lengths.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..clock import SYSTEM, Clock
from ..errors import DeadlineError, InconclusiveError, ReproError
from ..forensics.collect.core_trigger import DumpSettings
from ..forensics.collect.cuda_gdb import find_cuda_gdb
from ..forensics.collect.nvml import Nvml
from ..forensics.device_state import Unread
from ..kernels.device_records import launch_document
from ..scenarios.drain_steps import DecodeStep
from .child import Child, ChildGoneError, raise_from
from .child_answers import described, ended_step, released
from .gpu_capture import DebuggerProbe, GpuCapture
from .gpu_card import GpuCard
from .ground import CaptureOutcome, CloseOutcome, Emit, GroundRequest, Ready, StepOutcome, UnwedgeOutcome
from .watchdog import Limits, Sample, Watchdog

__all__ = ["CHILD_MODULES", "GpuGround"]

#: ``--via`` to the module of the child process.
CHILD_MODULES = {"driver": "dsv4_repro.kernels.device_child", "op": "dsv4_repro.kernels.op_child"}
_HELLO_S = 60.0
_PREPARE_S = 120.0
#: The watchdog looks from so long after a launch: healthy steps are over by then, seconds.
_LOOK_AFTER_S = 0.004


class GpuGround:
    """One workload on one card. ``open`` must be called from the main thread (the child dies with the thread that spawned it).

    For tests: ``child_command`` replaces ``python -m MODULE``; ``nvml`` makes the NVML binding; ``debugger`` finds cuda-gdb.
    """

    name: Literal["server", "gpu", "cpu"] = "gpu"

    def __init__(
        self,
        *,
        clock: Clock = SYSTEM,
        child_command: Sequence[str] | None = None,
        nvml: Callable[[], Nvml] = Nvml,
        debugger: Callable[[], Path] = find_cuda_gdb,
        limits: Limits | None = None,
    ) -> None:
        self._clock = clock
        self._child_command = child_command
        self._make_nvml = nvml
        self._find_debugger = debugger
        self._limits = limits
        self._child: Child | None = None
        self._card = GpuCard(nvml, clock)
        self._work: Path | None = None
        self._dump: DumpSettings | None = None
        self._capture: GpuCapture | None = None
        self._hung_step: DecodeStep | None = None

    # -- set-up --------------------------------------------------------------------------------------------------------------

    def open(self, request: GroundRequest, emit: Emit) -> Ready:
        """Spawn, look who holds the card, capture the graphs.

        Raises RefusedError (the card holds somebody's compute process and ``share`` is not set), NoDriverError, NoDeviceError,
        KernelNotFoundError, PlanError, DeadlineError, and what else the child reports.
        """
        self._request = request
        self._emit = emit
        self._layers = request.plan.layers_on("gpu")
        options = request.options
        self._work = Path(tempfile.mkdtemp(prefix="dsv4-gpu-"))
        probe = DebuggerProbe(self._find_debugger, self._clock)
        probe.start(self._work)
        environment: dict[str, str] = {}
        if options.get("dump", True):
            self._dump = DumpSettings.in_folder(self._work)
            environment = self._dump.environment()
        since = time.clock_gettime(time.CLOCK_BOOTTIME)
        child = Child.spawn(
            str(options.get("child_module") or CHILD_MODULES[str(options.get("via", "driver"))]),
            [str(request.device)],
            self._work,
            environment=environment,
            command=self._child_command,
            clock=self._clock,
        )
        self._child = child
        child.on_message = self._heard
        hello = child.await_message("hello", _HELLO_S)
        device = dict(hello["device"])
        emit(
            "gpu",
            state="driver started",
            pid=child.pid,
            device=device["name"],
            sm=device["sm"],
            driver_cuda=device["driver_version"],
        )
        identity = self._card.look(str(device["uuid"]), child.pid, share=bool(options.get("share", False)))
        if device.get("attributes", {}).get("kernel_timeout"):
            self._card.unread.append(
                Unread("cuda-gdb", "the device has a run-time limit on kernels (a display)", "Use a card without a display.")
            )
        facts = self._prepare(request)
        self._watchdog = Watchdog(self._limits or Limits(ceiling_s=request.step_timeout_s), sm_count=device.get("sm_count") or None)
        for size in facts.get("sizes", ()):
            self._watchdog.healthy_step(float(size["warmup"]["ms"]))
        self._card.start_sampling()
        self._capture = GpuCapture(
            request,
            child,
            self._card.device,
            probe,
            self._dump,
            since,
            self._launchable,
            gpm=lambda: self._card.latest_gpm,
            second_child=None if options.get("second_child") else self._dump_of_another_child,
            clock=self._clock,
        )
        environment_facts = {
            "device": device,
            "nvml": identity,
            "python": hello.get("python"),
            "cuda_bindings": hello.get("bindings"),
            "kernel": {"origin": request.kernel.origin, "function": request.kernel.function, "sha256": request.kernel.cubin_sha256},
            "via": options.get("via", "driver"),
            "layers": self._layers,
            "graphs": facts,
            "before": self._card.before.line() if self._card.before else None,
            "unread": [dataclasses.asdict(item) for item in self._card.unread],
        }
        return Ready(described(device, facts, self._layers, request.kernel.origin), environment_facts)

    def _heard(self, message: dict[str, Any]) -> None:
        if message.get("type") == "note":
            self._emit("gpu", state=str(message.get("text", "")))
        elif message.get("type") == "step":
            # The step ended while something else was going on: the evidence of a hang is over, and that is said.
            self._hung_step = None
            self._emit(
                "gpu", state=f"step {message.get('index')} ended meanwhile: {message.get('state')}", error=message.get("error")
            )

    def _prepare(self, request: GroundRequest) -> dict[str, Any]:
        assert self._work is not None
        assert self._child is not None
        self._launchable = {rows: plan for rows, plan in request.launches.items() if plan.path == "persistent"}
        if not self._launchable:
            return {"sizes": []}
        message: dict[str, Any] = {
            "cmd": "prepare",
            "function": request.kernel.function,
            "top_k": request.kernel.top_k,
            "params_size": request.kernel.params_size,
            "layers": self._layers,
            "seed": request.seed,
            "ordinal": request.device,
            "launches": {str(rows): launch_document(plan) for rows, plan in self._launchable.items()},
            "library": str(request.options.get("library", "")),
            "extra": dict(request.options.get("extra", {})),
        }
        if request.kernel.cubin:
            cubin = self._work / "kernel.cubin"
            cubin.write_bytes(request.kernel.cubin)
            message["cubin"] = str(cubin)
        return self._child.ask(message, "ready", _PREPARE_S)

    def prepare_again(self, request: GroundRequest) -> None:
        """Other launches in the same process and context: captured anew, what was captured before is never freed.

        Only while no step is pending. Errors as of ``open``; after one the ground is to be closed.
        """
        child = self._live_child()
        if self._hung_step is not None:
            raise InconclusiveError("a step is still pending: nothing else can be captured")
        self._request, self._layers = request, request.plan.layers_on("gpu")
        facts = self._prepare(request)
        for size in facts.get("sizes", ()):
            self._watchdog.healthy_step(float(size["warmup"]["ms"]))
        if self._capture is not None:
            self._capture.child = child
            self._capture.at_other_launches(request, self._launchable)

    # -- steps ---------------------------------------------------------------------------------------------------------------

    def run_step(self, step: DecodeStep) -> StepOutcome:
        """Launch one step and watch it. DeadlineError if it neither ends nor can be called hung within the step's time-out."""
        child, plan = self._live_child(), self._request.launches.get(step.graph_rows)
        if plan is None:
            return StepOutcome(step.index, "refused", reasons=(f"no launch was planned for {step.graph_rows} rows",))
        if plan.path == "refused":
            return StepOutcome(step.index, "refused", reasons=(plan.refusal,))
        if plan.path != "persistent":
            why = f"{step.graph_rows} rows go to the {plan.path} kernel: nothing was launched"
            return StepOutcome(step.index, "done", detail={"not_launched": why})
        check = sorted({0, step.index % self._layers, self._layers - 1}) if self._request.options.get("check", True) else []
        began = self._clock.monotonic()
        try:
            child.send(
                {"cmd": "step", "index": step.index, "rows": step.graph_rows, "live_rows": step.rows, "lengths": list(step.lengths),
                 "check": check}
            )  # fmt: skip
            self._watchdog.begin(step.index, self._layers, began)
            return self._watch(child, step, began)
        except ChildGoneError as error:
            self._hung_step = None
            return StepOutcome(step.index, "died", self._ms(began), reasons=(str(error),), detail={"stderr": child.stderr_tail()})

    def _watch(self, child: Child, step: DecodeStep, began: float) -> StepOutcome:
        heard_at: float | None = None
        layers_done: int | None = None
        while True:
            message = child.receive(0.005)
            now = self._clock.monotonic()
            if message is not None:
                kind = message.get("type")
                if kind == "step" and int(message["index"]) == step.index:
                    return self._ended(step, message)
                if kind == "progress":
                    heard_at, layers_done = now, int(message["layers_done"])
                elif kind == "error":
                    raise_from(message)
                else:
                    self._heard(message)
            if now - began < _LOOK_AFTER_S:
                continue
            verdict = self._watchdog.observe(
                Sample(now, heard_at, layers_done, child.state(), self._card.latest, self._card.latest_gpm)
            )
            if verdict.level == "hung":
                self._hung_step = step
                return StepOutcome(
                    step.index,
                    "hung",
                    self._ms(began),
                    verdict.layer,
                    verdict.reasons,
                    {"hang_to_verdict_ms": self._ms(began), "deadline_ms": 1e3 * verdict.deadline_s},
                )
            if now - began > self._request.step_timeout_s + self._watchdog.limits.idle_s:
                said = "; ".join(verdict.reasons) or "layers still finish, slowly"
                raise DeadlineError(f"step {step.index} has not ended after {now - began:.1f} s and is not called hung: {said}")

    def _ended(self, step: DecodeStep, message: Mapping[str, Any]) -> StepOutcome:
        self._hung_step = None
        outcome = ended_step(step.index, message)
        if outcome.state == "fault":
            return dataclasses.replace(outcome, detail={"stderr": self._live_child().stderr_tail()})
        self._watchdog.healthy_step(outcome.milliseconds)
        return outcome

    def _ms(self, began: float) -> float:
        return (self._clock.monotonic() - began) * 1e3

    def _live_child(self) -> Child:
        if self._child is None:
            raise InconclusiveError("the GPU ground is not open")
        return self._child

    # -- capture -------------------------------------------------------------------------------------------------------------

    def capture(self, folder: Path, emit: Emit, *, allow_dump: bool, attach: bool = True) -> Sequence[CaptureOutcome]:
        """Read the hung workload into ``folder``, in the order of ``gpu_capture``."""
        self._live_child()
        if self._capture is None:
            raise InconclusiveError("the GPU ground was opened without success: nothing to read")
        return self._capture.capture(folder, emit, self._hung_step, allow_dump=allow_dump, attach=attach)

    def _another(self, **more: Any) -> GpuGround:
        """A second ground of this kind."""
        return GpuGround(**more)

    def _dump_of_another_child(self, step: DecodeStep, folder: Path) -> list[CaptureOutcome]:
        """This child could not be dumped (a debugger was attached before, say): hang a new one at the same step and dump that."""

        def failed(why: str, remedy: str = "") -> list[CaptureOutcome]:
            return [CaptureOutcome("core_dump", "may end the process", 0.0, unread=(Unread("GPU core dump", why, remedy),))]

        request = self._request
        options = {**request.options, "share": True, "cuda_gdb": False, "second_child": True, "check": False}
        launches = {step.graph_rows: request.launches[step.graph_rows]}
        other = self._another(
            clock=self._clock,
            child_command=self._child_command,
            nvml=self._make_nvml,
            debugger=self._find_debugger,
            limits=self._limits,
        )
        try:
            other.open(dataclasses.replace(request, launches=launches, steps=(step,), options=options), self._emit)
            outcome = other.run_step(step)
            if outcome.state != "hung":
                return failed(f"a second child did not hang at step {step.index}: {outcome.state}")
            facts = {"child": "a second one, hung at the same step"}
            return [
                dataclasses.replace(capture, facts={**capture.facts, **facts})
                for capture in other.capture(folder, self._emit, allow_dump=True)
                if capture.collector == "core_dump"
            ]
        except ReproError as error:
            return failed(f"a second child could not be hung and dumped: {error}", error.help_text)
        finally:
            other.close()

    # -- experiment and end --------------------------------------------------------------------------------------------------

    def unwedge(self, address: int, value: int) -> UnwedgeOutcome:
        """Write ``value`` into the counter at ``address`` on the side stream until the graph retires; see ``device.release``.

        ``milliseconds``: from the first write to the retirement of the launch that hung. Results of the released row are worthless.
        """
        child = self._live_child()
        try:
            limit_s = float(self._request.options.get("unwedge_timeout_s", 10.0))
            command = {"cmd": "release", "address": address, "value": value, "timeout_s": limit_s}
            answer = child.ask(command, "release", limit_s + 10.0)
        except ReproError as error:
            return UnwedgeOutcome(True, False, address=address, value=value, why_not=f"{type(error).__name__}: {error}")
        outcome = released(address, value, answer)
        if outcome.retired:
            self._hung_step = None
        return outcome

    def row_states(self) -> Mapping[str, Any]:
        """The row states as the child's side stream reads them now (message ``row_states``), for trials."""
        return self._live_child().ask({"cmd": "row_states", "again_after_s": 0.0}, "row_states", 5.0)

    @property
    def step_is_pending(self) -> bool:
        """Whether the step that was called hung has still not ended, as far as the child has said."""
        return self._hung_step is not None

    def close(self) -> CloseOutcome:
        """End the child (evidence first: nothing is collected here), then see whether the card is as it was found."""
        left = self._card.stop_sampling()
        child, self._child = self._child, None
        if child is None:
            self._remove_work()
            return CloseOutcome("clean", None, "nothing was started")
        how = child.close()
        survivors = []
        if self._capture is not None:
            survivors = self._capture.end_debuggers()
            self._capture = None
        idle, detail = self._card.left_as_found(child.pid)
        detail = "; ".join([*survivors, *([left] if left else []), detail])
        if how != "survived":
            self._remove_work()
        else:
            detail = f"the child {child.pid} outlived SIGKILL (state {child.state()}); {detail}"
        return CloseOutcome(how, idle, detail)

    def _remove_work(self) -> None:
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
        if self._dump is not None and self._dump.short:
            shutil.rmtree(self._dump.folder, ignore_errors=True)
        self._work = None
