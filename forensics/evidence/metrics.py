"""Prometheus expositions of an engine or an exporter, one scrape or several in one text, each sample with its line.

Lines are read one by one, so that a torn or mixed text costs one line, not the scrape; within a line the format is that of the
text exposition (label escapes included). A sample that repeats starts the next scrape.
"""

from __future__ import annotations

import re

from .casefile import CaseFile
from .facts import GpuSample, MetricSample
from .refs import Section

__all__ = ["KEPT_PREFIXES", "read_metrics"]

KEPT_PREFIXES = ("vllm:", "vllm_", "sglang:", "DCGM_FI_DEV_", "process_", "lmcache")
_SAMPLE = re.compile(r"^\s*([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+([+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|Inf|NaN))(?:\s+\d+)?\s*$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_DCGM = {
    "DCGM_FI_DEV_GPU_UTIL": "util", "DCGM_FI_DEV_MEM_COPY_UTIL": "memory_util", "DCGM_FI_DEV_POWER_USAGE": "power",
    "DCGM_FI_DEV_SM_CLOCK": "sm_clock", "DCGM_FI_DEV_GPU_TEMP": "temperature", "DCGM_FI_DEV_FB_USED": "memory_used",
}  # fmt: skip


def read_metrics(section: Section, case: CaseFile) -> None:
    text = section.text
    if not any(prefix in text for prefix in KEPT_PREFIXES):
        if "# TYPE" in text or "# HELP" in text:
            for index, line in enumerate(section.lines):
                if line.startswith("#") or _SAMPLE.match(line):
                    section.claim(index)
        return
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    started = False
    gpus: dict[tuple[str, int], dict[str, float]] = {}
    gpu_refs: dict[tuple[str, int], int] = {}
    for index, line in enumerate(section.lines):
        if line.startswith(("# HELP", "# TYPE")):
            section.claim(index)
            continue
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name = match.group(1)
        section.claim(index)
        if not name.startswith(KEPT_PREFIXES) or name.endswith("_bucket"):
            continue
        labels = tuple(sorted((key, value) for key, value in _LABEL.findall(match.group(2) or "")))
        key = (name, labels)
        if not started or key in seen:
            case.scrapes += 1
            started = True
            seen.clear()
            _flush_gpus(section, case, gpus, gpu_refs)
        seen.add(key)
        value = float(match.group(3).replace("Inf", "inf").replace("NaN", "nan"))
        case.metrics.append(MetricSample(name, labels, value, case.scrapes, section.ref(index)))
        field = _DCGM.get(name)
        if field is not None:
            table: dict[str, str] = dict(labels)
            gpu = table.get("gpu") or table.get("GPU") or ""
            if gpu.isdigit():
                slot = (table.get("Hostname") or table.get("instance") or "", int(gpu))
                gpus.setdefault(slot, {})[field] = value
                gpu_refs[slot] = index
    _flush_gpus(section, case, gpus, gpu_refs)
    if section.hints.repeat is not None:
        case.metrics_repeat = section.hints.repeat


def _flush_gpus(
    section: Section, case: CaseFile, gpus: dict[tuple[str, int], dict[str, float]], refs: dict[tuple[str, int], int]
) -> None:
    for (host, gpu), values in gpus.items():
        index = refs[(host, gpu)]
        case.gpus.append(GpuSample(section.ref(index), (section.order, index), section.stamps.get(index), gpu, host, **values))  # type: ignore[arg-type]
    gpus.clear()
    refs.clear()
