"""The prefill's index workspace as a release fills it: its own function and kernel, executed over NumPy in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DeadlineError, KernelNotFoundError, UnavailableError
from ..forensics.records import CLASSES, Diagnosis, Evidence, Verdict, Window
from ..scenarios.launches import IndexWorkspace
from .child import package_path

__all__ = ["call_of", "judge_workspace", "stale_columns"]

_SOURCE = "vllm/models/deepseek_v4/common/ops/cache_utils.py"
_LIMIT_S = 60.0

Keep = Callable[[str, str, "bytes | str"], Evidence]


def call_of(what: IndexWorkspace) -> dict[str, Any]:
    """Two requests of a prefill chunk, six tokens; top-k indices 0, 1, 2 … in each row."""
    rows = sum(what.query_lens)
    starts = np.cumsum([0, *what.query_lens]).tolist()
    return {
        "topk_indices": [list(range(what.topk))] * rows, "query_start_loc": starts, "seq_lens": list(what.seq_lens),
        "gather_lens": list(what.seq_lens), "window_size": what.window, "compress_ratio": what.compress, "topk": what.topk,
        "M": what.rows_per_request, "N": what.rows_per_request // 2, "old": what.old,
    }  # fmt: skip


def stale_columns(indices: list[list[int]], lens: list[int]) -> list[int]:
    """Columns of each row behind its valid prefix that hold something else than -1."""
    return [sum(value != -1 for value in row[length:]) for row, length in zip(indices, lens, strict=True)]


def judge_workspace(
    what: IndexWorkspace, release: str, *, keep: Keep | None = None, run: Callable[..., Any] = subprocess.run
) -> tuple[Diagnosis, dict[str, Any]]:
    """(diagnosis, detail). KernelNotFoundError where the release has no such function, DownloadError, DeadlineError."""
    from ..kernels.release_sources import release_members

    found = release_members(release, [_SOURCE])
    if not found:
        raise KernelNotFoundError(f"{release} has no {_SOURCE}")
    source = next(iter(found.values())).decode("utf-8", "replace")
    call = call_of(what)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [package_path(), os.environ.get("PYTHONPATH")]))}
    try:
        done = run(
            [sys.executable, "-m", "dsv4_repro.kernels.shipped_python"], input=json.dumps({"source": source, "call": call}),
            capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"{release}'s function did not end within {_LIMIT_S:g} s") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise UnavailableError(f"{release}'s function gave no answer (status {done.returncode}): {done.stderr[-300:]}") from None
    if "error" in answer:
        raise UnavailableError(f"{release}'s function could not be run here: {answer['error']}")
    stale = stale_columns(answer["indices"], answer["lens"])
    detail = {"stale_columns": stale, "lens": answer["lens"], "old": what.old, "origin": "executed over NumPy", "source": _SOURCE}
    evidence = [keep("answers", "answers.json", json.dumps({**detail, **answer}))] if keep is not None else []
    where = f"combine_topk_swa_indices of {release}, executed over NumPy"
    if not any(stale):
        return _diagnosis("not-hung", "high", f"{where}: every row is -1 behind its valid prefix", evidence), detail
    largest = max(max(row) for row in answer["indices"])
    sentence = (
        f"{where}: {sum(stale)} entries behind the valid prefixes hold what the workspace held before, up to {largest}, where -1 "
        f"belongs; a sparse kernel that reads them takes them for KV positions, of which there are "
        f"{what.rows_per_request * len(what.seq_lens)}. The read itself was not run"
    )
    return _diagnosis("wrong-result", "high", sentence, evidence), detail


def _diagnosis(class_: str, confidence: str, sentence: str, evidence: list[Evidence]) -> Diagnosis:
    verdict = Verdict.model_validate({
        "class": class_, "cause": None, "confidence": confidence, "sentence": sentence,
        "signature": "vllm-55299" if class_ == "wrong-result" else None,
    })  # fmt: skip
    more = {"evidence": evidence, "window": Window(reached=True)}
    return Diagnosis.model_validate({"outcome": CLASSES[class_][1], "ground": "cpu", "verdict": verdict, **more})
