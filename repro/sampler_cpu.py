"""FlashInfer's multi-CTA top-k mask interpreted: its shipped source, compiled here, under one order of execution after another."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..clock import Deadline
from ..forensics.records import CLASSES, Diagnosis, Evidence, Verdict, Window
from ..kernels.abi import ARRIVAL_COUNTER_OFFSET, RELEASE_COUNT, THREADS_PER_CTA
from ..kernels.flashinfer import ROW_STATE_ROOM, SamplerParams, flashinfer_image, sampler_shape
from ..kernels.topk_cases import make_row
from ..scenarios.launches import Row, SamplerLaunch
from .interpreted_state import interpreted_state
from .row_tries import Ended, Keep, Tried, try_schedules

__all__ = ["judge_sampler", "mask_faults", "pivots_differ", "sampler_logits"]

#: Shared memory that a CTA may have on the cards for which the defect was reported (SM120, SM121), bytes.
_SMEM_99_KIB = 101376


def sampler_logits(what: SamplerLaunch) -> NDArray[np.float32]:
    """float32 [1, vocabulary], normal values."""
    return make_row("normal", what.vocabulary, np.random.default_rng([0x73616D70, what.vocabulary]))[None, :]


def mask_faults(masked: NDArray[np.float32], logits: NDArray[np.float32], top_k: int) -> list[str]:
    """What is wrong with each row: kept must be all values from the k-th on, unchanged, and all others -inf."""
    faults = []
    for row, (got, given) in enumerate(zip(masked, logits, strict=True)):
        wanted = np.where(given >= np.sort(given)[-top_k], given, np.float32(-np.inf))
        wrong = int(np.count_nonzero(got != wanted))
        if wrong:
            faults.append(f"row {row}: {wrong} of {len(given)} values are not those of a mask of the {top_k} largest")
    return faults


def pivots_differ(masked: NDArray[np.float32], logits: NDArray[np.float32], chunk: int) -> bool:
    """Whether the blocks of one row ([vocabulary] each) cut at different values: what one dropped is above what another kept."""
    kept = np.isfinite(masked)
    dropped = [logits[at : at + chunk][~kept[at : at + chunk]] for at in range(0, len(logits), chunk)]
    held = [logits[at : at + chunk][kept[at : at + chunk]] for at in range(0, len(logits), chunk)]
    sound = all(not len(low) or not len(high) or low.max() < high.min() for low, high in zip(dropped, held, strict=True))
    highest = max((low.max() for low in dropped if len(low)), default=-np.inf)
    lowest = min((high.min() for high in held if len(high)), default=np.inf)
    return sound and bool(highest > lowest)


def judge_sampler(
    row: Row, what: SamplerLaunch, *, sm: int = 120, seed: int = 0, count_all: bool = False, keep: Keep | None = None,
    deadline: Deadline | None = None, progress: Callable[[str], None] = lambda _text: None,
) -> Tried:  # fmt: skip
    """As ``relative_cpu.judge_row``. ToolMissingError where NVRTC brings no headers, DownloadError, KernelNotFoundError."""
    from ..kernels.sass.program import Program

    progress(f"{row.name}: getting {row.kernel}")
    image = flashinfer_image(row.kernel, sm)
    program = Program.from_image(image)
    return try_schedules(
        row, what.schedules, lambda number, kept: _one(program, image, what, seed + number, kept, deadline), count_all=count_all,
        keep=keep, deadline=deadline, progress=progress,
    )  # fmt: skip


def _one(program: Any, image: Any, what: SamplerLaunch, seed: int, keep: Keep | None, deadline: Deadline | None) -> Ended:
    from ..kernels.sass.machine import Machine
    from ..kernels.sass.memory import Memory

    logits = sampler_logits(what)
    ctas, chunk, smem = sampler_shape(what.vocabulary, _SMEM_99_KIB)
    memory = Memory()
    params = SamplerParams(
        memory.allocate("logits", logits), memory.allocate("masked", np.zeros_like(logits)),
        memory.allocate("row_states", np.zeros(ROW_STATE_ROOM // 4, np.uint32)), what.top_k, what.vocabulary, 1, chunk, ctas,
    )  # fmt: skip
    machine = Machine(program, sms=ctas, memory=memory, seed=seed, schedule=what.schedule)
    result = machine.launch(ctas, THREADS_PER_CTA, params.pack(), smem, deadline=deadline)
    address = params.row_states + ARRIVAL_COUNTER_OFFSET
    counter = int(memory.array(address, 1, np.int32)[0])

    def mask() -> NDArray[np.float32]:
        return memory.array(params.masked, what.vocabulary, np.float32).astype(np.float32)[None, :]

    detail: dict[str, Any] = {
        "seed": seed, "schedule": what.schedule, "kind": result.kind, "proof": result.proof, "counters": [counter],
        "exited": list(result.exited), "resident": [item.block for item in result.resident], "ctas_per_group": ctas,
        "never_started": list(result.never_started), "warp_instructions": result.warp_instructions, "origin": "interpreted",
    }  # fmt: skip
    where = f"sm_{image.sm} code of {image.origin}'s source, compiled here and interpreted"
    if result.completed:
        wrong = mask_faults(mask(), logits, what.top_k)
        if wrong:
            if pivots_differ(mask()[0], logits[0], chunk):
                wrong[0] += "; its blocks cut at different values, as where some read a histogram before all had added to it"
            kept = [keep("answers", "answers.json", json.dumps({**detail, "wrong": wrong}, indent=1))] if keep else []
            return Ended(_diagnosis("wrong-result", f"the kernel finished with a wrong mask ({where}): {wrong[0]}", kept), detail)
        return Ended(_diagnosis("not-hung", f"{where}: the launch completed and the mask came out right"), detail)
    if result.kind not in ("deadlock", "livelock"):
        return Ended(_diagnosis("unknown", f"{where}: {result.proof}", confidence="low"), detail)
    from ..forensics.diagnose import diagnose_state

    state = interpreted_state(
        machine, result, image, params.pack(), device=(f"interpreted sm_{image.sm}", image.sm, ctas),
        memory={address: counter & 0xFFFFFFFF},
    )  # fmt: skip
    evidence: list[Evidence] = []
    if keep is not None:
        evidence.append(keep("row-states", "row_states.bin", memory.read(params.row_states, ROW_STATE_ROOM)))
        evidence.append(keep("interpreter", "interpreter.json", json.dumps(detail, indent=1)))
    diagnosis = diagnose_state(state, ground="cpu", evidence=evidence, host="", extra={"proof": result.proof})
    machine.poke(address, RELEASE_COUNT)
    after = machine.resume()
    detail["unwedge"] = {
        "retired": after.completed,
        "kind": after.kind,
        "rows_wrong": [0] if mask_faults(mask(), logits, what.top_k) else [],
        "origin": "interpreted",
    }
    return Ended(diagnosis, detail)


def _diagnosis(class_: str, sentence: str, evidence: list[Evidence] | None = None, confidence: str = "high") -> Diagnosis:
    verdict = Verdict.model_validate({"class": class_, "cause": None, "confidence": confidence, "sentence": sentence})
    more = {"evidence": evidence or [], "window": Window(reached=True)}
    return Diagnosis.model_validate({"outcome": CLASSES[class_][1], "ground": "cpu", "verdict": verdict, **more})
