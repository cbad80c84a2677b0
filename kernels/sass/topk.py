"""A persistent top-k launch on the interpreted GPU: device memory laid out, run, answers taken back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...clock import Deadline
from ...errors import UsageError
from ..abi import ARRIVAL_COUNTER_OFFSET, FIXED_SMEM_LARGE, ROW_STATE_SIZE, SMEM_MEDIUM, THREADS_PER_CTA, TopKParams
from ..reference import RowVerdict, check_rows
from ..topk_cases import TopKCase
from .machine import DEFAULT_BUDGET, Machine
from .memory import Memory
from .program import Program
from .verdict import RunResult

__all__ = ["TopKRun", "run_case", "run_topk"]

#: What an output slot holds that no thread wrote.
UNWRITTEN = -0x01010102


@dataclass(frozen=True)
class TopKRun:
    """One launch. ``outputs`` int32 [rows, k]; ``row_states`` bytes of all groups; ``machine`` to look into or to resume.

    ``addresses``: input, output, lengths, row_states. ``params``: what the kernel was given.
    """

    result: RunResult
    outputs: npt.NDArray[np.int32]
    row_states: bytes
    params: TopKParams
    machine: Machine

    @property
    def counters(self) -> tuple[int, ...]:
        """arrival_counter of each group at the end."""
        states = np.frombuffer(self.row_states, np.int32).reshape(-1, ROW_STATE_SIZE // 4)
        return tuple(int(value) for value in states[:, ARRIVAL_COUNTER_OFFSET // 4])

    def verdicts(self, logits: npt.NDArray[np.float32], lengths: npt.NDArray[np.int32]) -> tuple[RowVerdict, ...]:
        """Each row against the reference; a length counts as what it is after clamping into the row."""
        bounded = np.minimum(lengths.astype(np.int64), self.params.max_seq_len)
        return check_rows(self.outputs, logits, bounded, self.params.top_k)


def run_topk(
    program: Program,
    logits: npt.NDArray[np.float32],
    lengths: npt.NDArray[np.int32],
    *,
    k: int,
    chunk_size: int,
    ctas_per_group: int,
    groups: int,
    max_seq_len: int,
    dynamic_smem: int | None = None,
    sms: int = 0,
    slots_per_sm: int = 1,
    seed: int = 0,
    checks: bool = False,
    schedule: str = "smallest-pc",
    budget: int = DEFAULT_BUDGET,
    deadline: Deadline | None = None,
    row_state_word: int = 0,
    counters: int = 0,
    weak: bool = False,
) -> TopKRun:
    """Interpret one launch. ``logits`` float32 [rows, stride], ``lengths`` int32 [rows]; ``chunk_size`` and ``max_seq_len`` in
    elements.

    ``sms`` 0: as many as the grid has CTAs, so that all are resident. ``row_state_word``: what fills the row states before the
    launch (a healthy host writes 0); ``counters``: what each arrival counter holds then.
    UsageError for shapes that do not belong together; otherwise as ``Machine.launch``.
    """
    if logits.ndim != 2 or logits.dtype != np.float32 or lengths.shape != (logits.shape[0],) or groups < 1 or ctas_per_group < 1:
        raise UsageError(f"logits {logits.dtype} {logits.shape}, lengths {lengths.shape}, {groups} groups of {ctas_per_group} CTAs")
    rows, stride = logits.shape
    grid = groups * ctas_per_group
    memory = Memory()
    params = TopKParams(
        memory.allocate("input", logits),
        memory.allocate("output", np.full(rows * k, UNWRITTEN, np.int32)),
        memory.allocate("lengths", lengths.astype(np.int32)),
        memory.allocate("row_states", np.full(groups * ROW_STATE_SIZE // 4, row_state_word, np.uint32)),
        rows, stride, k, chunk_size, ctas_per_group, max_seq_len,
    )  # fmt: skip
    for group in range(groups if counters else 0):
        memory.write(params.row_states + group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET, np.array([counters], np.int32))
    machine = Machine(
        program, sms=sms or grid, slots_per_sm=slots_per_sm, seed=seed, checks=checks, schedule=schedule, memory=memory,
        weak=weak,
    )  # fmt: skip
    smem = max(SMEM_MEDIUM, FIXED_SMEM_LARGE + 4 * chunk_size) if dynamic_smem is None else dynamic_smem
    result = machine.launch(grid, THREADS_PER_CTA, params.pack(), smem, budget=budget, deadline=deadline)
    return collect(machine, params, groups, result)


def collect(machine: Machine, params: TopKParams, groups: int, result: RunResult) -> TopKRun:
    """The answers of a launch as they are in device memory now (again after ``resume``)."""
    outputs = machine.memory.array(params.output, params.num_rows * params.top_k, np.int32).astype(np.int32)
    states = machine.memory.read(params.row_states, groups * ROW_STATE_SIZE)
    return TopKRun(result, outputs.reshape(params.num_rows, params.top_k), states, params, machine)


def run_case(program: Program, case: TopKCase, **options: object) -> tuple[TopKRun, tuple[RowVerdict, ...]]:
    """One case of the sweep: the run, and each row's verdict. ``options``: as of ``run_topk`` (sms, slots_per_sm, seed, checks,
    schedule …).
    """
    logits, lengths = case.logits(), np.array(case.lengths, np.int32)
    run = run_topk(
        program, logits, lengths, k=case.k, chunk_size=case.chunk_size, ctas_per_group=case.ctas_per_group, groups=case.groups,
        max_seq_len=case.max_seq_len, dynamic_smem=case.dynamic_smem, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return run, run.verdicts(logits, lengths)
