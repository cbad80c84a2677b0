"""Two ranks on the CPU ground: two interpreted devices over one memory, an all-reduce of our own behind rank 0's launch.

Rank 0's stream is its launch and then the all-reduce, rank 1's is the all-reduce alone. Each device is interpreted to its end or to
a proven wait; a word that the other rank never publishes is a wait that no thread of this device can end. Nothing is measured.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..clock import Deadline
from ..forensics.device_state import DeviceState, GridState
from ..forensics.records import Diagnosis, Evidence, Verdict, Window
from ..kernels.abi import ARRIVAL_COUNTER_OFFSET, ROW_STATE_SIZE
from ..scenarios.launches import CrossRank
from .interpreted_state import interpreted_state

if TYPE_CHECKING:
    from ..kernels.image import KernelImage
    from ..kernels.sass.machine import Machine
    from ..kernels.sass.memory import Memory
    from ..kernels.sass.verdict import RunResult

__all__ = ["ALL_REDUCE", "judge_cross_rank"]

ALL_REDUCE = "cross_rank_all_reduce"
_ROUND = 1
_THREADS = 32

Keep = Callable[[str, str, "bytes | str"], Evidence]


def all_reduce_image(sm: int) -> KernelImage:
    """Our all-reduce's wait as a kernel image. ToolMissingError without NVRTC."""
    from ..kernels.build import compile_kernel
    from ..kernels.cubin import read_cubin
    from ..kernels.image import KernelImage, sha256_hex

    cubin = compile_kernel("companions.cu", sm).cubin
    found = next(item for item in read_cubin(cubin).functions if item.name == ALL_REDUCE)
    assert found.params_base is not None, "a cubin of ours says where its parameters are"
    return KernelImage(
        "companions", cubin, sha256_hex(cubin), sm, ALL_REDUCE, 0, 0, found.params_base, found.params_size or 0,
        found.static_smem or 0, found.registers or 255, found.max_threads or 1024,
    )  # fmt: skip


def judge_cross_rank(
    what: CrossRank, kernel: str, *, sm: int, keep: Keep | None = None, deadline: Deadline | None = None
) -> tuple[Diagnosis, dict[str, Any]]:
    """(diagnosis, detail). Errors as of ``relative_cpu.judge_row``."""
    from ..forensics.diagnose import diagnose_state
    from ..kernels.sass.memory import Memory

    image = all_reduce_image(sm)
    detail: dict[str, Any] = {"origin": "interpreted", "ranks": []}
    states: list[DeviceState] = []
    memory, held = Memory(), None
    if what.held is not None:
        held = _launch(what, kernel, sm, deadline)
        memory = held.machine.memory
    words = [memory.allocate(f"rank {rank}: round", np.zeros(64, np.uint32)) for rank in (0, 1)]
    memory.write(words[1], np.array([_ROUND], np.uint32))  # rank 1 is there from the start
    arrived = held is not None and held.result.completed
    if arrived:
        memory.write(words[0], np.array([_ROUND], np.uint32))  # what its all-reduce does first
    for rank in (0, 1):
        if rank == 0 and not arrived:
            states.append(_rank_0(held, kernel, sm, what))
            detail["ranks"].append({"rank": 0, "kind": held.result.kind if held is not None else "nothing launched"})
            continue
        machine, result, params = _poll(image, memory, words, rank, deadline)
        device = (f"interpreted sm_{sm}, rank {rank}", sm, 1)
        word = {words[1 - rank]: int(memory.array(words[1 - rank], 1, np.uint32)[0])}
        states.append(_on(interpreted_state(machine, result, image, params, device=device, memory=word), rank))
        detail["ranks"].append({"rank": rank, "kind": result.kind, "proof": result.proof})
    hung = [item["kind"] in ("deadlock", "livelock") for item in detail["ranks"]]
    if not any(hung):
        sentence = "both ranks arrived in the all-reduce and left it"
        verdict = Verdict.model_validate({"class": "not-hung", "cause": None, "confidence": "high", "sentence": sentence})
        return Diagnosis(outcome="clean", ground="cpu", verdict=verdict, window=Window(reached=True)), detail
    seen = _together([states[rank] for rank in what.devices], what.devices)
    evidence = []
    if keep is not None:
        evidence.append(keep("interpreter", "interpreter.json", json.dumps(detail, indent=1)))
        core = _core(seen)
        if core is not None:
            evidence.append(keep("gpu-core", "interpreted.nvcudmp", core))
    unread = [rank for rank in (0, 1) if rank not in what.devices]
    extra = {"ranks_read": list(what.devices), "ranks_not_read": unread}
    diagnosis = diagnose_state(seen, ground="cpu", evidence=evidence, extra=extra)
    return diagnosis, detail


