"""Barriers: what is resident on a device and what it waits for. Blame follows the resident kernel, never the host's frame.

A poll equation that is false, with the members of the group accounted for, is a proof by itself: nobody is left who could make it
true. Which sub-case it is follows from four numbers: grid, CTAs of a group, resident blocks, counter against target
(vllm-project/vllm#51593, #41189, #41444; flashinfer-ai/flashinfer#3610; ROCm/aiter#4007).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..evidence.facts import DeviceFacts, DeviceKernel, Poll
from ..records import Diagnosis
from .base import FAIR, STRONG, WEAK, Finding, contradicted, supported, unknown
from .view import View

__all__ = [
    "KernelJudgement",
    "full_judgements",
    "judge_kernel",
    "resident_judgements",
    "rule_device_barrier",
    "rule_device_judged",
    "rule_device_read",
    "satisfied",
]

_FEW = 8


@dataclass(frozen=True, slots=True)
class KernelJudgement:
    """What one resident kernel waits for. ``group_size``: CTAs that meet at the barrier, if it is known or follows."""

    class_: str
    cause: str | None
    strength: int
    text: str
    poll: Poll | None = None
    group_size: int | None = None


def satisfied(value: int, comparison: str, target: int) -> bool:
    """Is the wait's equation true? Signed 32-bit, as barriers count."""
    left = value - (1 << 32) if value >= 1 << 31 else value
    right = target - (1 << 32) if target >= 1 << 31 else target
    return {
        ">=": left >= right,
        ">": left > right,
        "<=": left <= right,
        "<": left < right,
        "==": left == right,
        "!=": left != right,
    }[comparison]


def _total(kernel: DeviceKernel) -> int | None:
    return kernel.grid[0] * kernel.grid[1] * kernel.grid[2] if kernel.grid else None


def _linear(kernel: DeviceKernel, block: tuple[int, int, int]) -> int:
    grid = kernel.grid or (1 << 30, 1, 1)
    return block[0] + grid[0] * (block[1] + grid[1] * block[2])


def judge_kernel(
    kernel: DeviceKernel, num_sms: int | None, *, certain_stuck: bool, crowded: bool, slots: int | None = None
) -> KernelJudgement | None:
    """``certain_stuck``: tokens are frozen or two looks agree. ``crowded``: another kernel is resident. None: nothing to say."""
    meanings = {block.meaning for block in kernel.blocks or ()}
    poll = next((p for p in kernel.polls if p.value is not None and p.target is not None), None) or next(iter(kernel.polls), None)
    name = kernel.name.split("(")[0][:120] or "a kernel"
    if kernel.family == "nccl":
        return None
    if kernel.family == "crossrank" or "system-poll" in meanings or (poll is not None and poll.scope == "sys"):
        return KernelJudgement(
            "gpu-crossrank-spin", None, FAIR if certain_stuck else WEAK, f"{name} polls a flag that another GPU writes", poll
        )
    # A printed arrival counter is a barrier of this kernel; whether it is the one that holds it needs a stop seen elsewhere.
    if "global-poll" in meanings or (poll is not None and (poll.target is not None or poll.value is not None)):
        return _spin(kernel, name, poll, num_sms, certain_stuck, crowded, slots)
    count = len(kernel.blocks) if kernel.blocks is not None else None
    few = count is not None and count <= _FEW
    strength = STRONG if certain_stuck and few else FAIR if certain_stuck or few else WEAK
    left = f"{count} of {_total(kernel) or '?'} blocks resident" if count is not None else "resident"
    if "phase-wait" in meanings:
        return KernelJudgement(
            "gpu-barrier-intra-block", "phase-wait", strength, f"{name} ({left}) stands in a phase wait inside a block", poll
        )
    if "cluster-wait" in meanings:
        return KernelJudgement(
            "gpu-barrier-intra-block", "cluster-peer", strength, f"{name} ({left}) waits for a block of its cluster", poll
        )
    if meanings == {"named-barrier"}:
        return KernelJudgement(
            "gpu-barrier-intra-block",
            "named-barrier",
            strength,
            f"{name} ({left}): all warps stand at barriers of their block",
            poll,
        )
    if kernel.blocks is not None and not kernel.blocks:
        return None
    return KernelJudgement(
        "gpu-kernel-stuck", None, FAIR if certain_stuck else WEAK, f"{name} is {left} and what it waits for was not read", poll
    )


