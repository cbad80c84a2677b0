"""The text of ``/metrics``, in vLLM's names (0.23.0), and its spoilt forms."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

__all__ = ["Counts", "exposition", "huge", "malformed"]

_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0, 80.0)


@dataclass
class Histogram:
    """Cumulative counts are made when it is written."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    number: int = 0

    def observe(self, value: float) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value
        self.number += 1


@dataclass
class Counts:
    """Everything that is exported."""

    running: int = 0
    waiting: int = 0
    kv: float = 0.0
    preemptions: int = 0
    prompt: int = 0
    generated: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0))
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    iteration: Histogram = field(default_factory=lambda: Histogram(_ITERATION))
    first: Histogram = field(default_factory=lambda: Histogram(_LATENCY))
    between: Histogram = field(default_factory=lambda: Histogram(_LATENCY))


def exposition(counts: Counts, model: str, *, started: float, speculative: bool, running_zero: bool = False) -> str:
    """Prometheus text format 0.0.4."""
    labels = f'engine="0",model_name="{model}"'
    lines = [
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.",
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started}",
    ]

    def family(name: str, kind: str, values: dict[str, float]) -> None:
        exported = f"vllm:{name}" + ("_total" if kind == "counter" else "")
        lines.append(f"# HELP {exported} Stand-in for vllm:{name}.")
        lines.append(f"# TYPE {exported} {kind}")
        lines.extend(f"{exported}{{{labels}{more}}} {float(value)}" for more, value in values.items())
        if kind == "counter":
            lines.append(f"# TYPE vllm:{name}_created gauge")
            lines.extend(f"vllm:{name}_created{{{labels}{more}}} {started}" for more in values)

    def histogram(name: str, found: Histogram) -> None:
        lines.append(f"# HELP vllm:{name} Stand-in for vllm:{name}.")
        lines.append(f"# TYPE vllm:{name} histogram")
        below = 0
        for place, bound in enumerate(found.bounds):
            below += found.counts[place] if found.counts else 0
            lines.append(f'vllm:{name}_bucket{{engine="0",le="{float(bound)}",model_name="{model}"}} {float(below)}')
        lines.append(f'vllm:{name}_bucket{{engine="0",le="+Inf",model_name="{model}"}} {float(found.number)}')
        lines.append(f"vllm:{name}_count{{{labels}}} {float(found.number)}")
        lines.append(f"vllm:{name}_sum{{{labels}}} {found.total}")

    family("num_requests_running", "gauge", {"": 0 if running_zero else counts.running})
    family("num_requests_waiting", "gauge", {"": counts.waiting})
    family("num_requests_waiting_by_reason", "gauge", {',reason="capacity"': counts.waiting, ',reason="deferred"': 0})
    family("engine_sleep_state", "gauge", {',sleep_state="awake"': 1})
    family("kv_cache_usage_perc", "gauge", {"": counts.kv})
    family("num_preemptions", "counter", {"": counts.preemptions})
    family("prompt_tokens", "counter", {"": counts.prompt})
    family("generation_tokens", "counter", {"": counts.generated})
    family("request_success", "counter", {f',finished_reason="{reason}"': number for reason, number in counts.finished.items()})
    if speculative:
        family("spec_decode_num_drafts", "counter", {"": counts.drafts})
        family("spec_decode_num_draft_tokens", "counter", {"": counts.drafted})
        family("spec_decode_num_accepted_tokens", "counter", {"": counts.accepted})
    histogram("iteration_tokens_total", counts.iteration)
    histogram("time_to_first_token_seconds", counts.first)
    histogram("inter_token_latency_seconds", counts.between)
    return "\n".join(lines) + "\n"


def malformed(text: str) -> str:
    """The same, cut and with values that are no numbers."""
    return (
        text[: len(text) // 2].replace(" 0.0", " zero") + '\nvllm:generation_tokens_total{engine="0 NaNNaN\n{{{}}} 1e999999 -\x00\n'
    )


def huge(text: str) -> str:
    """The same behind some 40 MB of other series."""
    return "".join(f'other_series{{number="{number}"}} {number}.0\n' for number in range(1_200_000)) + text