def _launch(what: CrossRank, kernel: str, sm: int, deadline: Deadline | None) -> Any:
    from ..kernels.sass.program import Program
    from ..kernels.sass.topk import run_topk
    from ..kernels.select import select_kernel

    assert what.held is not None
    case = what.held.case
    program = Program.from_image(select_kernel(kernel, sm=sm, top_k=case.k, vec=case.vec))
    return run_topk(
        program, case.logits(), np.array(case.lengths, np.int32), k=case.k, chunk_size=case.chunk_size,
        ctas_per_group=case.ctas_per_group, groups=case.groups, max_seq_len=case.max_seq_len, dynamic_smem=case.dynamic_smem,
        deadline=deadline,
    )  # fmt: skip


def _poll(
    image: KernelImage, memory: Memory, words: list[int], rank: int, deadline: Deadline | None
) -> tuple[Machine, RunResult, bytes]:
    from ..kernels.sass.machine import Machine
    from ..kernels.sass.program import Program

    params = struct.pack("<QQI", words[rank], words[1 - rank], _ROUND)
    machine = Machine(Program.from_image(image), sms=1, memory=memory)
    return machine, machine.launch(1, _THREADS, params, deadline=deadline), params


def _rank_0(held: Any, kernel: str, sm: int, what: CrossRank) -> DeviceState:
    """Rank 0's GPU: the launch that hangs and the all-reduce queued behind it, or nothing at all."""
    if held is None:
        return DeviceState("interpreter", "interpreted", (), {0: (f"interpreted sm_{sm}, rank 0", sm, 1)})
    from ..kernels.select import select_kernel

    assert what.held is not None
    image = select_kernel(kernel, sm=sm, top_k=what.held.case.k, vec=what.held.case.vec)
    counters = {
        held.params.row_states + group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET: value & 0xFFFFFFFF
        for group, value in enumerate(held.counters)
    }
    device = (f"interpreted sm_{sm}, rank 0", sm, held.machine.sms)
    state = interpreted_state(held.machine, held.result, image, held.params.pack(), device=device, memory=counters)
    queued = GridState(device=0, grid_id=2, kernel=ALL_REDUCE, grid_dim=(1, 1, 1), block_dim=(_THREADS, 1, 1), ctas=())
    return dataclasses.replace(state, grids=(*state.grids, queued))


def _on(state: DeviceState, device: int) -> DeviceState:
    """The state of device 0 as that of another number."""
    grids = tuple(dataclasses.replace(grid, device=device) for grid in state.grids)
    return dataclasses.replace(state, grids=grids, devices={device: state.devices[0]})


def _together(states: list[DeviceState], ranks: tuple[int, ...]) -> DeviceState:
    """One state of several devices; addresses are of one memory."""
    devices = {number: facts for state in states for number, facts in state.devices.items()}
    memory = {address: word for state in states for address, word in state.memory.items()}
    grids = tuple(grid for state in states for grid in state.grids)
    return DeviceState("interpreter, rank " + " and ".join(map(str, ranks)), "interpreted", grids, devices, memory)


def _core(state: DeviceState) -> bytes | None:
    """The state as a core dump of a process that uses these devices; None where nothing could be written."""
    from ..forensics.corewriter import write_core

    try:
        with tempfile.TemporaryDirectory() as folder:
            return write_core(Path(folder) / "core", state).read_bytes()
    except OSError:
        return None
