"""A decode workload on one GPU: captured once per graph size, replayed with new lengths, watched without ever waiting for it.

Per captured size there is one CUDA graph of ``layers`` x (row states zeroed by a memset node, as vLLM does from 0.20.2; one
launch of the kernel with frozen parameters; one 4-byte copy that counts finished layers into host memory). A step changes only
device memory: lengths, and which of a few seeded logits arrays each layer reads. Completion is asked for with event queries alone.

Everything that is needed while the device hangs exists and was used before: a side stream of the highest priority, pinned
buffers for reading the row states and for writing one word. Runs in a child process (``device_child``); nothing here is for
several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..clock import SYSTEM, Clock, Deadline
from ..errors import DeadlineError, OurFaultError, PlanError, UnavailableError
from .abi import ARRIVAL_COUNTER_OFFSET, PARAMS_SIZE, ROW_STATE_SIZE, THREADS_PER_CTA, WORKSPACE_BYTES, TopKParams
from .captured_size import ROTATION, CapturedSize, PendingStep, describe_capture, wrong_rows
from .device_records import ReleaseResult, Setup, StepResult, counters_of
from .driver import CudaCallError, DeviceInfo, Driver, Handle
from .plan import LaunchPlan

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DeviceWorkload"]

#: Device memory that a workload may take, as a share of what is free.
_MEMORY_SHARE = 0.8
#: Output words before a replay: no kernel writes this, so a row that nobody wrote is seen.
_UNWRITTEN = -2
#: A group that is still stuck this long after the first write, seconds, is released too (several rows can hang at once).
_OTHER_GROUPS_AFTER_S = 0.1
#: Between two writes into the same counter, seconds: every layer's memset node wipes what was written before it.
_REWRITE_EVERY_S = 0.001
#: After a layer retired, the next one has been launched and hangs after so long, seconds.
_NEXT_LAYER_AFTER_S = 0.0001


class DeviceWorkload:
    """The workload on one device. Order of calls: ``open``, ``prepare``, then steps; while a step is pending only ``progress``,
    ``poll``, ``read_row_states``, ``release``.
    """

    def __init__(
        self, driver: Driver, setup: Setup, *, clock: Clock = SYSTEM, note: Callable[[str], None] = lambda _text: None
    ) -> None:
        if not setup.launches:
            raise PlanError("no launch to capture: every batch of this plan goes to another kernel, or there are no steps")
        if setup.layers < 1:
            raise PlanError(f"layers must be at least 1, got {setup.layers}")
        self._driver = driver
        self._setup = setup
        self._clock = clock
        self._note = note
        self._sizes: dict[int, CapturedSize] = {}
        self._pending: PendingStep | None = None
        self.info: DeviceInfo | None = None

    # -- set-up --------------------------------------------------------------------------------------------------------------

    def open(self) -> DeviceInfo:
        """Context, streams, events and every buffer that a hang may need."""
        self.info = self._driver.open(self._setup.ordinal)
        self._stream = self._driver.stream()
        self._side = self._driver.stream(highest_priority=True)
        self._start, self._end, self._copied, self._side_event = (self._driver.event() for _ in range(4))
        return self.info

    def prepare(self) -> dict[str, Any]:
        """Load, capture each size, run each once. Returns what was seen, for the report.

        Raises KernelNotFoundError (code does not fit), PlanError (a launch that is not this kernel's), DeadlineError (a warm-up
        replay with harmless lengths did not end), UnavailableError (not enough device memory) and CudaCallError.
        """
        driver, setup = self._driver, self._setup
        for rows, plan in setup.launches.items():
            if plan.path != "persistent":
                raise PlanError(
                    f"{rows} rows go to the {plan.path} kernel, not to this one: {plan.refusal or '; '.join(plan.notes)}"
                )
            if plan.state_bytes > WORKSPACE_BYTES:
                raise PlanError(
                    f"{plan.groups} groups need {plan.state_bytes} bytes of row states, the caller has {WORKSPACE_BYTES}"
                )
        self._check_memory()
        facts: dict[str, Any] = {"function": setup.function, "layers": setup.layers, "sizes": []}
        facts["attributes"] = self._load()
        self._workspace = driver.alloc(WORKSPACE_BYTES)
        self._constants = driver.alloc(4 * (setup.layers + 1))
        largest = max(plan.rows for plan in setup.launches.values())
        self._states = driver.pinned(max(plan.state_bytes for plan in setup.launches.values()))
        self._word = driver.pinned(4096)
        self._progress = driver.pinned(4096)
        self._staged_lengths = driver.pinned(4 * largest)
        self._results = driver.pinned(4 * largest * setup.top_k * setup.layers)
        constants = driver.pinned(4 * (setup.layers + 1))
        for index in range(setup.layers + 1):
            constants.write(index.to_bytes(4, "little"), 4 * index)
        driver.copy_in(self._constants, constants.address, constants.size, self._stream)
        driver.fill(self._workspace, 0, WORKSPACE_BYTES // 4, self._stream)
        for rows in sorted(setup.launches):
            self._sizes[rows] = self._capture(setup.launches[rows])
        self._touch_side_stream()
        for rows in sorted(self._sizes):
            facts["sizes"].append({**self._describe(self._sizes[rows]), "warmup": self._warm_up(rows)})
        return facts

    def _load(self) -> dict[str, int]:
        """Make the kernel launchable; its attributes as the driver gives them."""
        driver, setup = self._driver, self._setup
        self._function = driver.load(setup.cubin, setup.function)
        driver.allow_dynamic_smem(self._function, max(plan.dynamic_smem for plan in setup.launches.values()))
        return driver.function_attributes(self._function)

    def _check_memory(self) -> None:
        needed = WORKSPACE_BYTES
        for plan in self._setup.launches.values():
            arrays = ROTATION + min(ROTATION, self._setup.layers)
            needed += plan.rows * (arrays * plan.stride + self._setup.layers * plan.top_k + 1) * 4
        free, _total = self._driver.memory()
        if needed > _MEMORY_SHARE * free:
            raise UnavailableError(
                f"the workload needs {needed >> 20} MiB of device memory, {free >> 20} MiB are free",
                help_text="Use a smaller --max-model-len or --max-num-seqs, or a freer device (--device).",
            )

    def _host_pool(self, plan: LaunchPlan) -> list[np.ndarray[Any, Any]]:
        """ROTATION arrays of logits, float32 [rows, stride]."""
        import numpy as np

        random = np.random.default_rng([self._setup.seed, plan.rows])
        return [random.standard_normal((plan.rows, plan.stride), dtype=np.float32) for _ in range(ROTATION)]

    def _capture(self, plan: LaunchPlan) -> CapturedSize:
        driver, setup = self._driver, self._setup
        rows_bytes = plan.rows * plan.stride * 4
        host_pool = self._host_pool(plan)
        size = CapturedSize(
            plan=plan,
            lengths=driver.alloc(4 * plan.rows),
            outputs=driver.alloc(4 * plan.rows * plan.top_k * setup.layers),
            logits=[driver.alloc(rows_bytes) for _ in range(min(ROTATION, setup.layers))],
            pool=[driver.alloc(rows_bytes) for _ in host_pool],
            host_pool=host_pool,
        )
        for target, array in zip(size.pool, host_pool, strict=True):
            driver.copy_in(target, array.ctypes.data, rows_bytes, self._stream)
        # Once outside the capture, with lengths of 0: loads the code and whatever the launcher asks the driver for on its
        # first call.
        driver.fill(size.lengths, 0, plan.rows, self._stream)
        self._launch_layer(size, 0)
        driver.record(self._end, self._stream)
        if not self._wait(self._end, setup.warmup_timeout_s):
            raise DeadlineError(f"a launch of {plan.rows} empty rows did not end within {setup.warmup_timeout_s:g} s")
        driver.begin_capture(self._stream)
        try:
            for layer in range(setup.layers):
                self._launch_layer(size, layer)
                driver.copy_out(self._progress.address, self._constants + 4 * (layer + 1), 4, self._stream)
        finally:
            size.graph = driver.end_capture(self._stream)
        size.executable = driver.instantiate(size.graph)
        driver.upload(size.executable, self._stream)
        self._note(f"captured {plan.rows} rows: grid {plan.grid}, {setup.layers} layers")
        return size

    def _launch_layer(self, size: CapturedSize, layer: int) -> None:
        """One layer on the stream: the row states' memset and the launch."""
        plan = size.plan
        self._driver.fill(self._workspace, 0, plan.state_bytes // 4, self._stream)
        params = self._params(size, layer).pack()
        self._driver.launch(self._function, plan.grid, THREADS_PER_CTA, plan.dynamic_smem, params, self._stream)

    def _describe(self, size: CapturedSize) -> dict[str, Any]:
        """What was really captured, beside what was planned: grids and frozen parameters read back from the graph."""
        nodes = self._driver.kernel_nodes(size.graph, PARAMS_SIZE)
        found = describe_capture(size, nodes, layers=self._setup.layers)
        return {**found, "row_states": self._workspace, "state_bytes": size.plan.state_bytes, "groups": size.plan.groups}

    def _touch_side_stream(self) -> None:
        """Use every call that a hang will need once while nothing hangs, so that none is loaded or allocated then."""
        self._driver.copy_out(self._states.address, self._workspace, self._states.size, self._side)
        self._driver.copy_in(self._constants, self._word.address, 4, self._side)
        self._driver.record(self._side_event, self._side)
        if not self._wait(self._side_event, self._setup.warmup_timeout_s):
            raise DeadlineError("a copy on the side stream did not end on an idle device")

    def _warm_up(self, rows: int) -> dict[str, Any]:
        size = self._sizes[rows]
        length = min(size.plan.stride, size.plan.max_seq_len, 2 * size.plan.top_k)
        self.launch(-1, rows, [length] * rows, check=[0])
        deadline = Deadline(self._setup.warmup_timeout_s, self._clock)
        while not deadline.expired:
            result = self.poll()
            if result is not None:
                return result.document()
            self._clock.sleep(0.0002)
        raise DeadlineError(
            f"the warm-up replay of {rows} rows of {length} candidates did not end within {self._setup.warmup_timeout_s:g} s "
            f"({self.progress()} of {self._setup.layers} layers finished): this hang is not the one that was asked for"
        )

    # -- steps ---------------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a step is on the device."""
        return self._pending is not None

    def launch(self, index: int, rows: int, lengths: Sequence[int], check: Sequence[int], live_rows: int | None = None) -> None:
        """Put one step on the stream: lengths and logits in, the captured graph, results of the layers ``check`` out. Never waits.

        ``live_rows``: how many of the rows belong to live requests (they come first); None: all.
        """
        if self._pending is not None:
            raise OurFaultError("a step was launched while another is pending")
        size = self._sizes.get(rows)
        if size is None:
            raise PlanError(f"no graph of {rows} rows was captured; captured: {sorted(self._sizes)}")
        if len(lengths) != rows or not all(-(1 << 31) <= length < 1 << 31 for length in lengths):
            raise PlanError(f"{len(lengths)} lengths for {rows} rows, or one beyond int32")
        driver, plan = self._driver, size.plan
        self._staged_lengths.write(b"".join(int(length).to_bytes(4, "little", signed=True) for length in lengths))
        self._progress.write(bytes(4))
        driver.copy_in(size.lengths, self._staged_lengths.address, 4 * rows, self._stream)
        for slot, target in enumerate(size.logits):
            driver.copy_within(target, size.pool[(index + slot) % ROTATION], 4 * rows * plan.stride, self._stream)
        driver.fill(size.outputs, _UNWRITTEN, rows * plan.top_k * self._setup.layers, self._stream)
        driver.record(self._start, self._stream)
        driver.replay(size.executable, self._stream)
        driver.record(self._end, self._stream)
        layer_bytes = 4 * rows * plan.top_k
        checked = sorted({layer for layer in check if 0 <= layer < self._setup.layers})
        for slot, layer in enumerate(checked):
            driver.copy_out(
                self._results.address + slot * layer_bytes, size.outputs + layer * layer_bytes, layer_bytes, self._stream
            )
        driver.record(self._copied, self._stream)
        self._pending = PendingStep(
            index, size, list(lengths), checked, rows if live_rows is None else live_rows, self._clock.monotonic()
        )

    def progress(self) -> int:
        """Layers of the pending step that have finished, read from host memory: costs the device nothing."""
        return self._progress.i32(0)

    def pending_ms(self) -> float:
        """Milliseconds since the pending step was launched, 0 if none is."""
        return 0.0 if self._pending is None else (self._clock.monotonic() - self._pending.began) * 1e3

    def poll(self) -> StepResult | None:
        """The pending step's result, None while it runs. A faulted context is a result of state ``fault``."""
        pending = self._pending
        if pending is None:
            return None
        try:
            if not self._driver.finished(self._copied):
                return None
            milliseconds = self._driver.milliseconds(self._start, self._end)
        except CudaCallError as error:
            self._pending = None
            return StepResult(pending.index, "fault", _ms_since(self._clock, pending.began), error=str(error))
        self._pending = None
        found, checked = self._check(pending)
        wrong = tuple(item for item in found if item["row"] < pending.live_rows)
        padding = tuple(item for item in found if item["row"] >= pending.live_rows)
        return StepResult(pending.index, "wrong" if wrong else "done", milliseconds, wrong, padding, checked)

    def _check(self, pending: PendingStep) -> tuple[list[dict[str, Any]], int]:
        return wrong_rows(pending, self._results.view)

    # -- while it hangs ------------------------------------------------------------------------------------------------------

    def read_row_states(self, timeout_s: float = 2.0) -> bytes:
        """The row states as they are now, copied on the side stream. DeadlineError if the copy does not end; CudaCallError."""
        size = self._pending.size if self._pending else self._sizes[max(self._sizes)]
        count = size.plan.state_bytes
        self._driver.copy_out(self._states.address, self._workspace, count, self._side)
        self._driver.record(self._side_event, self._side)
        if not self._wait(self._side_event, timeout_s):
            raise DeadlineError(f"the side stream's copy of {count} bytes of row states did not end within {timeout_s:g} s")
        return bytes(self._states.view[:count])

    def observations(self) -> dict[str, Any]:
        """What else a workload of this kind can read while it hangs, as JSON values."""
        return {}

    @property
    def row_states_address(self) -> int:
        """Device address of the first row state."""
        return self._workspace

    def frozen_params(self) -> bytes:
        """The parameters of the pending step's first launch that has not finished, read back from the graph after its capture.

        Empty if no step is pending, or where they could not be read back.
        """
        if self._pending is None:
            return b""
        return self._pending.size.frozen.get(min(self.progress(), self._setup.layers - 1), b"")

    def _params(self, size: CapturedSize, layer: int) -> TopKParams:
        plan = size.plan
        return plan.params(
            input=size.logits[layer % len(size.logits)],
            output=size.outputs + 4 * plan.rows * plan.top_k * layer,
            lengths=size.lengths,
            row_states=self._workspace,
        )

    def release(self, address: int, value: int, timeout_s: float = 10.0) -> ReleaseResult:
        """Write ``value`` into the word at ``address`` until the pending graph retires: each of its layers hangs in turn.

        Refuses (``why_not``) an address outside the row states, and when nothing is pending.
        """
        outcome = ReleaseResult()
        pending = self._pending
        if pending is None:
            outcome.why_not = "no step is pending: nothing to release"
            return outcome
        if not self._workspace <= address <= self._workspace + WORKSPACE_BYTES - 4 or address % 4:
            outcome.why_not = f"address {address:#x} is not a word of the row states at {self._workspace:#x}"
            return outcome
        targets = [address]
        deadline = Deadline(timeout_s, self._clock)
        self._word.write((value & 0xFFFFFFFF).to_bytes(4, "little"))
        began = layer_began = self._clock.monotonic()
        layer = self.progress()
        while not deadline.expired:
            for target in targets:
                self._driver.copy_in(target, self._word.address, 4, self._side)
            self._driver.record(self._side_event, self._side)
            if not self._wait(self._side_event, 2.0):
                outcome.why_not = "the side stream's write did not end within 2 s"
                return outcome
            outcome.writes += 1
            if outcome.write_ms is None:
                outcome.write_ms = _ms_since(self._clock, began)
            pause = Deadline(_REWRITE_EVERY_S, self._clock)
            while True:
                result = self.poll()
                now = self._clock.monotonic()
                finished = self.progress()
                if finished != layer:
                    outcome.layers_ms.append((now - layer_began) * 1e3)
                    if outcome.first_ms is None:
                        outcome.first_ms = outcome.layers_ms[0]
                    layer, layer_began = finished, now
                    # The next layer's memset comes at once and would wipe a write that is already on its way: a moment later
                    # is enough.
                    pause = Deadline(_NEXT_LAYER_AFTER_S, self._clock)
                if result is not None:
                    outcome.result = result
                    outcome.retired = result.state != "fault"
                    outcome.why_not = result.error
                    outcome.total_ms = (now - began) * 1e3
                    return outcome
                if pause.expired:
                    break
            if len(targets) == 1 and (self._clock.monotonic() - layer_began) > _OTHER_GROUPS_AFTER_S:
                for group, state in enumerate(counters_of(self.read_row_states())):
                    other = self._workspace + group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET
                    if state["arrival"] and other != address:
                        targets.append(other)
                        outcome.also_groups.append(group)
        outcome.why_not = f"the graph had not retired {timeout_s:g} s after the first write ({self.progress()} layers finished)"
        return outcome

    def _wait(self, event: Handle, timeout_s: float) -> bool:
        """Poll an event; False when the time is over."""
        deadline = Deadline(timeout_s, self._clock)
        while not self._driver.finished(event):
            if deadline.expired:
                return False
            self._clock.sleep(0.00002)
        return True


def _ms_since(clock: Clock, since: float) -> float:
    """Milliseconds on ``clock`` since a moment of it."""
    return (clock.monotonic() - since) * 1e3
