"""The CPU ground: every launch of the drain interpreted, instruction by instruction, from the kernel's own machine code.

Same batches, same frozen launches, same seeded logits as on the GPU ground; the interpreted device has the SMs and slots of the
device that the plan names. A hang is a proof here, not a time-out (``kernels.sass.deadlock``), and its state is written as a GPU
core dump in the driver's format, marked *interpreted*, and read back from that file. Nothing here is measured on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..clock import SYSTEM, Clock, Deadline
from ..errors import BudgetError, InconclusiveError, MachineFaultError, UnknownInstructionError
from ..forensics.collect import write_artefact
from ..forensics.corefile import open_core
from ..forensics.corewriter import CoreOptions, write_core
from ..forensics.device_state import DeviceState, Unread
from ..kernels.abi import ARRIVAL_COUNTER_OFFSET, ROW_STATE_SIZE, THREADS_PER_CTA
from ..kernels.captured_size import ROTATION
from ..kernels.plan import LaunchPlan
from ..kernels.reference import check_rows
from ..kernels.sass.layout import RESERVED_SHARED
from ..kernels.sass.machine import DEFAULT_BUDGET, Machine
from ..kernels.sass.program import Program
from ..kernels.sass.verdict import RunResult
from ..scenarios.drain_steps import DecodeStep
from .ground import Artefact, CaptureOutcome, CloseOutcome, Emit, GroundRequest, Ready, StepOutcome, UnwedgeOutcome
from .interpreted_state import fault_cause, interpreted_state, stop_document

__all__ = ["CpuGround"]

#: Of logits, on the host and in the interpreted device's memory.
_MOST_BYTES = 4 << 30
_INTERPRETED = "nothing was measured on a GPU: the interpreter is sequentially consistent and in order, and has no timing"


@dataclass(slots=True)
class _Size:
    """Device memory and host copies of one captured size. ``pool``: float32 [ROTATION, rows, stride]."""

    plan: LaunchPlan
    lengths: int
    outputs: int
    states: int
    logits: list[int]
    pool: list[npt.NDArray[np.float32]]


@dataclass(slots=True)
class _Hang:
    step: DecodeStep
    size: _Size
    layer: int
    params: bytes
    result: RunResult | None


class CpuGround:
    """One workload on the interpreted device. ``budget``: warp-instructions of one launch."""

    name: Literal["cpu"] = "cpu"

    def __init__(self, *, clock: Clock = SYSTEM, budget: int = DEFAULT_BUDGET) -> None:
        self._clock = clock
        self._budget = budget
        self._sizes: dict[int, _Size] = {}
        self._hang: _Hang | None = None
        self._stopped: _Hang | None = None
        self._machine: Machine | None = None
        self._until = Deadline(float("inf"), clock)
        self._slots: int | None = None

    def bound(self, deadline: Deadline) -> None:
        """When the run has to be over: no launch goes on after that."""
        self._until = deadline

    # -- set-up --------------------------------------------------------------------------------------------------------------

    def open(self, request: GroundRequest, emit: Emit) -> Ready:
        """Decode the kernel and lay out device memory. CubinError, ToolMissingError, DeadlineError, UsageError, BudgetError."""
        self._request = request
        self._layers = request.plan.layers_on("cpu")
        options = request.options
        launches = [plan for plan in request.launches.values() if plan.path == "persistent"]
        needed = sum(2 * ROTATION * 4 * plan.rows * plan.stride for plan in launches)
        if needed > _MOST_BYTES:
            raise BudgetError(
                f"the plan's logits take {needed / 2**30:.1f} GiB on the CPU ground; at most {_MOST_BYTES / 2**30:.0f} are used",
                help_text="A smaller --max-model-len, a larger --compress, or fewer and smaller --capture-sizes",
            )
        program = Program.from_image(request.kernel)
        sms = int(options.get("sms") or (launches[0].num_sms if launches else 1))
        self._slots = int(options["slots_per_sm"]) if options.get("slots_per_sm") else None
        slots = self._slots or max((plan.occupancy for plan in launches), default=1)
        self._machine = Machine(
            program,
            sms=sms,
            slots_per_sm=slots,
            seed=request.seed,
            checks=bool(options.get("checks", False)),
            schedule=str(options.get("schedule", "smallest-pc")),
        )
        self._device = (str(options.get("device_name", f"interpreted sm_{request.kernel.sm}")), request.kernel.sm, sms)
        for rows, plan in sorted(request.launches.items()):
            if plan.path == "persistent":
                self._sizes[rows] = self._lay_out(plan)
        emit("interpreter", function=request.kernel.function, sm=request.kernel.sm, sms=sms, slots_per_sm=slots)
        description = f"interpreting {request.kernel.function} for sm_{request.kernel.sm}: {sms} SMs x {slots} CTA slots"
        environment = {
            "device": self._device[0],
            "sm": request.kernel.sm,
            "sm_count": sms,
            "slots_per_sm": slots,
            "schedule": str(options.get("schedule", "smallest-pc")),
            "memory_checks": bool(options.get("checks", False)),
            "note": _INTERPRETED,
        }
        return Ready(description, environment)

    def _lay_out(self, plan: LaunchPlan) -> _Size:
        memory = self._live().memory
        random = np.random.default_rng([self._request.seed, plan.rows])
        pool = [random.standard_normal((plan.rows, plan.stride), dtype=np.float32) for _ in range(ROTATION)]
        name = f"{plan.rows} rows: "
        return _Size(
            plan=plan,
            lengths=memory.allocate(name + "lengths", 4 * plan.rows),
            outputs=memory.allocate(name + "output", 4 * plan.rows * plan.top_k),
            states=memory.allocate(name + "row states", plan.state_bytes),
            logits=[memory.allocate(f"{name}logits {number}", array) for number, array in enumerate(pool)],
            pool=pool,
        )

    def _live(self) -> Machine:
        if self._machine is None:
            raise InconclusiveError("the CPU ground is not open")
        return self._machine

    # -- steps ---------------------------------------------------------------------------------------------------------------

    def run_step(self, step: DecodeStep) -> StepOutcome:
        """Interpret every layer of one decode step; ``unfinished`` when a launch ends without an answer."""
        size = self._sizes.get(step.graph_rows)
        if size is None:
            plan = self._request.launches.get(step.graph_rows)
            why = "no launch was planned" if plan is None else plan.refusal or f"the {plan.path} kernel takes these rows"
            state: Literal["refused", "done"] = "refused" if plan is not None and plan.path == "refused" else "done"
            return StepOutcome(step.index, state, reasons=(why,), detail={"not_run": why})
        began = self._clock.monotonic()
        self._hang = self._stopped = None
        machine = self._live()
        machine.memory.write(size.lengths, np.array(step.lengths, dtype=np.int32))
        return self._layers_from(step, size, 0, began)

    def _layers_from(self, step: DecodeStep, size: _Size, first: int, began: float) -> StepOutcome:
        wrong: list[dict[str, Any]] = []
        padding: list[dict[str, Any]] = []
        notes: list[str] = []
        warps = 0
        for layer in range(first, self._layers):
            params = self._params(step, size, layer)
            try:
                result = self._launch(size, params)
            except (UnknownInstructionError, MachineFaultError) as error:
                self._stopped = _Hang(step, size, layer, params, None)
                state: Literal["fault", "unfinished"] = "fault" if isinstance(error, MachineFaultError) else "unfinished"
                facts = {"kind": type(error).__name__, "warp_instructions": warps}
                return StepOutcome(step.index, state, self._ms(began), layer, (str(error),), facts)
            warps += result.warp_instructions
            notes += [note for note in result.notes[1:] if note not in notes]
            if result.kind in ("deadlock", "livelock"):
                self._hang = _Hang(step, size, layer, params, result)
                why = (f"{result.kind}, proven: {result.proof}",)
                facts = {"kind": result.kind, "rounds": result.rounds, "warp_instructions": warps, "hang_to_verdict_ms": None}
                return StepOutcome(step.index, "hung", self._ms(began), layer, why, facts)
            if result.kind != "completed":
                self._stopped = _Hang(step, size, layer, params, result)
                return self._stop(step, layer, result, warps, began)
            found = self._check(step, size, layer)
            wrong.extend(item for item in found if item["row"] < step.rows)
            padding.extend(item for item in found if item["row"] >= step.rows)
        detail: dict[str, Any] = {"rows_checked": self._layers * size.plan.rows, "warp_instructions": warps}
        if notes:
            detail["memory_checker"] = notes
        if padding:
            detail["padding_rows_wrong"] = sorted({item["row"] for item in padding})
        if wrong:
            reasons = tuple(f"layer {item['layer']}: {item['why']}" for item in wrong[:20])
            return StepOutcome(
                step.index, "wrong", self._ms(began), int(wrong[0]["layer"]), reasons, {**detail, "wrong": wrong[:200]}
            )
        return StepOutcome(step.index, "done", self._ms(began), detail=detail)

    def _stop(self, step: DecodeStep, layer: int, result: RunResult, warps: int, began: float) -> StepOutcome:
        """A launch that neither completed nor hangs: an illegal access, or no answer within the budget."""
        facts: dict[str, Any] = {"kind": result.kind, "warp_instructions": warps}
        fault = result.fault
        if fault is None:
            why = result.proof
            if self._until.expired:
                why = f"the run's own deadline came first (--timeout {self._until.seconds:g})"
            return StepOutcome(step.index, "unfinished", self._ms(began), layer, (why,), facts)
        facts["fault"] = {
            "kind": fault.kind, "space": fault.space, "address": f"{fault.address:#x}", "bytes": fault.size, "block": fault.block,
            "thread": fault.thread, "pc_offset": fault.offset, "instruction": fault.text,
        }  # fmt: skip
        if fault.kind == "uninitialised":
            facts["kind"] = fault.kind
            return StepOutcome(step.index, "unfinished", self._ms(began), layer, (fault.message,), facts)
        return StepOutcome(step.index, "fault", self._ms(began), layer, (fault.message,), {**facts, "cause": fault_cause(fault)})

    def _params(self, step: DecodeStep, size: _Size, layer: int) -> bytes:
        logits = size.logits[(step.index + layer) % ROTATION]
        return size.plan.params(input=logits, output=size.outputs, lengths=size.lengths, row_states=size.states).pack()

    def _deadline(self) -> Deadline:
        return Deadline(min(self._request.step_timeout_s * 6, self._until.remaining()), self._clock)

    def _launch(self, size: _Size, params: bytes) -> RunResult:
        machine, plan = self._live(), size.plan
        machine.slots_per_sm = self._slots or max(plan.occupancy, 1)
        machine.memory.fill(size.states, plan.state_bytes, 0)  # as vLLM does before each launch from 0.20.2
        machine.memory.fill(size.outputs, 4 * plan.rows * plan.top_k, 0xFE)  # no kernel writes that: an unwritten row is seen
        return machine.launch(plan.grid, THREADS_PER_CTA, params, plan.dynamic_smem, budget=self._budget, deadline=self._deadline())

    def _check(self, step: DecodeStep, size: _Size, layer: int) -> list[dict[str, Any]]:
        plan = size.plan
        chosen = self._live().memory.array(size.outputs, plan.rows * plan.top_k, np.int32).reshape(plan.rows, plan.top_k)
        lengths = np.array(step.lengths, dtype=np.int64)
        longest = max(int(np.clip(lengths, 0, plan.stride).max()), 1)
        logits = size.pool[(step.index + layer) % ROTATION]
        return [
            {"layer": layer, "row": verdict.row, "length": verdict.length, "why": verdict.text}
            for verdict in check_rows(chosen.astype(np.int32, copy=False), logits[:, :longest], lengths, plan.top_k)
            if not verdict.ok
        ]

    def _ms(self, began: float) -> float:
        return (self._clock.monotonic() - began) * 1e3

    # -- capture -------------------------------------------------------------------------------------------------------------

    def capture(self, folder: Path, emit: Emit, *, allow_dump: bool, attach: bool = True) -> Sequence[CaptureOutcome]:
        """The row states and the stuck threads; with ``allow_dump`` the whole state as a core dump, read back from the file."""
        hang = self._hang
        if hang is None and self._stopped is None:
            why = Unread("machine state", "nothing hangs", "")
            return (CaptureOutcome("interpreter", "none", 0.0, unread=(why,)),)
        folder.mkdir(parents=True, exist_ok=True)
        if hang is None or hang.result is None:
            assert self._stopped is not None
            return (self._capture_row_states(folder, self._stopped),)
        outcomes = [self._capture_row_states(folder, hang)]
        began = self._clock.monotonic()
        state = self._state(hang)
        if not allow_dump:
            return (*outcomes, CaptureOutcome("interpreter", "none", self._clock.monotonic() - began, state=state))
        path = folder / f"interpreted-step{hang.step.index}-layer{hang.layer}.nvcudmp"
        states = self._live().memory.read(hang.size.states, hang.size.plan.state_bytes)
        try:
            write_core(path, state, CoreOptions(memory={hang.size.states: states}))
            with open_core(path) as dump:
                state = _with_text(dump.state, state)
        except OSError as error:
            gap = Unread("core dump", f"it could not be written: {error}", "Free some space and run again.")
            outcomes.append(CaptureOutcome("core_dump", "none", self._clock.monotonic() - began, state=state, unread=(gap,)))
            return tuple(outcomes)
        outcomes.append(
            CaptureOutcome(
                "core_dump",
                "none",
                self._clock.monotonic() - began,
                artefacts=(Artefact("gpu-core", path.absolute(), "interpreted"),),
                state=state,
                facts={"bytes": path.stat().st_size, "note": _INTERPRETED},
            )
        )
        return tuple(outcomes)

    def _counters(self, size: _Size) -> dict[int, int]:
        """Arrival counters by device address."""
        raw = self._live().memory.read(size.states, size.plan.state_bytes)
        counters = {}
        for group in range(size.plan.groups):
            place = group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET
            counters[size.states + place] = int.from_bytes(raw[place : place + 4], "little")
        return counters

    def _state(self, hang: _Hang) -> DeviceState:
        assert hang.result is not None
        kernel, size = self._request.kernel, hang.size
        return interpreted_state(
            self._live(), hang.result, kernel, hang.params, device=self._device, memory=self._counters(size),
            shared_bytes=RESERVED_SHARED + kernel.static_smem + size.plan.dynamic_smem,
        )  # fmt: skip

    def _capture_row_states(self, folder: Path, hang: _Hang) -> CaptureOutcome:
        began = self._clock.monotonic()
        raw = self._live().memory.read(hang.size.states, hang.size.plan.state_bytes)
        binary = write_artefact(folder / "row_states.bin", raw)
        counters = self._counters(hang.size)
        document = {"address": hang.size.states, "arrivals": list(counters.values())}
        if hang.result is not None:
            document |= stop_document(hang.result)
        listed = write_artefact(folder / "interpreter.json", json.dumps(document, indent=1))
        return CaptureOutcome(
            "row_states",
            "none",
            self._clock.monotonic() - began,
            artefacts=(Artefact("row-states", binary, "interpreted"), Artefact("interpreter", listed, "interpreted")),
            facts={key: document[key] for key in ("address", "arrivals", "resident", "never_started", "proof") if key in document},
        )

    def row_states(self) -> Mapping[str, Any]:
        """The arrival counters as they are now."""
        if self._hang is None:
            raise InconclusiveError("nothing hangs: there are no row states to read")
        counters = self._counters(self._hang.size)
        return {"address": self._hang.size.states, "arrivals": list(counters.values()), "origin": "interpreted"}

    # -- experiment and end --------------------------------------------------------------------------------------------------

    def unwedge(self, address: int, value: int) -> UnwedgeOutcome:
        """Write ``value`` at ``address`` and interpret on: every layer that hangs in turn is released at the same word.

        ``milliseconds`` is None: the interpreter has no device time.
        """
        hang = self._hang
        if hang is None or hang.result is None:
            return UnwedgeOutcome(False, False, address=address, value=value, why_not="nothing hangs")
        machine = self._live()
        end = hang.size.states + hang.size.plan.state_bytes
        if address % 4 or not hang.size.states <= address <= end - 4:
            why = f"address {address:#x} is not a word of the row states at {hang.size.states:#x}"
            return UnwedgeOutcome(False, False, address=address, value=value, why_not=why)
        began = self._clock.monotonic()
        writes, rows_wrong, padding_wrong = 0, set[int](), set[int]()
        while True:
            machine.poke(address, value)
            writes += 1
            result = machine.resume(budget=self._budget, deadline=self._deadline())
            if result.kind != "completed":
                self._hang = _Hang(hang.step, hang.size, hang.layer, hang.params, result)
                why = f"after the write: {result.kind}: {result.proof}"
                return UnwedgeOutcome(True, False, address=address, value=value, why_not=why, detail={"writes": writes})
            for item in self._check(hang.step, hang.size, hang.layer):
                (rows_wrong if item["row"] < hang.step.rows else padding_wrong).add(int(item["row"]))
            outcome = self._layers_from(hang.step, hang.size, hang.layer + 1, began)
            if outcome.state == "hung" and self._hang is not None:
                hang = self._hang
                continue
            detail = {
                "writes": writes,
                "rows_wrong": sorted(rows_wrong),
                "padding_rows_wrong": sorted(padding_wrong),
                "interpreted_ms": self._ms(began),
                "origin": "interpreted",
            }
            self._hang = None
            return UnwedgeOutcome(True, outcome.state in ("done", "wrong"), address=address, value=value, detail=detail)

    def close(self) -> CloseOutcome:
        """Nothing runs beside this process; the compiled blocks are kept in the user's cache."""
        machine, self._machine = self._machine, None
        if machine is not None:
            machine.program.save_code()
        self._sizes.clear()
        self._hang = self._stopped = None
        return CloseOutcome("clean", None, "no device was used")


def _with_text(read: DeviceState, written: DeviceState) -> DeviceState:
    """What was read back from the dump, with kernel name and instructions as text where the run had no machine code to put into
    it: a dump's names come with its code.
    """
    texts = {grid.grid_id: grid for grid in written.grids if grid.code is None}
    if not texts:
        return read
    grids = tuple(
        replace(grid, sass=texts[grid.grid_id].sass, kernel=texts[grid.grid_id].kernel) if grid.grid_id in texts else grid
        for grid in read.grids
    )
    return replace(read, grids=grids)
