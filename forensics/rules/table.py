"""How the rules' answers merge into one verdict: a written table, applied the same way every time.

1. Each class has the strength of its strongest support. A contradiction of at least FAIR lowers it by one; one that is stronger
   than the support removes it. A WEAK contradiction is only listed.
2. ``EXPLAINS``, top to bottom: where the culprit is strong enough, its victims leave the contest. The victim is not the culprit: a
   rank that spins in a collective, an engine that waits for a reply, a worker that was ended, all have somebody to wait for.
3. What is left: one class stands; of several the strictly strongest stands; a tie falls to their common parent, else to unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..records import CLASSES, weaker_parent
from .base import FAIR, STRONG, WEAK, Finding

__all__ = ["EXPLAINS", "Explanation", "Merged", "merge"]

_HOST = ("host-ipc-stall", "host-cpu-livelock")
_COLLECTIVE = ("collective-desync", "collective-stuck")
_QUEUE = ("scheduler-stall", "kv-pressure-thrash", "kv-transfer-stall")
_START = ("host-jit-compile", "host-jit-lock", "host-weight-load")


@dataclass(frozen=True, slots=True)
class Explanation:
    """``culprit`` explains ``victims``. ``needs``: "fair" (at least FAIR and not two below the victim, or at least as strong)
    or "equal" (at least as strong as the victim)."""

    culprit: str
    victims: tuple[str, ...]
    needs: str
    why: str


EXPLAINS: tuple[Explanation, ...] = (
    Explanation("gpu-lost", tuple(c for c in CLASSES if c not in ("gpu-lost", "unknown", "not-hung")), "fair",
        "a lost device stops everything above it"),
    Explanation("gpu-spin-barrier", ("gpu-fault", "launch-refused", "worker-dead", "gpu-barrier-intra-block"), "equal",
                "a proven wait on the device: the errors came when the wedged process was read or ended"),
    Explanation("gpu-barrier-intra-block", ("gpu-fault", "launch-refused", "worker-dead"), "equal",
                "a proven wait on the device: the errors came when the wedged process was read or ended"),
    Explanation("gpu-fault", ("worker-dead", "gpu-kernel-stuck", "gpu-crossrank-spin", *_COLLECTIVE, *_HOST, *_QUEUE, *_START,
        "not-hung", "wrong-result"),
                "fair", "after a fault the context is gone; the Python frame and the dead worker are bystanders"),
    Explanation("gpu-fault", ("gpu-spin-barrier", "gpu-barrier-intra-block", "launch-refused"), "equal",
        "the fault ended the kernel"),
    Explanation("launch-refused", ("worker-dead", "gpu-kernel-stuck", "gpu-fault", *_COLLECTIVE, *_HOST, *_START, "not-hung"),
        "fair",
                "the launch never happened"),
    Explanation("worker-dead", (*_COLLECTIVE, "gpu-crossrank-spin", "gpu-kernel-stuck", *_HOST, *_QUEUE, *_START, "not-hung"),
        "fair",
                "the others wait for a process that is gone"),
    Explanation("gpu-spin-barrier", ("gpu-kernel-stuck", "gpu-crossrank-spin", *_COLLECTIVE, *_HOST, *_QUEUE, *_START, "not-hung",
        "wrong-result"), "fair",
                "blame follows the resident kernel; peers and hosts wait for it"),
    Explanation("gpu-barrier-intra-block", ("gpu-kernel-stuck", "gpu-crossrank-spin", *_COLLECTIVE, *_HOST, *_QUEUE, *_START,
        "not-hung", "wrong-result"),
                "fair", "blame follows the resident kernel; peers and hosts wait for it"),
    Explanation("not-hung", (*_START, "gpu-kernel-stuck", "gpu-crossrank-spin", *_COLLECTIVE, *_HOST, *_QUEUE), "equal",
        "it was seen to end by itself"),
    Explanation("host-jit-lock", ("host-jit-compile",), "equal", "nobody is at work behind the lock"),
    Explanation("host-weight-load", ("host-jit-compile", *_COLLECTIVE, "gpu-kernel-stuck", *_HOST, "not-hung"), "equal",
        "start-up waits for the disk"),
    Explanation("host-jit-lock", (*_COLLECTIVE, "gpu-crossrank-spin", "gpu-kernel-stuck", *_HOST, "not-hung"), "fair",
        "the late rank waits for a lock"),
    Explanation("host-jit-compile", (*_COLLECTIVE, "gpu-crossrank-spin", "gpu-kernel-stuck", *_HOST, "not-hung"), "fair",
                "the late rank compiles; its peers spin for it"),
    Explanation("host-cpu-livelock", (*_COLLECTIVE, "host-ipc-stall", "scheduler-stall", "not-hung"), "equal",
        "the engine's thread never comes round"),
    Explanation("kv-transfer-stall", ("scheduler-stall", "host-ipc-stall", "kv-pressure-thrash", "not-hung"), "equal",
        "requests are parked for KV"),
    Explanation("kv-pressure-thrash", ("scheduler-stall", "not-hung"), "equal", "the queue is preempted, not refused"),
    Explanation("scheduler-stall", ("not-hung", "host-ipc-stall"), "equal", "something waits and nothing is admitted"),
    Explanation("gpu-crossrank-spin", ("gpu-kernel-stuck", *_COLLECTIVE, *_HOST, "not-hung"), "equal", "the resident kernel "
        "polls a peer"),
    Explanation("collective-desync", ("collective-stuck", "gpu-kernel-stuck", "gpu-crossrank-spin", *_HOST, "not-hung"), "equal",
                "peers wait inside an operation that one rank never launched"),
    Explanation("collective-stuck", ("gpu-kernel-stuck", *_HOST, "not-hung"), "equal", "the resident kernel is the collective"),
    Explanation("host-ipc-stall", ("not-hung",), "equal", "both ends wait"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Merged:
    """``winner`` class and cause with the findings for it; ``against``: contradictions that the winner carries; ``explained``:
    victim class → why; ``open``: other classes that stay possible, strongest first."""

    class_: str
    cause: str | None
    strength: int
    decisive: tuple[Finding, ...]
    against: tuple[Finding, ...]
    explained: dict[str, str]
    open: tuple[tuple[str, int], ...]
    note: str = ""


def _strengths(findings: Iterable[Finding]) -> tuple[dict[str, int], dict[str, int]]:
    support: dict[str, int] = {}
    against: dict[str, int] = {}
    for finding in findings:
        if finding.answer == "supported":
            support[finding.class_] = max(support.get(finding.class_, 0), finding.strength)
        elif finding.answer == "contradicted":
            against[finding.class_] = max(against.get(finding.class_, 0), finding.strength)
    effective: dict[str, int] = {}
    for class_, strength in support.items():
        enemy = against.get(class_, 0)
        if enemy > strength:
            continue
        effective[class_] = max(strength - 1, WEAK) if enemy >= FAIR else strength
    return effective, against


def merge(findings: Sequence[Finding]) -> Merged:
    effective, _ = _strengths(findings)
    standing = dict(effective)
    explained: dict[str, str] = {}
    for row in EXPLAINS:
        own = standing.get(row.culprit, 0)
        if not own:
            continue
        for victim in row.victims:
            other = standing.get(victim, 0)
            if not other:
                continue
            strong_enough = own >= other if row.needs == "equal" else (own >= FAIR and other - own < 2) or own >= other
            if strong_enough:
                del standing[victim]
                explained[victim] = f"{row.culprit}: {row.why}"
    ranked = sorted(standing.items(), key=lambda item: (-item[1], list(CLASSES).index(item[0])))
    if not ranked:
        return Merged("unknown", None, WEAK, (), _against(findings, "unknown"), explained, ())
    top = ranked[0][1]
    first = [class_ for class_, strength in ranked if strength == top]
    if len(first) > 1:
        parent = _common_parent(first)
        rest = tuple((class_, strength) for class_, strength in ranked)
        decisive = tuple(f for f in findings if f.answer == "supported" and f.class_ in first)
        note = f"{' and '.join(first)} are equally supported"
        strength = min(top, FAIR) if parent != "unknown" else WEAK
        return Merged(parent, None, strength, decisive, _against(findings, parent), explained, rest, note)
    winner = first[0]
    decisive = tuple(sorted((f for f in findings if f.answer == "supported" and f.class_ == winner), key=lambda f: -f.strength))
    rivals = tuple((class_, strength) for class_, strength in ranked[1:])
    return Merged(winner, _cause(decisive), top, decisive, _against(findings, winner), explained, rivals)


def _cause(decisive: Sequence[Finding]) -> str | None:
    """The cause of the strongest finding that names one; none where equals disagree or only a much weaker finding names it."""
    top = decisive[0].strength
    named = [f for f in decisive if f.cause is not None and top - f.strength < 2]
    if not named:
        return None
    best = named[0].strength
    causes = {f.cause for f in named if f.strength == best}
    return causes.pop() if len(causes) == 1 else None


def _against(findings: Iterable[Finding], winner: str) -> tuple[Finding, ...]:
    return tuple(f for f in findings if f.answer == "contradicted" and f.class_ == winner)


def _common_parent(classes: Sequence[str]) -> str:
    def line(class_: str | None) -> list[str]:
        chain: list[str] = []
        while class_ is not None:
            chain.append(class_)
            class_ = weaker_parent(class_)
        return chain

    lines = [line(c) for c in classes]
    return next((candidate for candidate in lines[0] if all(candidate in other for other in lines[1:])), "unknown")


#: Strength to the verdict's word.
CONFIDENCE = {WEAK: "low", FAIR: "medium", STRONG: "high"}
