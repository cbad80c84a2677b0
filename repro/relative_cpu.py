"""One row of a scenario on the CPU: a launch interpreted under so many schedules, a host's launch computed, or a drain's lengths.

The diagnosis comes from the device's state or from the answers, by the same code that judges a core dump; what a row expects is
never looked at here. Nothing is measured on a GPU.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..clock import Deadline
from ..forensics.device_state import GridState
from ..forensics.records import CLASSES, Diagnosis, Evidence, Verdict, Window
from ..forensics.wrong_rows import PUBLISHED, explain_wrong_rows
from ..kernels.abi import ARRIVAL_COUNTER_OFFSET, RELEASE_COUNT, ROW_STATE_SIZE
from ..scenarios.drain import DrainPlan
from ..scenarios.drain_steps import decode_steps
from ..scenarios.launches import CooperativeLaunch, CrossRank, DrainBatches, HostLaunch, IndexWorkspace, Launch, Row, SamplerLaunch
from .interpreted_state import interpreted_state
from .row_tries import Ended, Keep, Tried, try_schedules

if TYPE_CHECKING:
    from ..forensics.device_state import DeviceState
    from ..kernels.image import KernelImage
    from ..kernels.reference import RowVerdict
    from ..kernels.sass.topk import TopKRun

__all__ = ["judge_row"]


def judge_row(
    row: Row,
    *,
    sm: int = 120,
    seed: int = 0,
    count_all: bool = False,
    keep: Keep | None = None,
    deadline: Deadline | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> Tried:
    """Run a row on the CPU. ``count_all``: go through every schedule even after a failure, for a rate.

    KernelNotFoundError, DownloadError, ToolMissingError where the row's kernel is not to be had; DeadlineError.
    """
    if isinstance(row.what, HostLaunch):
        ended = _host(row.what)
    elif isinstance(row.what, DrainBatches):
        ended = _batches(row.what)
    elif isinstance(row.what, CooperativeLaunch):
        from .cooperative_cpu import judge_cooperative

        diagnosis, detail = judge_cooperative(row.what, row.kernel, sm=sm, keep=keep, deadline=deadline)
        ended = Ended(diagnosis, detail)
    elif isinstance(row.what, IndexWorkspace):
        from .sentinel_cpu import judge_workspace

        diagnosis, detail = judge_workspace(row.what, row.kernel, keep=keep)
        ended = Ended(diagnosis, detail)
    elif isinstance(row.what, CrossRank):
        from .crossrank_cpu import judge_cross_rank

        diagnosis, detail = judge_cross_rank(row.what, row.kernel, sm=sm, keep=keep, deadline=deadline)
        ended = Ended(diagnosis, detail)
    elif isinstance(row.what, SamplerLaunch):
        from .sampler_cpu import judge_sampler

        return judge_sampler(row, row.what, sm=sm, seed=seed, count_all=count_all, keep=keep, deadline=deadline, progress=progress)
    else:
        return _launches(row, row.what, sm, seed, count_all, keep, deadline, progress)
    verdict = ended.diagnosis.verdict
    return Tried(row, ended, Counter({(verdict.class_, verdict.cause): 1}))


def _diagnosis(
    class_: str, cause: str | None, sentence: str, confidence: str = "high", *, signature: str | None = None, **more: Any
) -> Diagnosis:
    verdict = Verdict.model_validate(
        {"class": class_, "cause": cause, "confidence": confidence, "sentence": sentence, "signature": signature}
    )
    return Diagnosis.model_validate({"outcome": CLASSES[class_][1], "ground": "cpu", "verdict": verdict, **more})


# ---------------------------------------------------------------------------------------------------------------------------------
# Launches


def _launches(
    row: Row,
    launch: Launch,
    sm: int,
    seed: int,
    count_all: bool,
    keep: Keep | None,
    deadline: Deadline | None,
    progress: Callable[[str], None],
) -> Tried:
    from ..kernels.sass.program import Program
    from ..kernels.select import select_kernel

    image = select_kernel(row.kernel, sm=sm, top_k=launch.case.k, vec=launch.case.vec)
    program = Program.from_image(image)
    tries = launch.schedules if launch.schedule != "smallest-pc" else 1
    return try_schedules(
        row, tries, lambda number, kept: _one(program, image, launch, seed + number, kept, deadline), count_all=count_all,
        keep=keep, deadline=deadline, progress=progress,
    )  # fmt: skip


def _one(program: Any, image: KernelImage, launch: Launch, seed: int, keep: Keep | None, deadline: Deadline | None) -> Ended:
    from ..kernels.sass.topk import run_topk

    case = launch.case
    logits, lengths = case.logits(), np.array(case.lengths, np.int32)
    run = run_topk(
        program, logits, lengths, k=case.k, chunk_size=case.chunk_size, ctas_per_group=case.ctas_per_group, groups=case.groups,
        max_seq_len=case.max_seq_len, dynamic_smem=case.dynamic_smem, sms=launch.resident, seed=seed, schedule=launch.schedule,
        deadline=deadline, counters=launch.counter, weak=launch.weak,
    )  # fmt: skip
    result = run.result
    detail: dict[str, Any] = {
        "seed": seed,
        "schedule": launch.schedule,
        "weak_memory_order": launch.weak,
        "kind": result.kind,
        "proof": result.proof,
        "counters": list(run.counters),
        "exited": list(result.exited),
        "resident": [item.block for item in result.resident],
        "never_started": list(result.never_started),
        "warp_instructions": result.warp_instructions,
    }
    if result.kind in ("deadlock", "livelock"):
        return _hung(run, image, launch, logits, lengths, detail, keep)
    if result.kind == "fault":
        fault = result.fault
        cause = "misaligned" if fault is not None and fault.kind == "misaligned" else "illegal-access"
        return Ended(_diagnosis("gpu-fault", cause, result.proof), detail)
    if result.kind == "budget":
        return Ended(_diagnosis("unknown", None, f"{result.proof}; neither an end nor a deadlock was shown", "low"), detail)
    verdicts = run.verdicts(logits, lengths)
    return Ended(_completed(run, verdicts, launch, logits, detail, keep, shipped=image.origin.startswith("vllm")), detail)


def _completed(
    run: TopKRun, verdicts: tuple[RowVerdict, ...], launch: Launch, logits: Any, detail: dict[str, Any],
    keep: Keep | None, *, shipped: bool,
) -> Diagnosis:  # fmt: skip
    case = launch.case
    wrong = [verdict for verdict in verdicts if not verdict.ok]
    detail["wrong_rows"] = [verdict.text for verdict in wrong[:20]]
    if not wrong:
        many = f"all {len(verdicts)} rows" if len(verdicts) > 1 else "the row"
        return _diagnosis("not-hung", None, f"the launch completed and {many} came out right", window=Window(reached=True))
    known = not launch.early_exit and min(case.lengths) >= 0  # an unguarded kernel shares rows of negative length too
    expected = case.counters() if known else ()
    found = explain_wrong_rows(
        verdicts, case.lengths, logits, case.k, case.groups, counters=run.counters, expected_counters=expected
    )  # fmt: skip
    evidence = [_kept_answers(run, verdicts, detail, keep)] if keep is not None else []
    sentence = "the kernel finished with a wrong answer: " + "; ".join(found.reasons)
    return _diagnosis(
        "wrong-result", found.cause, sentence, "high" if found.cause else "medium", evidence=evidence, window=Window(reached=True),
        signature=PUBLISHED.get(found.cause or "") if shipped else None,
    )  # fmt: skip


def _kept_answers(run: TopKRun, verdicts: tuple[RowVerdict, ...], detail: dict[str, Any], keep: Keep) -> Evidence:
    document = {**detail, "origin": "interpreted", "rows": [verdict.text for verdict in verdicts[:200]]}
    keep("row-states", "row_states.bin", run.row_states)
    return keep("answers", "answers.json", json.dumps(document, indent=1))


def _hung(
    run: TopKRun, image: KernelImage, launch: Launch, logits: Any, lengths: Any, detail: dict[str, Any], keep: Keep | None
) -> Ended:
    from ..forensics.diagnose import diagnose_state

    params = run.params
    counters = {
        params.row_states + group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET: value & 0xFFFFFFFF
        for group, value in enumerate(run.counters)
    }
    device = (f"interpreted sm_{image.sm}", image.sm, run.machine.sms)
    state = interpreted_state(run.machine, run.result, image, params.pack(), device=device, memory=counters)
    host = ""
    if launch.queued:
        waiting = GridState(device=0, grid_id=2, kernel=launch.queued, grid_dim=(64, 1, 1), block_dim=(128, 1, 1), ctas=())
        state = replace(state, grids=(*state.grids, waiting))
        host = f"the host stands in the launch of {launch.queued}, queued behind"
    evidence: list[Evidence] = []
    if keep is not None:
        evidence.append(keep("row-states", "row_states.bin", run.row_states))
        evidence.append(keep("interpreter", "interpreter.json", json.dumps(detail, indent=1)))
        core = _core(state, params.row_states, run.row_states)
        if core is not None:
            evidence.append(keep("gpu-core", "interpreted.nvcudmp", core))
    diagnosis = diagnose_state(state, ground="cpu", evidence=evidence, host=host, extra={"proof": run.result.proof})
    detail["unwedge"] = _release(run, counters, logits, lengths)
    return Ended(diagnosis, detail)


def _core(state: DeviceState, address: int, row_states: bytes) -> bytes | None:
    """The state as a core dump in the driver's format; None where nothing could be written (the JSON beside it has the facts)."""
    import tempfile

    from ..forensics.corewriter import CoreOptions, write_core

    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "core"
            write_core(path, state, CoreOptions(memory={address: row_states}))
            return path.read_bytes()
    except OSError:
        return None


