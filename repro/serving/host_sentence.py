"""What the host's threads were doing, as one sentence, from the stacks and the log that were captured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import ReproError
from ...forensics.evidence.archive import Budget
from ...forensics.evidence.facts import ThreadSample
from ...forensics.evidence.gather import read_paths
from ...forensics.records import Evidence

__all__ = ["host_sentence"]

_READ_S = 10.0
#: Word of a thread's wait to what is said of it, in the order of telling.
_SAID = (
    ("cuda-event", "for the GPU (a CUDA event or stream)"),
    ("cuda-launch", "in a kernel or graph launch (its queue is full)"),
    ("collective-native", "in a collective"),
    ("engine-wait-reply", "for the workers' reply"),
)


def host_sentence(files: Sequence[Path], listed: Sequence[Evidence]) -> tuple[str, tuple[str, ...]]:
    """The sentence and the ids of the files that it is from; empty if no stack and no line of the log says anything."""
    wanted = [path for path in files if path.name.startswith(("host_stacks", "engine_log"))]
    try:
        case = read_paths(wanted, Budget(seconds=_READ_S)) if wanted else None
    except (ReproError, OSError):
        case = None
    if case is None:
        return "", ()
    parts: list[str] = []
    sources: list[str] = []
    for word, said in _SAID:
        threads = [thread for thread in case.threads if thread.waits == word]
        names = list(dict.fromkeys(_who(thread) for thread in threads))
        if names:
            more = " and others" if len(names) > 4 else ""
            parts.append(f"{', '.join(names[:4])}{more} wait{'s' if len(names) == 1 else ''} {said}")
            sources += [thread.ref.source for thread in threads]
    waits = [event for event in case.events if event.kind in ("shm-wait", "rpc-timeout")]
    if waits:
        parts.append(f"the engine printed {len(waits)} waiting line{'s' if len(waits) > 1 else ''}")
        sources += [event.ref.source for event in waits]
    named = {source.rpartition("/")[2] for source in sources}
    ids = tuple(item.id for item in listed if item.path is not None and item.path.rpartition("/")[2] in named)
    return "; ".join(parts), ids


def _who(thread: ThreadSample) -> str:
    roles = {"engine": "the engine", "api": "the API server", "worker": "a worker"}
    owner = f"rank {thread.rank}" if thread.rank is not None else roles.get(thread.role or "", f"process {thread.pid}")
    return f"{thread.thread or 'a thread'} of {owner}"
