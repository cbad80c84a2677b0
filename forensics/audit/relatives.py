"""Related defects, a row each: what the launch arithmetic, the machine code and a run of it on the CPU ground say about this
build."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...clock import SYSTEM, Clock, Deadline
from ...errors import ReproError
from ...kernels.devices import DeviceDescription, device_for_sm
from ...kernels.image import KernelImage
from ...kernels.plan import LaunchPlan, ReleaseProfile, max_chunk_elements, plan_launch, smem_budget
from ...kernels.sass.program import Program
from ...kernels.sass.slice import SliceFacts
from ...kernels.sass.topk import run_topk
from .recipe import Recipe
from .verdicts import RelativeFinding

__all__ = ["histogram_ring", "occupancy", "row_state"]

#: One group of four CTAs handles these rows in turn: long, short, long … (vLLM #49139).
RING_LENGTHS = (40000, 1000, 39999, 25, 33000, 9000, 38000)
_LONGEST_ROW = 1 << 22


def _plan(rows: int, stride: int, recipe: Recipe, device: DeviceDescription, profile: ReleaseProfile) -> LaunchPlan:
    return plan_launch(rows, stride, stride, recipe.top_k, device, release_profile=profile)


def occupancy(recipe: Recipe, sm: int, profile: ReleaseProfile, note: str) -> list[RelativeFinding]:
    """#41189 and its fallback (#41834, #54110): can a launch need more CTAs than can be resident, and where is headroom not kept?

    Computed from the launcher's arithmetic for 4, 8 and 32 rows as wide as one more CTA each, with max_seq_len equal to the width.
    """
    arch = f"sm_{sm}"
    number = "vllm#41189"
    try:
        device = device_for_sm(sm)
        plans = []
        for rows in (4, 8, 32):
            step = max_chunk_elements(smem_budget(rows, device), 4)
            for ctas in range(2, 2 * device.num_sms + 3):
                stride = min((ctas - 1) * step + 4, _LONGEST_ROW)
                plans.append(_plan(rows, stride, recipe, device, profile))
                if stride == _LONGEST_ROW:
                    break
    except ReproError as error:
        return [RelativeFinding(name="co-residency", number=number, arch=arch, word="CANNOT TELL", how="computed", why=str(error))]
    cooperative = [plan for plan in plans if not plan.peers_leave]
    never = [plan for plan in cooperative if plan.path == "persistent" and plan.oversubscribed]
    bare = [
        plan for plan in cooperative if plan.path == "persistent" and not plan.oversubscribed and plan.grid >= plan.resident_cap
    ]
    other = [
        plan for plan in cooperative if plan.path in ("refused", "decode", "filtered") and plan.ctas_per_group > plan.resident_cap
    ]
    findings: list[RelativeFinding] = []
    on = f"{device.name}, {note}"
    if never:
        first = min(never, key=lambda plan: plan.stride)
        why = (
            f"rows of {first.stride} launch {first.grid} CTAs where {first.resident_cap} can be resident: members never start "
            f"({on})"
        )
        findings.append(RelativeFinding(name="co-residency", number=number, arch=arch, word="VULNERABLE", how="computed", why=why))
    elif not profile.headroom:
        why = (
            f"no CTA slot is kept free when the barrier is needed; kernels of other streams can keep a member from starting ({on})"
        )
        findings.append(RelativeFinding(name="co-residency", number=number, arch=arch, word="VULNERABLE", how="computed", why=why))
    elif profile.occupancy_of_vec4:
        why = f"occupancy is asked for the vec-4 instantiation whatever is launched ({on})"
        findings.append(RelativeFinding(name="co-residency", number=number, arch=arch, word="VULNERABLE", how="computed", why=why))
    else:
        why = f"no launch of the arithmetic needs more CTAs than {device.num_sms} SMs hold at their occupancy ({on})"
        if bare:
            first = min(bare, key=lambda plan: plan.stride)
            why += (
                f"; but headroom is silently skipped where it does not fit: rows of {first.stride} ({first.rows} of them) take all "
                f"{first.resident_cap} slots, and a CTA of another stream keeps a member from starting until it ends"
            )
        findings.append(RelativeFinding(name="co-residency", number=number, arch=arch, word="HOLDS", how="computed", why=why))
    if other:
        first = min(other, key=lambda plan: plan.stride)
        then = {
            "refused": "RuntimeError instead of a launch", "decode": "top_k_per_row_decode takes it",
            "filtered": "FilteredTopK takes it",
        }[first.path]  # fmt: skip
        why = f"rows of {first.stride} and more need {first.ctas_per_group} CTAs a group, {first.resident_cap} fit: {then} ({on})"
        word = "VULNERABLE" if first.path == "refused" else "HOLDS"
        number = "vllm#54110"
        findings.append(
            RelativeFinding(name="oversubscribed fallback", number=number, arch=arch, word=word, how="computed", why=why)  # type: ignore[arg-type]
        )
    return findings


def row_state(profile: ReleaseProfile | None, note: str, facts: Sequence[tuple[KernelImage, SliceFacts]]) -> RelativeFinding:
    """#41444 and #41665: who zeroes the row states, and does the kernel itself write the arrival counter?"""
    number = "vllm#41444, #41665"
    stores = [
        f"sm_{image.sm} +{offset:#x} {' '.join(item.rows[offset])}"
        for image, item in facts
        for offset in item.counter_stores
        if offset in item.rows
    ]
    evidence = tuple(stores[:4])
    if stores:
        why = "the kernel itself stores into the arrival counter while members of the group may already have added their arrival"
        return RelativeFinding(
            name="row-state zeroing", number=number, word="VULNERABLE", how="machine code", why=why, evidence=evidence
        )
    if profile is None:
        why = "the kernel never stores into the counter at its fixed offset, so the host must zero it; the host's code was not read"
        return RelativeFinding(name="row-state zeroing", number=number, word="CANNOT TELL", how="machine code", why=why)
    if profile.zeroed == "always":
        why = (
            f"the kernel stores nothing into the counter; the host zeroes the states before every launch ({note}: {profile.source})"
        )
        return RelativeFinding(name="row-state zeroing", number=number, word="HOLDS", how="machine code and source", why=why)
    when = "only when max_seq_len is above the threshold" if profile.zeroed == "radix only" else "not at all"
    why = f"the host zeroes the states {when}: a graph replay starts from the counters of the one before ({note}: {profile.source})"
    return RelativeFinding(name="row-state zeroing", number=number, word="VULNERABLE", how="machine code and source", why=why)


