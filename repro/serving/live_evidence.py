"""What was seen of a live server as one text of evidence, in the forms that the readers of ``forensics.evidence`` know. Pure.

The classifier then judges a live server by the same rules as a transcript that somebody pasted. Values that were not read are left
out, never written as 0.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from .records import EngineSample, Snapshot

__all__ = ["LOG_HEADING", "evidence_text"]

LOG_HEADING = "engine log"
_METRICS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "generation_tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "iterations": "vllm:iteration_tokens_total_count",
    "preemptions": "vllm:num_preemptions_total",
    "finished": "vllm:request_success_total",
    "kv_usage": "vllm:kv_cache_usage_perc",
}


def _scrape(sample: EngineSample) -> list[str]:
    lines = []
    for field, name in _METRICS.items():
        value = getattr(sample, field)
        if value is not None:
            lines.append(
                f'{name}{{engine="0"}} {float(value):g}' if abs(value) < 1e6 else f'{name}{{engine="0"}} {float(value):.1f}'
            )
    return lines


def _cell(value: float | None, unit: str) -> str:
    return f"{value:g} {unit}" if value is not None else "[N/A]"


def evidence_text(snapshots: Sequence[Snapshot], *, wall: float, log: str = "") -> str:
    """``wall``: epoch seconds of the last snapshot, whose ``at`` the others are placed by. ``log``: the log's tail as it is."""
    parts: list[str] = []
    engines = [item.engine for item in snapshots if item.engine is not None and not item.engine.error]
    if engines:
        ends = [engines[0], engines[-1]] if len(engines) > 1 else engines
        for number, sample in enumerate(ends, 1):
            later = f", {sample.at - ends[0].at:.0f} s later" if number > 1 else ""
            parts += [f"=== scrape {number}{later} ===", *_scrape(sample), ""]
    rows = []
    for snapshot in snapshots:
        for device in snapshot.devices:
            moment = dt.datetime.fromtimestamp(wall - (snapshots[-1].at - device.at), dt.UTC)
            rows.append(
                f"{moment:%Y/%m/%d %H:%M:%S}.{moment.microsecond // 1000:03d}, {device.index}, {_cell(device.utilisation, '%')}, "
                f"{_cell(device.memory_utilisation, '%')}, {_cell(device.power_w, 'W')}"
            )
    if rows:
        head = "timestamp, index, utilization.gpu [%], utilization.memory [%], power.draw [W]"
        parts += ["=== nvidia-smi csv ===", head, *rows, ""]
    if snapshots and snapshots[-1].processes:
        parts += ["=== ps ===", "    PID STAT COMMAND"]
        titles = {"api": "VLLM::APIServer", "engine": "VLLM::EngineCore", "worker": "VLLM::Worker"}
        parts += [
            f"{item.pid:7d} {item.state} {titles.get(item.role, item.role)}"
            for item in snapshots[-1].processes
            if item.state is not None
        ]
        parts.append("")
    if log:
        parts += [f"=== {LOG_HEADING} ===", log]
    return "\n".join(parts) + "\n"
