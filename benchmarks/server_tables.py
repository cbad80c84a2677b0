"""The JSON files of ``server_experiments.py`` as Markdown tables, by ``--summarise``. Reads; runs nothing.

Every row names its file and its n. The share of drains comes with its exact 95 % interval (Clopper and Pearson): what n trials can
say also where all went alike. What a file does not hold is "not recorded", never 0.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any

__all__ = ["share", "tables"]

SCHEMA = "dsv4-repro/benchmark-server-experiments/1"
MISSING = "not recorded"
#: Below so many pairs a bootstrap interval is not one.
FEW = 10
#: Steps of a one-rank part that are shown.
SHOWN = 8
MAX_FILE = 64 << 20


def tables(places: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Lines of Markdown, and what could not be read. A place is a result file or a folder with some below it."""
    documents: dict[str, Mapping[str, Any]] = {}
    wrong: list[str] = []
    for place in places:
        paths = [place] if place.is_file() else sorted(place.rglob("server_experiments-*.json"))
        if not paths:
            wrong.append(f"{place}: no server_experiments-*.json there")
        for path in paths:
            try:
                document = json.loads(path.read_bytes()) if path.stat().st_size <= MAX_FILE else None
            except (OSError, ValueError, RecursionError) as error:
                wrong.append(f"{path}: {type(error).__name__}: {error}")
                continue
            if isinstance(document, dict) and document.get("schema") == SCHEMA and isinstance(document.get("parts"), dict):
                documents[_name(path, documents)] = document
            else:
                wrong.append(f"{path}: not a result of server_experiments.py")
    lines: list[str] = []
    for section in (_runs, _drains, _outputs, _costs, _unwedges, _one_rank, _failures):
        try:
            lines += section(documents)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            wrong.append(f"{section.__name__.strip('_')}: a file is not as this program writes it: {type(error).__name__}: {error}")
    return lines, wrong


def _name(path: Path, taken: Mapping[str, Any]) -> str:
    """The folder and port; longer where two are alike."""
    port = path.stem.rpartition("-")[2]
    for depth in range(1, len(path.parts)):
        name = "/".join([*path.parts[-1 - depth : -1], port])
        if name not in taken:
            return name
    return str(path)


# -- cells ---------------------------------------------------------------------------------------------------------------------


def share(count: int, of: int) -> str:
    """``6 of 6 (54 to 100 %)``: with the exact 95 % interval."""
    if of <= 0:
        return "0 of 0"
    low = 0.0 if count == 0 else _root(lambda p: _at_least(count, of, p) - 0.025)
    high = 1.0 if count == of else _root(lambda p: 0.025 - (1.0 - _at_least(count + 1, of, p)))
    return f"{count} of {of} ({100 * low:.0f} to {100 * high:.0f} %)"


def _at_least(count: int, of: int, p: float) -> float:
    """Chance of ``count`` or more of ``of``."""
    return float(sum(comb(of, k) * p**k * (1.0 - p) ** (of - k) for k in range(count, of + 1)))


