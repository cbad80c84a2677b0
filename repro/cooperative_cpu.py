"""A release's ``cooperative_topk`` interpreted: rows of at most k candidates, which one CTA of the cluster does alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from ..clock import Deadline
from ..forensics.records import CLASSES, Diagnosis, Evidence, Verdict, Window
from ..forensics.wrong_rows import explain_wrong_rows
from ..kernels.cooperative import CLUSTER, CooperativeParams, cooperative_image
from ..kernels.reference import check_rows
from ..kernels.topk_cases import make_row
from ..scenarios.launches import CooperativeLaunch

__all__ = ["code_for", "judge_cooperative", "logits_of"]

_THREADS = 1024
_SMEM = 200 * 1024
_UNWRITTEN = -0x01010102

Keep = Callable[[str, str, "bytes | str"], Evidence]


def code_for(sm: int) -> int:
    """The architecture whose code is interpreted: releases carry the kernel for sm_90 and sm_100 alone."""
    return sm if sm in (90, 100) else 90


def logits_of(what: CooperativeLaunch) -> Any:
    """float32 [rows, stride], normal values, also beyond a row's length."""
    rng = np.random.default_rng([0x636F6F70, len(what.lengths)])
    return np.stack([make_row("normal", what.stride, rng) for _ in what.lengths])


def judge_cooperative(
    what: CooperativeLaunch, kernel: str, *, sm: int, keep: Keep | None = None, deadline: Deadline | None = None
) -> tuple[Diagnosis, dict[str, Any]]:
    """(diagnosis, detail). KernelNotFoundError where the release has no such kernel; DownloadError, ToolMissingError."""
    from ..kernels.sass.machine import Machine
    from ..kernels.sass.memory import Memory
    from ..kernels.sass.program import Program

    image = cooperative_image(kernel, code_for(sm), what.top_k)
    rows, k = len(what.lengths), what.top_k
    logits, lengths = logits_of(what), np.array(what.lengths, np.int32)
    memory = Memory()
    params = CooperativeParams(
        memory.allocate("input", logits), memory.allocate("output", np.full(rows * k, _UNWRITTEN, np.int32)),
        memory.allocate("lengths", lengths), memory.allocate("ties", rows << 14), rows, what.stride,
    )  # fmt: skip
    machine = Machine(Program.from_image(image), sms=rows * CLUSTER, memory=memory)
    result = machine.launch((rows, CLUSTER, 1), _THREADS, params.pack(), _SMEM, deadline=deadline)
    detail: dict[str, Any] = {"kind": result.kind, "proof": result.proof, "sm": image.sm, "origin": "interpreted"}
    where = f"sm_{image.sm} code of {image.origin}, interpreted"
    if not result.completed:
        return _diagnosis("unknown", None, f"{where}: {result.proof}; a row that needs the whole cluster?", "low"), detail
    indices = memory.array(params.output, rows * k, np.int32).astype(np.int32).reshape(rows, k)
    verdicts = check_rows(indices, logits, lengths, k)
    wrong = [verdict for verdict in verdicts if not verdict.ok]
    detail["wrong_rows"] = [verdict.text for verdict in wrong]
    if not wrong:
        return _diagnosis("not-hung", None, f"{where}: all {rows} rows came out right"), detail
    found = explain_wrong_rows(verdicts, what.lengths, logits, k, rows, counters=(), expected_counters=())
    ordered = [verdict.row for verdict in wrong if list(indices[verdict.row]) == list(range(k))]
    detail["rows_of_0_to_k"] = ordered
    evidence = [keep("answers", "answers.json", json.dumps(detail, indent=1))] if keep is not None else []
    said = "; ".join(found.reasons) + (f"; rows {ordered} hold 0 to {k - 1} in order" if ordered else "")
    sentence = f"the kernel finished with a wrong answer ({where}): {said}"
    return _diagnosis("wrong-result", found.cause, sentence, "high" if found.cause else "medium", evidence), detail


def _diagnosis(
    class_: str, cause: str | None, sentence: str, confidence: str = "high", evidence: list[Evidence] | None = None
) -> Diagnosis:
    verdict = Verdict.model_validate({"class": class_, "cause": cause, "confidence": confidence, "sentence": sentence})
    more = {"evidence": evidence or [], "window": Window(reached=True)}
    return Diagnosis.model_validate({"outcome": CLASSES[class_][1], "ground": "cpu", "verdict": verdict, **more})
