"""The files of a capture as evidence: ids, which rank's they are, and which of them the classifier can read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ReproError, RunStoreError
from ...forensics.evidence.archive import Budget
from ...forensics.evidence.gather import read_paths
from ...forensics.records import Evidence
from ..ground import Artefact, CaptureOutcome
from ..runstore import file_sha256
from .records import Rank

__all__ = ["evidence_of", "ids_of", "rank_evidence", "ras_state", "text_files"]

#: Kinds that the readers of ``forensics.evidence`` know. Dumps are judged from their state, documents of ours by us.
_TEXT = frozenset({"cuda-gdb", "host-stacks", "engine-log", "metrics", "nccl-ras", "kernel-log", "proc-text", "gpu-readings"})
#: A core dump of a server is 140 MB: hashed; what is larger is not.
_MOST_HASHED = 1 << 30
_MOST_COMMS = 64


def _artefacts(captures: Sequence[CaptureOutcome]) -> list[tuple[Artefact, CaptureOutcome]]:
    return [(artefact, capture) for capture in captures for artefact in capture.artefacts]


def evidence_of(captures: Sequence[CaptureOutcome], folder: Path) -> tuple[Evidence, ...]:
    """Evidence E1, E2 … in the order of capture, paths relative to ``folder``."""
    found: list[Evidence] = []
    for artefact, _ in _artefacts(captures):
        try:
            digest = file_sha256(artefact.path)[0] if artefact.path.stat().st_size <= _MOST_HASHED else None
        except (OSError, RunStoreError):
            continue
        found.append(
            Evidence(
                id=f"E{len(found) + 1}", kind=artefact.kind, path=_relative(artefact.path, folder), sha256=digest,
                origin=artefact.origin,
            )
        )  # fmt: skip
    return tuple(found)


def _relative(path: Path, folder: Path) -> str:
    try:
        return str(path.relative_to(folder.absolute()))
    except ValueError:
        return str(path)


def _same_file(item: Evidence, path: Path) -> bool:
    """Whether an index entry names this file: its path is relative to a folder above."""
    return item.path is not None and (str(path) == item.path or str(path).endswith("/" + item.path))


def ids_of(
    listed: Sequence[Evidence], captures: Sequence[CaptureOutcome], kinds: Sequence[str], pid: int | None
) -> tuple[str, ...]:
    """Ids of the files of these kinds, of one process if ``pid`` is given. A ring names its process in its file name."""
    wanted = [
        artefact.path
        for artefact, capture in _artefacts(captures)
        if artefact.kind in kinds and (pid is None or capture.facts.get("pid") == pid or f"-{pid}-" in f"-{artefact.path.stem}-")
    ]
    return tuple(item.id for item in listed if any(_same_file(item, path) for path in wanted))


def rank_evidence(listed: Sequence[Evidence], captures: Sequence[CaptureOutcome], rank: Rank, folder: Path) -> tuple[Evidence, ...]:
    """What was read of one rank."""
    paths = [artefact.path for artefact, capture in _artefacts(captures) if capture.facts.get("pid") == rank.pid]
    return tuple(item for item in listed if any(_same_file(item, path) for path in paths))


def ras_state(files: Sequence[Path]) -> dict[str, Any] | None:
    """The communicators as NCCL's RAS told them: launches by operation and rank (or group of ranks), and whether two answers agree.

    None where RAS gave no answer that could be read; ``unchanged`` None where there was one answer only.
    """
    answers = [path for path in files if path.name.startswith("nccl_ras-")]
    if not answers:
        return None
    try:
        found = read_paths(answers, Budget(seconds=5.0)).ras
    except (ReproError, OSError):
        return None
    if not found:
        return None
    told = [
        [
            {"name": comm.name, "status": comm.status, "counts": {op: dict(by) for op, by in comm.counts.items()},
             "groups": {op: [list(pair) for pair in pairs] for op, pairs in comm.groups.items()},
             "missing": list(comm.missing)}
            for comm in query.comms[:_MOST_COMMS]
        ]
        for query in found
    ]  # fmt: skip
    return {
        "answers": len(found),
        "words": [sorted(set(query.errors)) for query in found],
        "unchanged": told[0] == told[-1] if len(told) > 1 else None,
        "communicators": told[-1],
    }


def text_files(captures: Sequence[CaptureOutcome]) -> list[Path]:
    """What the classifier reads, in the order of capture."""
    return [artefact.path for artefact, _ in _artefacts(captures) if artefact.kind in _TEXT and artefact.path.is_file()]