def _release(run: TopKRun, counters: dict[int, int], logits: Any, lengths: Any) -> dict[str, Any]:
    """The experiment: a large count into every counter, and on with the run."""
    from ..kernels.sass.topk import collect

    for address in counters:
        run.machine.poke(address, RELEASE_COUNT)
    result = run.machine.resume()
    after = collect(run.machine, run.params, len(counters), result)
    wrong = [verdict.row for verdict in after.verdicts(logits, lengths) if not verdict.ok]
    return {"retired": result.completed, "kind": result.kind, "rows_wrong": wrong, "origin": "interpreted"}


# ---------------------------------------------------------------------------------------------------------------------------------
# Without a launch


def _host(what: HostLaunch) -> Ended:
    """What the launcher of a release does, computed: refused, another kernel, oversubscribed, or a launch that fits."""
    from ..kernels.plan import device_named, plan_launch

    device = device_named(what.device)
    plan = plan_launch(what.rows, what.stride, what.max_seq_len, what.top_k, device, release_profile=what.release)
    detail = {"lines": plan.lines(), "path": plan.path, "grid": plan.grid, "resident_cap": plan.resident_cap, "origin": "computed"}
    head = f"vLLM {what.release} on {device.name}: "
    if plan.path == "refused":
        return Ended(_diagnosis("launch-refused", "oversubscribed", head + plan.refusal, signature="vllm-41834"), detail)
    if plan.path == "persistent" and plan.oversubscribed:
        text = f"{plan.grid} CTAs are launched, {plan.resident_cap} can be resident: some never start"
        return Ended(_diagnosis("unknown", None, f"{head}{text}; computed, nothing was run", "low"), detail)
    shared = plan.path == "persistent" and plan.ctas_per_group > 1 and not plan.peers_leave
    if shared and plan.grid >= plan.resident_cap:
        text = f"members take all {plan.resident_cap} slots: one CTA of another kernel that holds a slot keeps a member out"
        return Ended(_diagnosis("unknown", None, f"{head}{text}; computed, nothing was run", "low"), detail)
    if plan.path == "persistent":
        fits = f"{plan.grid} CTAs, {plan.resident_cap} can be resident"
        if plan.peers_leave and plan.grid > plan.resident_cap:
            fits += "; peers leave at entry, so the rest get their turn"
    else:
        fits = f"the {plan.path} kernel takes the batch: one CTA a row, no barrier between CTAs"
    return Ended(_diagnosis("not-hung", None, head + fits, "medium", window=Window(reached=True)), detail)