def _spin(
    kernel: DeviceKernel, name: str, poll: Poll | None, num_sms: int | None, certain_stuck: bool, crowded: bool, slots: int | None
) -> KernelJudgement:
    if poll is not None and poll.value is not None and poll.target is not None:
        if satisfied(poll.value, poll.comparison, poll.target):
            return KernelJudgement(
                "gpu-kernel-stuck",
                None,
                WEAK,
                f"{name}: the wait {poll.value} {poll.comparison} {poll.target} is already true: the look caught it moving",
                poll,
            )
        equation = f"{poll.value} {poll.comparison} {poll.target} is false"
    else:
        equation = "the equation was not read"
    cause, group, why = _spin_cause(kernel, poll, num_sms, crowded)
    strength = FAIR
    if poll is not None and poll.value is not None and poll.target is not None:
        # Registers and code prove the wait; a printed counter beside one register leaves the pairing to the reader.
        # A wiped arrival or a different phase is read from its traces; the code that did it was not seen.
        strength = STRONG if poll.source == "registers" and cause in ("peer-left", "not-co-resident", "reset-race") else FAIR
        strength = WEAK if cause == "stale-counter" else strength
    elif not certain_stuck:
        strength = WEAK
    blocks = kernel.blocks or ()
    if cause == "not-co-resident" and poll is not None and poll.value == len(blocks) and certain_stuck:
        # Every resident block has arrived and every slot of the device is taken: nobody is left who could arrive.
        full = slots == len(blocks) or (num_sms is not None and len(blocks) % num_sms == 0)
        strength = STRONG if full else strength
    shown = ", ".join(str(b.index[0]) if b.index[1:] == (0, 0) else str(b.index) for b in blocks[:6]) + (
        "…" if len(blocks) > 6 else ""
    )
    resident = f"{len(blocks)} of {_total(kernel) or '?'} blocks resident ({shown or 'not listed'})"
    text = f"{name}: {resident}, {equation}{'; ' + why if why else ''}"
    return KernelJudgement("gpu-spin-barrier", cause, strength, text, poll, group)


