"""An interpreted machine as a ``DeviceState``: what a core dump of a device in the same state would hold, marked *interpreted*.

A thread's PC here is where it will go on; hardware shows one PC a warp, that of the lanes which act. As on silicon the polling lane
is the active one and the lanes that wait for it are divergent; a warp whose lanes all wait stands at their common PC.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..forensics.device_state import CodeImage, CtaState, DeviceState, GridState, LaneState, WarpState
from ..kernels.image import KernelImage
from ..kernels.sass.machine import Machine
from ..kernels.sass.verdict import CtaSnapshot, Fault, RunResult

__all__ = ["fault_cause", "interpreted_state", "stop_document"]

_WARP = 32


def interpreted_state(
    machine: Machine,
    result: RunResult,
    image: KernelImage,
    params: bytes,
    *,
    device: tuple[str, int, int],
    grid_id: int = 1,
    memory: Mapping[int, int] | None = None,
    shared_bytes: int | None = None,
) -> DeviceState:
    """The state at the end of a run. ``device``: name, SM architecture, number of SMs. ``memory``: device words by address.
    ``shared_bytes``: of one CTA, with what the system reserves.
    """
    polling = {(item.block, thread) for item in result.stuck if item.state == "polling" for thread in item.threads}
    ctas = tuple(_cta(machine.snapshot(place.block), polling) for place in result.resident)
    grid = GridState(
        device=0,
        grid_id=grid_id,
        kernel=image.function,
        grid_dim=(result.grid, 1, 1),
        block_dim=(result.threads, 1, 1),
        ctas=ctas,
        params=params,
        code=CodeImage(image.cubin, image.function, sm=image.sm) if image.cubin else None,
        shared_bytes=shared_bytes,
        registers=image.registers,
        sass={} if image.cubin else {item.offset: item.text for item in machine.program.function.instructions},
    )
    return DeviceState(
        source="interpreter",
        origin="interpreted",
        grids=(grid,),
        devices={0: device},
        memory=dict(memory or {}),
    )


def fault_cause(fault: Fault) -> str:
    """The catalogue's cause of class ``gpu-fault``."""
    return "misaligned" if fault.kind == "misaligned" else "illegal-access"


def stop_document(result: RunResult) -> dict[str, Any]:
    """How a launch ended and who stands where, for ``interpreter.json``: block numbers, PCs as byte offsets, thread counts."""
    return {
        "kind": result.kind,
        "proof": result.proof,
        "exited": list(result.exited),
        "resident": [item.block for item in result.resident],
        "never_started": list(result.never_started),
        "warp_instructions": result.warp_instructions,
        "notes": list(result.notes),
        "stuck": [
            {
                "block": item.block,
                "pc_offset": item.pc,
                "state": item.state,
                "instruction": item.instruction,
                "threads": len(item.threads),
            }
            for item in result.stuck
        ],
    }


def _cta(snapshot: CtaSnapshot, polling: set[tuple[int, int]]) -> CtaState:
    block = snapshot.residency.block
    threads = len(snapshot.pc)
    warps = []
    for warp in range(-(-threads // _WARP)):
        lanes = range(warp * _WARP, min((warp + 1) * _WARP, threads))
        alive = [thread for thread in lanes if snapshot.pc[thread] >= 0]
        if alive:
            warps.append(_warp(snapshot, warp, alive, [thread for thread in alive if (block, thread) in polling]))
    return CtaState(block_idx=(block, 0, 0), sm=snapshot.residency.sm, warps=tuple(warps))


def _warp(snapshot: CtaSnapshot, warp: int, alive: list[int], polling: list[int]) -> WarpState:
    pcs = snapshot.pc[alive]
    if polling:
        place = int(snapshot.pc[polling[0]])
    else:
        values, counts = np.unique(pcs, return_counts=True)
        place = int(values[np.argmax(counts)])
    active = [thread for thread in alive if int(snapshot.pc[thread]) == place]
    lanes = tuple(
        LaneState(
            lane=thread % _WARP,
            thread_idx=(thread, 0, 0),
            pc_offset=int(snapshot.pc[thread]),
            registers=tuple(snapshot.registers[thread].tolist()),
            predicates=int(snapshot.predicates[thread]),
        )
        for thread in alive
    )
    first = active[0]
    return WarpState(
        warp=warp,
        valid_mask=_mask(alive),
        active_mask=_mask(active),
        pc_offset=place,
        lanes=lanes,
        uniform_registers=tuple(snapshot.uniform_registers[first].tolist()[:63]),
    )


def _mask(threads: list[int]) -> int:
    mask = 0
    for thread in threads:
        mask |= 1 << (thread % _WARP)
    return mask
