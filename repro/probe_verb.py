"""The verb ``probe``: an exec liveness probe. Quick, little imported, nothing touched but its own small state file."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..clock import SYSTEM, Clock
from ..errors import EvidenceError, SeveralServersError, UnavailableError, UsageError
from .console import printable
from .server_names import asked_by, http_address
from .serving.liveness import Liveness, by_counters, by_recorders, default_state_path, read_state, write_state
from .serving.questions import Question
from .serving.recorded_ranks import recorded_ranks

if TYPE_CHECKING:
    from .options import Common

__all__ = ["probe_schema", "run_probe"]

RINGS_S = 0.5
SCRAPE_S = 1.0
_STATUS = {"alive": 0, "stalled": 3, "unknown": 5}
_OUTCOME: dict[str, Literal["clean", "hang", "inconclusive"]] = {"alive": "clean", "stalled": "hang", "unknown": "inconclusive"}


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:64]
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked of a server, as far as flags and a PID tell. ``doubt``: that the process is not seen to be one; "" else."""

    folder: Path | None
    url: str | None = None
    workers: frozenset[int] | None = None
    doubt: str = ""


def _asked(agent_dir: Path | None, pid: int | None, clock: Clock) -> _Asked:
    if pid is None:
        return _Asked(agent_dir)
    from .serving.ranks import find_named

    target = find_named(pid, clock=clock)
    doubt = next((item.why.partition(": its tree")[0] for item in target.unread if item.what == "the server"), "")
    workers = frozenset(rank.pid for rank in target.ranks) or None
    return _Asked(agent_dir or target.agent_folder, target.base_url, workers, doubt)


def _recorders(folder: Path, workers: frozenset[int] | None, max_stall: float, clock: Clock) -> Liveness:
    try:
        found, why = Question("the recorders", lambda: recorded_ranks(folder, clock=clock), RINGS_S, clock).answer()
    except EvidenceError as error:
        return Liveness("unknown", str(error))
    if found is None:
        return Liveness("unknown", f"{why.what}: {why.why}" if why is not None else "the recorders did not answer")
    return by_recorders([rank for rank in found if workers is None or rank.pid in workers], max_stall)


def _counters(url: str, pid: int | None, state: Path | None, max_stall: float, clock: Clock) -> Liveness:
    from ..forensics.collect.engine_metrics import scrape

    reading = scrape(url, timeout_s=SCRAPE_S, clock=clock)
    if reading.health == 503:
        return Liveness("stalled", "/health says 503: the engine is dead")
    if pid is not None and reading.unread and all("refused" in item.why for item in reading.unread):
        # vLLM listens once it has loaded. Without a pid a server that is gone looks the same.
        return Liveness("alive", f"process {pid} runs and does not listen at {url}: it is starting, or ending")
    if not reading.values:
        why = "; ".join(f"{item.what}: {item.why}" for item in reading.unread) or "no counters"
        return Liveness("unknown", why)
    path = state or default_state_path(hashlib.sha256(url.encode()).hexdigest()[:16])
    found, remembered = by_counters(
        reading.values, read_state(path), server=url, boot=_boot(), now=clock.monotonic(), max_stall=max_stall
    )
    write_state(path, remembered)
    return found


def _look(max_stall: float, pid: int | None, url: str | None, agent_dir: Path | None, state: Path | None, clock: Clock) -> Liveness:
    try:
        with asked_by("probe --pid"):
            asked = _asked(agent_dir, pid, clock)
        where = url or asked.url
        nothing = Liveness("unknown", "no recorder, and its URL is not known (--url)")
        seen = _recorders(asked.folder, asked.workers, max_stall, clock) if asked.folder is not None else nothing
        if seen.state == "unknown" and where is not None:
            seen = _counters(where, pid, state, max_stall, clock)
        # "No recorder" of a process that is no server would send the reader looking for one.
        return replace(seen, text=f"{asked.doubt}; {seen.text}") if asked.doubt and seen.state == "unknown" else seen
    except SeveralServersError as error:
        return Liveness("unknown", f"{error}. {error.help_text}")
    except UnavailableError as error:
        return Liveness("unknown", str(error))


def probe_schema() -> dict[str, Any]:
    """The JSON Schema of ``probe --json``."""
    return {
        "title": "ProbeDocument",
        "type": "object",
        "required": ["schema", "outcome", "state", "text", "stalled_s", "exit_status"],
        "properties": {
            "schema": {"const": "dsv4-repro/probe/1"},
            "outcome": {"enum": sorted(_OUTCOME.values())},
            "state": {"enum": sorted(_STATUS)},
            "text": {"type": "string"},
            "stalled_s": {"type": ["number", "null"]},
            "exit_status": {"enum": sorted(_STATUS.values())},
        },
    }


def run_probe(
    common: Common, *, max_stall: float, pid: int | None, url: str | None, agent_dir: Path | None = None,
    state: Path | None = None, clock: Clock = SYSTEM,
) -> int:  # fmt: skip
    """The verb. Exit status: 0 alive, 3 stalled, 5 not known."""
    if pid is None and url is None and agent_dir is None:
        raise UsageError(
            "nothing to probe", help_text="dsv4-repro probe --max-stall 60 --url http://127.0.0.1:8000 (or --pid, --agent-dir)"
        )
    url = http_address(url, "--url") if url is not None else None
    found = _look(max_stall, pid, url, agent_dir, state, clock)
    status = _STATUS[found.state]
    text = printable(f"{found.state}: {found.text}")
    document = {
        "schema": "dsv4-repro/probe/1", "outcome": _OUTCOME[found.state], "state": found.state, "text": found.text,
        "stalled_s": found.stalled_s, "exit_status": status,
    }  # fmt: skip
    if common.out is not None:
        from .atomic import keep_document

        keep_document(common.out, "probe", document)
    if common.as_json:
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stderr.write(text + "\n")
    else:
        sys.stdout.write(text + "\n")
    return status