def _root(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2.0
        low, high = (middle, high) if rising(middle) < 0.0 else (low, middle)
    return (low + high) / 2.0


def _spread(values: Iterable[float | None], digits: int = 3) -> str:
    """Median and range."""
    known = [value for value in values if value is not None]
    if not known:
        return MISSING
    middle = statistics.median(known)
    if min(known) == max(known):
        return f"{middle:.{digits}f} each"
    return f"{middle:.{digits}f} ({min(known):.{digits}f} to {max(known):.{digits}f})"


def _number(value: Any, digits: int = 1) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else MISSING


def _yes(value: Any) -> str:
    return {True: "yes", False: "no"}.get(value, MISSING)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "") -> list[str]:
    if not rows:
        return []
    cells = [[str(cell).replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    lines = [f"## {title}", "", *([note, ""] if note else []), f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in cells), ""]


# -- sections ------------------------------------------------------------------------------------------------------------------

Documents = Mapping[str, Mapping[str, Any]]


def _parts(documents: Documents, *names: str) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(file, part, what it holds), part by part."""
    return [
        (file, name, document["parts"][name])
        for name in names
        for file, document in documents.items()
        if isinstance(document["parts"].get(name), dict)
    ]


def _runs(documents: Documents) -> list[str]:
    rows = []
    for file, document in documents.items():
        machine, options = document.get("machine", {}), document.get("options", {})
        shown = machine.get("gpus") or []
        model = options.get("model_dir") if options.get("model_dir") not in (None, "None") else ""
        ready = ", ".join(f"{one.get('kind')} {_number(one.get('ready_s'))}" for one in document.get("servers", []))
        rows.append([
            file, "; ".join(shown) or MISSING, options.get("gpu", MISSING), options.get("tp", 1),
            f"{machine.get('cpus', MISSING)}, {machine.get('kernel', MISSING)}, Python {machine.get('python', MISSING)}",
            Path(model).name if model else f"dummy, {options.get('layers', MISSING)} layers",
            _yes({"True": True, "False": False}.get(str(options.get("prefix_caching")))), ready or MISSING,
            " ".join(f"{name}={value}" for name, value in machine.get("environment", {}).items()) or "-",
        ])  # fmt: skip
    head = ["file", "GPUs of the machine", "used", "ranks", "CPUs, kernel, Python", "model", "prefix cache", "ready, s", "set"]
    return _table("Runs", head, rows)


def _drains(documents: Documents) -> list[str]:
    rows = []
    for file, name, part in _parts(documents, "rescue", "guard", "control"):
        if "drains" not in part:
            continue
        by_rank = [one for one in part.get("releases_by_rank", []) if one]
        ranks = "; ".join(f"{rank}: {_spread([one.get(rank) for one in by_rank], 0)}" for rank in (by_rank[0] if by_rank else {}))
        rows.append([
            name, file, share(part["complete"], part["drains"]), f"{part['with_releases']} of {part['drains']}",
            _spread(part["releases"], 0), ranks or MISSING, _spread(part["stall_s"]), _number(part["gap_p50_ms"]),
            _number(part["gap_p99_ms"]), part["gaps"], part.get("stopped") or "-",
        ])  # fmt: skip
    head = ["part", "file", "ended by themselves", "with releases", "releases a drain", "by rank", "longest stand-still, s"]
    head += ["gap p50, ms", "gap p99, ms", "gaps", "stopped early"]
    return _table(
        "Drains",
        head,
        rows,
        "Rescue and control: guard off before each drain; guard: on. Medians with range; shares with their exact 95 % interval.",
    )


def _outputs(documents: Documents) -> list[str]:
    rows = []
    for file, _, part in _parts(documents, "outputs"):
        for pair in ("guarded / guarded again", "guarded / rescued"):
            found = [one[pair] for one in part.get("rounds", []) if pair in one]
            for what in ("drain", "after"):
                requests = [row for one in found for row in one[what]["requests"]]
                alike = [row["first_difference"] is None for row in requests]
                by = ", ".join(sorted({one[what]["by"] for one in found}))
                compared = sum(min(row["tokens"]) for row in requests)
                said = "the drain itself" if what == "drain" else "requests that go on from it"
                rows.append([pair, file, said, len(found), f"{sum(alike)} of {len(alike)}", compared, by or MISSING])
    return _table("Outputs", ["compared", "file", "what", "rounds", "requests alike", "tokens", "by"], rows)


def _interval(value: Mapping[str, Any] | None) -> str:
    if not value or value.get("mean") is None:
        return MISSING
    if value.get("low") is None or value.get("n", 0) < FEW:
        return f"{value['mean']:+.2f} (too few for an interval)"
    mean = f"{value['mean']:+.2f} ({value['low']:+.2f} to {value['high']:+.2f})"
    if value.get("median_low") is None:
        return mean
    return f"{mean}; median {value['median']:+.2f} ({value['median_low']:+.2f} to {value['median_high']:+.2f})"


def _costs(documents: Documents) -> list[str]:
    rows = []
    for file, _, part in _parts(documents, "cost"):
        for plan, one in part.items():
            if not isinstance(one, dict):
                continue
            # Files of before the windows: two short waves a pair, one estimator.
            old = "cost_percent" in one
            lost = one.get("cost_percent") if old else one.get("throughput_lost_percent")
            left_out = sum(one.get("left_out", {}).values())
            rows.append([
                plan, file, "two waves a pair" if old else f"windows of {one.get('window_s', 0):g} s", len(one.get("pairs", [])),
                "-" if old else left_out, _interval(lost), "-" if old else _interval(one.get("steps_lost_percent")),
                "-" if old else _interval(one.get("gap_longer_percent")),
                _number(one.get("tokens_per_s_off"), 0), "-" if old else _number(one.get("gap_ms_off"), 2),
            ])  # fmt: skip
    head = ["switch", "file", "method", "pairs", "left out", "tokens/s lost, %", "steps/s lost, %", "gap longer, %"]
    head += ["tokens/s off", "gap off, ms"]
    return _table(
        "Cost",
        head,
        rows,
        "Mean of the pairs with the 95 % interval of a bootstrap over pairs, then their median with its exact one (a few disturbed "
        "pairs cannot move it); minus: faster with the switch on. "
        "`none` turns nothing: what it shows is the method's own scatter.",
    )


def _unwedges(documents: Documents) -> list[str]:
    rows = []
    for file, name, part in _parts(documents, "unwedge", "unwedge-gdb", "unwedge-one-rank"):
        dry, done = part.get("dry") or {}, part.get("done") or {}
        document = done.get("document") if isinstance(done.get("document"), dict) else {}
        freed = "; ".join(
            f"rank {one.get('rank')}: {one.get('state')}, {one.get('writes')} writes, {_number(one.get('seconds'))} s"
            for one in (document or {}).get("ranks", [])
        )
        counted = ", ".join(f"{rank}: {count}" for rank, count in (part.get("releases_by_rank") or {}).items())
        survivors, further = part.get("survivors") or {}, part.get("further_requests") or {}
        rows.append([
            name, file, f"{_yes(part.get('wedged'))}, {part.get('live', '?')} live",
            f"{dry.get('status', '-')} / {done.get('status', '-')}", _number(done.get("seconds")) if done else "-", freed or "-",
            counted or MISSING, _yes(survivors.get("complete")), _yes((part.get("guarded / guarded again") or {}).get("equal")),
            _yes((part.get("guarded / unwedged") or {}).get("equal")),
            f"{further['served']} of {further['of']}" if further else MISSING, _yes(part.get("server_alive")),
        ])  # fmt: skip
    head = ["part", "file", "wedged", "status dry / done", "seconds", "what the tool says of each rank", "agents' releases by rank"]
    head += ["survivors ended", "guarded twice alike", "as guarded", "further requests", "server alive"]
    return _table("Unwedge", head, rows, "n = 1 a row: one wedge.")


def _one_rank(documents: Documents) -> list[str]:
    rows = []
    for file, _, part in _parts(documents, "unwedge-one-rank"):
        steps = part.get("steps", [])
        for number, step in enumerate(steps, 1):
            if SHOWN < number < len(steps):
                continue
            answer = step.get("answer", {})
            said = answer.get("error") or f"{answer.get('released')} released; then: {answer.get('why_no_more')}"
            by_rank = ", ".join(f"{rank}: {count}" for rank, count in step.get("releases_by_rank", {}).items())
            moved = step["tokens_after"] - step["tokens_before"]
            guard = ", ".join(_yes(one) for one in step.get("guard", []))
            rows.append([file, number, step["asked"], said, by_rank, moved, step.get("live_after"), guard])
    head = ["file", "step", "rank asked", "its answer", "released so far, by rank", "tokens after it", "still live", "guards on"]
    note = f"The first {SHOWN} steps and the last."
    return _table("One rank of two, then the other", head, rows, note)


def _failures(documents: Documents) -> list[str]:
    rows = []
    for file, document in documents.items():
        for name, part in document["parts"].items():
            why = (part.get("error") or part.get("failed") or part.get("not_run")) if isinstance(part, dict) else None
            if name != "_end" and why:
                rows.append([file, name, str(why)[:300]])
        rows += [[file, f"server {one.get('kind')}", str(one["failed"])[:300]] for one in document["servers"] if one.get("failed")]
    return _table("Failed or not run", ["file", "part", "why"], rows)