def _spin_cause(kernel: DeviceKernel, poll: Poll | None, num_sms: int | None, crowded: bool) -> tuple[str | None, int | None, str]:
    """Cause, group size and the reason; None where the four numbers do not decide."""
    targets = {p.target for p in kernel.polls if p.target is not None}
    total = _total(kernel)
    group = kernel.group_size
    if not kernel.blocks:
        return None, group, ""
    resident = sorted(_linear(kernel, b.index) for b in kernel.blocks)
    first_ones = total is not None and resident == list(range(len(resident))) and len(resident) < total
    never = f"blocks 0 to {len(resident) - 1} are resident and the other {(total or 0) - len(resident)} never started: no room"
    if poll is None or poll.value is None or poll.target is None:
        if first_ones and _device_full(len(resident), num_sms, crowded) and (poll is None or poll.value in (None, len(resident))):
            return "not-co-resident", group, never
        return None, group, ""
    value, target = poll.value, poll.target
    spot = _linear(kernel, poll.block) if poll.block is not None else resident[0]
    members = (
        [b for b in resident if group is not None and b // group == spot // group]
        if group
        else resident
        if len(resident) == 1
        else []
    )
    phase = target // group - 1 if group and target % group == 0 else 0 if group is None else None
    if (
        total is not None
        and resident == list(range(len(resident)))
        and len(resident) < total
        and _device_full(len(resident), num_sms, crowded)
    ):
        # One arrival of each resident member, at the first phase: any other count is not explained by blocks that never came.
        if not phase and value == (len(members) if members else len(resident)):
            return "not-co-resident", group, never
        counted = f"the counter is {value}: not the arrivals of the {len(members) or len(resident)} resident members"
        return None, group, counted
    if group and len(members) == group and len(targets) > 1:
        return "missing-fence", group, f"all {group} members are resident and wait for different phases"
    arrived = len(members) if members else 1
    least = (phase * group if phase is not None and group else 0) + arrived
    if value < least:
        seen = {_linear(kernel, p.block): p.target for p in kernel.polls if p.block is not None}
        if group and len(members) == group and phase and not (set(members) <= set(seen) and len(targets) == 1):
            return None, group, "arrivals are missing from the counter; the targets of the other members were not read"
        if group and len(members) == group and phase:
            # An initialisation can only wipe arrivals of the first phase: without them no later phase is ever reached.
            return (
                "stale-counter",
                group,
                f"all {group} members wait in phase {phase}, and {value} is no number of arrivals that this launch can have made: "
                "the counter may carry an earlier launch's state",
            )
        if group and len(members) == group:
            return (
                "init-race",
                group,
                f"all {group} members wait, yet only {value} arrivals are left in the counter: it was zeroed after they arrived",
            )
        if value == 0:
            return (
                "reset-race",
                group,
                "a waiting block has arrived, yet the counter is 0: it was zeroed under it by a member that has left",
            )
        return None, group, "arrivals were lost from the counter"
    if value == least and not phase:
        if len(members) == group:
            return None, group, ""
        if members and total is not None and len(resident) < total:
            gone = f"{(group or target) - arrived} member(s) of its group are not on the device and the device has room"
            return "peer-left", group or (target if value == arrived else None), gone
    return None, group, ""


def _device_full(resident: int, num_sms: int | None, crowded: bool) -> bool:
    """Could no further block start? At least one block on every SM, or another kernel holds the room."""
    if crowded:
        return True
    return resident >= num_sms if num_sms is not None else resident >= 16


def _stuck_for_certain(view: View, facts: DeviceFacts) -> bool:
    if facts.repeat == "same" or view.flow.frozen or view.gave_up:
        return True
    twins = [d for d in view.case.devices if (d.pid, d.rank) == (facts.pid, facts.rank) and d.kernels and d is not facts]
    return any(_same_place(facts, twin) for twin in twins)


def _same_place(a: DeviceFacts, b: DeviceFacts) -> bool:
    def key(facts: DeviceFacts) -> set[tuple[str, tuple[tuple[int, int, int], ...]]]:
        return {(k.name, tuple(x.index for x in k.blocks or ())) for k in facts.kernels or ()}

    return bool(key(a)) and key(a) == key(b)


def resident_judgements(view: View) -> list[tuple[DeviceFacts, DeviceKernel, KernelJudgement]]:
    """All resident kernels that wait for something, over all devices that were looked at."""
    found = []
    for facts in view.devices:
        kernels = [k for k in facts.kernels or () if k.blocks is None or k.blocks]
        for kernel in kernels:
            judged = judge_kernel(
                kernel, facts.num_sms, certain_stuck=_stuck_for_certain(view, facts), crowded=len(kernels) > 1, slots=facts.slots
            )
            if judged is not None:
                found.append((facts, kernel, judged))
    return found


def full_judgements(view: View) -> list[tuple[DeviceFacts, Diagnosis]]:
    """What the full reader of dumps and transcripts says of each look, knowing whether anything else shows that nothing moves."""
    found = []
    for facts in view.devices:
        judged = facts.diagnosis_hung if _stuck_for_certain(view, facts) else facts.diagnosis
        if judged is None or (facts.kernels and all(kernel.family == "nccl" for kernel in facts.kernels)):
            continue
        found.append((facts, judged))
    return found


_WORD_STRENGTH = {"high": STRONG, "medium": FAIR, "low": WEAK}


def rule_device_judged(view: View) -> Iterator[Finding]:
    """The full judgement: code, registers and tables of one look at one device."""
    rule = "device-judged"
    found = False
    for facts, judged in full_judgements(view):
        verdict = judged.verdict
        if not verdict.class_.startswith("gpu-"):
            continue
        found = True
        strength = _WORD_STRENGTH[verdict.confidence]
        if verdict.class_ == "gpu-crossrank-spin":
            strength = min(strength, FAIR)
        yield supported(rule, verdict.class_, strength, verdict.sentence, [facts.ref], verdict.cause)
    if not found:
        yield unknown(
            rule,
            "gpu-spin-barrier",
            "no device state that the full reader could judge",
            "a GPU core dump or a whole cuda-gdb transcript",
        )


def _most(view: View, facts: DeviceFacts, judged: KernelJudgement) -> int:
    """How sure the lines of a look may be of a cause: by themselves no more than its full reader, where that names the same one. It
    knows what they do not ask: how many blocks the device holds, and which of them nobody read; that is what blocks without room
    rest on, so there it binds also where the server's own figures show that nothing moves.
    """
    full = facts.diagnosis_hung
    if full is None or (full.verdict.class_, full.verdict.cause) != (judged.class_, judged.cause):
        return STRONG
    if judged.cause != "not-co-resident" and _stuck_for_certain(view, facts):
        return STRONG
    return _WORD_STRENGTH[full.verdict.confidence]


def _read_and_open(view: View, facts: DeviceFacts) -> bool:
    """Whether the full reader read this look and found nothing that cannot go on, and nothing else shows that nothing moves: then a
    resident kernel is a kernel at work as much as one that hangs."""
    full = facts.diagnosis
    return full is not None and full.verdict.class_ in ("unknown", "not-hung") and not _stuck_for_certain(view, facts)


def rule_device_barrier(view: View) -> Iterator[Finding]:
    """Spin barriers, barriers inside a block, and resident kernels of which no more is known, from whatever lines are there."""
    rule = "device-barrier"
    found = [item for item in resident_judgements(view) if item[2].class_ != "gpu-crossrank-spin"]
    for facts, kernel, judged in found:
        where = f"rank {facts.rank}: " if facts.rank is not None else f"pid {facts.pid}: " if facts.pid is not None else ""
        refs = [kernel.ref, facts.ref]
        if judged.class_ == "gpu-kernel-stuck" and _read_and_open(view, facts):
            yield unknown(rule, judged.class_, where + facts.diagnosis.verdict.sentence, "a second look, 20 s later", refs)
            continue
        strength = min(judged.strength, _most(view, facts, judged))
        yield supported(rule, judged.class_, strength, where + judged.text, refs, judged.cause)
    if not found and not any(facts.kernels for facts in view.devices):
        failures = [f for f in view.case.failures if "device" in f.what]
        yield unknown(
            rule,
            "gpu-spin-barrier",
            "the device state was not read",
            "a cuda-gdb attach, or a user-triggered GPU core dump",
            [f.ref for f in failures],
        )


def rule_device_read(view: View) -> Iterator[Finding]:
    """A device that was really read and shows work that moves, or nothing, speaks against a stuck kernel."""
    rule = "device-moves"
    moving = [d for d in view.case.devices if d.repeat == "moved"]
    pairs: dict[tuple[object, object], list[DeviceFacts]] = {}
    for facts in view.case.devices:
        if facts.kernels is not None and (facts.pid is not None or facts.rank is not None):
            pairs.setdefault((facts.pid, facts.rank), []).append(facts)
    changed = [(looks[0], looks[-1]) for looks in pairs.values() if len(looks) > 1 and not _same_place(looks[0], looks[-1])]
    if moving or changed:
        refs = [*(d.ref for d in moving), *(r for a, b in changed for r in (a.ref, b.ref))]
        yield contradicted(rule, "gpu-kernel-stuck", "the resident kernel changed between two looks", refs, FAIR)
        yield contradicted(rule, "gpu-spin-barrier", "the resident kernel changed between two looks", refs, FAIR)
        yield supported(rule, "not-hung", WEAK, "the device moves from kernel to kernel", refs)
    else:
        yield unknown(rule, "gpu-kernel-stuck", "no two looks at one device")