def _batches(what: DrainBatches) -> Ended:
    """The producer's paths and lengths over a whole drain, computed."""
    plan = DrainPlan(**dict(what.plan))
    steps = decode_steps(plan, what.producer, sm=what.sm)
    paths = Counter(step.path for step in steps)
    padded = [step for step in steps if step.padded_requests]
    least = min((length for step in steps for length in step.lengths), default=0)
    negative = sum(length < 0 for step in steps for length in step.lengths)
    detail = {
        "steps": len(steps),
        "paths": dict(paths),
        "padded_steps": len(padded),
        "graph_rows": sorted({step.graph_rows for step in steps}),
        "shortest": least,
        "negative": negative,
        "origin": "computed",
    }
    where = f"next_n {plan.next_n}, {len(steps)} steps, {len(padded)} of them padded, producer " + ", ".join(
        f"{path} x {count}" for path, count in sorted(paths.items())
    )
    if negative:
        sentence = f"{where}: {negative} negative lengths reach the kernel; computed, nothing was run"
        return Ended(_diagnosis("unknown", None, sentence, "low"), detail)
    sentence = f"{where}: the shortest length is {least}, nothing negative arises"
    return Ended(_diagnosis("not-hung", None, sentence, "medium", window=Window(reached=bool(padded))), detail)
