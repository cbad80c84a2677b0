"""Device evidence on its way into a bundle: a stripped core dump, its tables as JSON, the stuck kernel's code.

The stripped dump is judged again before it is packed. If it does not give the verdict that the whole dump gives, the bundle says
so, instead of pretending that nothing was lost.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ReproError
from ..forensics.corefile import CoreDump, open_core
from ..forensics.device_state import CtaState, DeviceState, GridState, WarpState
from .core_strip import StrippedCore, kernel_code, strip_core

__all__ = ["DEVICE_SCHEMA", "ReducedCore", "reduce_core", "state_document"]

DEVICE_SCHEMA = "dsv4-repro/device-state/1"
#: Lanes whose registers stand in the JSON tables, over all grids; the stripped dump holds all.
_MOST_LANES = 4096
_MOST_WORDS = 65536


@dataclass(frozen=True, slots=True)
class ReducedCore:
    """``dump``: the stripped file; ``tables``: the JSON document; ``code``: (function, cubin); ``note``: empty if all is well."""

    dump: Path
    tables: bytes
    code: tuple[tuple[str, bytes], ...]
    stripped: StrippedCore
    note: str


class _Recorded(dict[int, int]):
    """The words of a state, remembering which were asked for."""

    def __init__(self, words: Mapping[int, int], asked: set[int]) -> None:
        super().__init__(words)
        self._asked = asked

    def get(self, key: int, default: Any = None) -> Any:
        self._asked.add(key)
        return super().get(key, default)


def _verdict(state: DeviceState, dump: CoreDump, asked: set[int]) -> tuple[str, ...]:
    """What the dump says by itself, as words to compare; the words of memory that it took are added to ``asked``."""
    from ..forensics.diagnose import diagnose_state

    def word(address: int) -> int | None:
        asked.add(address)
        return dump.word(address)

    recorded = dataclasses.replace(state, memory=_Recorded(state.memory, asked))
    found = diagnose_state(recorded, ground="file", hung=True, memory=word, faults=dump.faults)
    verdict = found.verdict
    waits = sorted(str((wait.kernel, wait.block, wait.value, wait.target, wait.comparison)) for wait in found.waits)
    return (verdict.class_, verdict.cause or "", verdict.confidence, verdict.signature or "", verdict.identity or "", *waits)


def reduce_core(path: Path, target: Path) -> ReducedCore:
    """Strip a dump into ``target``. Raises CoreFileError if it cannot be read."""
    asked: set[int] = set()
    with open_core(path) as dump:
        state = dump.state
        before: tuple[str, ...] | None
        try:
            before = _verdict(state, dump, asked)
        except ReproError as error:
            before, why = None, str(error)
        words = {}
        for address in sorted(asked)[:_MOST_WORDS]:
            value = state.memory.get(address)
            value = dump.word(address) if value is None else value
            if value is not None:
                words[address] = value
        code = kernel_code(state)
        with target.open("wb") as out:
            stripped = strip_core(path, out, code=code, words=words)
        tables = state_document(state, dump.metadata, [str(dataclasses.asdict(fault)) for fault in dump.faults])
    note = f"not compared with the whole dump: {why}" if before is None else _compare(target, before)
    return ReducedCore(target, tables, tuple((function, cubin) for function, cubin, _ in code), stripped, note)


def _compare(target: Path, before: tuple[str, ...]) -> str:
    try:
        with open_core(target) as dump:
            after = _verdict(dump.state, dump, set())
    except ReproError as error:
        return f"the stripped dump cannot be judged: {error}"
    if after == before:
        return ""
    whole, rest = ("/".join(filter(None, verdict[:2])) + f" ({verdict[2]})" for verdict in (before, after))
    return f"the whole dump says {whole}, the stripped one {rest}: send it with --raw"


def _lane_rows(warp: WarpState, budget: list[int]) -> list[dict[str, Any]]:
    rows = []
    for lane in warp.lanes:
        row: dict[str, Any] = {
            "lane": lane.lane,
            "thread": lane.thread_idx,
            "pc_offset": lane.pc_offset,
            "predicates": lane.predicates,
        }
        if lane.registers is not None and budget[0] > 0:
            budget[0] -= 1
            row["registers"] = " ".join(f"{word:08x}" for word in lane.registers)
        if lane.named:
            row["named"] = dict(lane.named)
        rows.append(row)
    return rows


def _cta(cta: CtaState, budget: list[int]) -> dict[str, Any]:
    return {
        "block": cta.block_idx,
        "sm": cta.sm,
        "cluster": cta.cluster_idx,
        "warps": [
            {
                "warp": warp.warp,
                "valid": f"{warp.valid_mask:08x}",
                "active": f"{warp.active_mask:08x}",
                "pc_offset": warp.pc_offset,
                "uniform_registers": None
                if warp.uniform_registers is None
                else " ".join(f"{word:08x}" for word in warp.uniform_registers),
                "lanes": _lane_rows(warp, budget),
            }
            for warp in cta.warps
        ],
    }


def _grid(grid: GridState, budget: list[int]) -> dict[str, Any]:
    return {
        "device": grid.device,
        "grid_id": grid.grid_id,
        "kernel": grid.kernel,
        "grid": grid.grid_dim,
        "block": grid.block_dim,
        "cluster": grid.cluster_dim,
        "params": None if grid.params is None else grid.params.hex(),
        "complete": grid.complete,
        "function": grid.code.function if grid.code else None,
        "entry": None if grid.code is None or grid.code.entry is None else hex(grid.code.entry),
        "ctas": None if grid.ctas is None else [_cta(cta, budget) for cta in grid.ctas],
    }


def state_document(state: DeviceState, metadata: Mapping[str, Any], faults: list[str]) -> bytes:
    """A device state as JSON: every table; registers as 8 hex digits a word, of the first lanes where there are very many."""
    budget = [_MOST_LANES]
    document = {
        "schema": DEVICE_SCHEMA,
        "source": Path(state.source).name,
        "origin": state.origin,
        "metadata": dict(metadata),
        "faults": faults,
        "devices": {str(ordinal): {"name": name, "sm": sm, "sms": sms} for ordinal, (name, sm, sms) in state.devices.items()},
        "grids": [_grid(grid, budget) for grid in state.grids],
        "memory": {hex(address): word for address, word in sorted(state.memory.items())[:_MOST_WORDS]},
        "unread": [{"what": item.what, "why": item.why, "remedy": item.remedy} for item in state.unread],
        "registers_cut": budget[0] <= 0,
    }
    return (json.dumps(document, indent=1, default=str) + "\n").encode("utf-8", "backslashreplace")