def histogram_ring(image: KernelImage, *, deadline_s: float = 30.0, clock: Clock = SYSTEM) -> RelativeFinding:
    """#49139: one group of four CTAs on long, short and long rows, run on the CPU ground and compared with a sort."""
    common: dict[str, Any] = {"name": "histogram ring", "number": "vllm#49139", "arch": f"sm_{image.sm}", "how": "interpreted"}
    width = 40000
    rows = len(RING_LENGTHS)
    logits = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
    lengths = np.array(RING_LENGTHS, np.int32)
    try:
        program = Program.from_image(image)
        run = run_topk(
            program, logits, lengths, k=image.top_k, chunk_size=10000, ctas_per_group=4, groups=1, max_seq_len=width,
            deadline=Deadline(deadline_s, clock),
        )  # fmt: skip
        program.save_code()
    except ReproError as error:
        return RelativeFinding(**common, word="CANNOT TELL", why=str(error))
    if run.result.kind != "completed":
        return RelativeFinding(**common, word="CANNOT TELL", why=f"the run ended as {run.result.kind}")
    wrong = [row for row, verdict in enumerate(run.verdicts(logits, lengths)) if not verdict.ok]
    shown = (f"one group, row lengths {list(RING_LENGTHS)}, k {image.top_k}, seed 0",)
    if wrong:
        why = f"rows {wrong} select wrong elements: the histogram ring is out of step after a short row"
        return RelativeFinding(**common, word="VULNERABLE", why=why, evidence=shown)
    return RelativeFinding(**common, word="HOLDS", why="every row equals the sorted reference", evidence=shown)
