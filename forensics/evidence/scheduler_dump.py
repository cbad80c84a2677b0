"""vLLM's dump of the step that did not come back (``dump_input.py``), and the padding that it predicts.

The dump names every scheduled request and its tokens. In a FULL CUDA graph the step's tokens are padded to the next captured
size; with k speculative tokens each request holds 1 + k of them, so a padded size that is no multiple of the live requests holds
whole padding requests of length 0 (vllm-project/vllm#51593). ``-1`` entries among the speculative tokens are legal padding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .casefile import CaseFile
from .engine_log import line_stamp
from .facts import SchedulerDump
from .refs import Section

__all__ = ["PaddingForecast", "default_capture_sizes", "forecast_padding", "read_scheduler_dump"]

_DUMP = re.compile(r"Dumping scheduler output for model execution:[^\n]*")
_STATS_DUMP = re.compile(r"Dumping scheduler stats: SchedulerStats\(([^\n]*)")
_TOKENS = re.compile(r"[^_]num_scheduled_tokens=\{([^}]*)\}")
_PAIR = re.compile(r"(?:'([^']*)'|\"([^\"]*)\"|([\w-]+)): (\d+)")
_TOTAL = re.compile(r"total_num_scheduled_tokens=(\d+)")
_SPEC = re.compile(r"scheduled_spec_decode_tokens=\{([^}]*)\}")
_SPEC_LIST = re.compile(r": \[([^\]]*)\]")
_NEW = re.compile(r"NewRequestData\(")
_FINISHED = re.compile(r"finished_req_ids=[\[{]([^\]}]*)[\]}]")
_PREEMPTED = re.compile(r"preempted_req_ids=[\[{]([^\]}]*)[\]}]")


def _count_names(match: re.Match[str] | None) -> int:
    return len(re.findall(r"'[^']*'|\"[^\"]*\"", match.group(1))) if match else 0


def read_scheduler_dump(section: Section, case: CaseFile) -> None:
    if "Dumping scheduler" not in section.text:
        return
    for match in _DUMP.finditer(section.text):
        index, ref = section.cite_match(match)
        body = section.long.get(index, match.group(0))
        tokens_match = _TOKENS.search(body)
        tokens: dict[str, int] = {}
        if tokens_match:
            for pair in _PAIR.finditer(tokens_match.group(1)):
                tokens[pair.group(1) or pair.group(2) or pair.group(3)] = int(pair.group(4))
        total = _TOTAL.search(body)
        spec = _SPEC.search(body)
        lengths = {len([t for t in item.split(",") if t.strip()]) for item in _SPEC_LIST.findall(spec.group(1))} if spec else set()
        case.dumps.append(
            SchedulerDump(
                ref,
                (section.order, index),
                line_stamp(section, index),
                tokens,
                int(total.group(1)) if total else None,
                lengths.pop() if len(lengths) == 1 else None,
                len(_NEW.findall(body)),
                _count_names(_FINISHED.search(body)),
                _count_names(_PREEMPTED.search(body)),
            )
        )
    for match in _STATS_DUMP.finditer(section.text):
        index, ref = section.cite_match(match)
        values = dict(re.findall(r"\b(\w{1,60})=(\d+(?:\.\d+)?)", match.group(1)))
        case.dumps.append(
            SchedulerDump(
                ref,
                (section.order, index),
                line_stamp(section, index),
                running=int(float(values["num_running_reqs"])) if "num_running_reqs" in values else None,
                waiting=int(float(values["num_waiting_reqs"])) if "num_waiting_reqs" in values else None,
                kv=float(values["kv_cache_usage"]) * 100 if "kv_cache_usage" in values else None,
            )
        )


@dataclass(frozen=True, slots=True)
class PaddingForecast:
    """``rows`` scheduled tokens in a graph of ``graph_rows``: ``padded_requests`` whole requests of length 0.

    ``assumed``: the capture sizes are vLLM's defaults, not read from a log.
    """

    live_requests: int
    tokens_each: int
    rows: int
    graph_rows: int
    padded_requests: int
    assumed: bool


def default_capture_sizes(limit: int = 512) -> tuple[int, ...]:
    """vLLM's default list: 1, 2, 4, multiples of 8 to 255, then of 16 (config/vllm.py of 0.27.1)."""
    return tuple(size for size in (1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)) if size <= limit)


def forecast_padding(dump: SchedulerDump, capture_sizes: Sequence[int] | None = None) -> PaddingForecast | None:
    """What the next captured size makes of a uniform speculative decode step; None for prefills, mixed and plain steps."""
    if not dump.tokens or dump.new:
        return None
    each = set(dump.tokens.values())
    if len(each) != 1:
        return None
    tokens_each = each.pop()
    if tokens_each < 2 or tokens_each > 32:
        return None
    live = len(dump.tokens)
    rows = live * tokens_each
    sizes = capture_sizes or default_capture_sizes()
    rounded = sorted({-(-size // tokens_each) * tokens_each for size in sizes})
    graph = next((size for size in rounded if size >= rows), None)
    if graph is None:
        return None
    return PaddingForecast(live, tokens_each, rows, graph, graph // tokens_each - live, capture_sizes is None)
