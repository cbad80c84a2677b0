"""Which rank is to blame for a hung server, and for what: one verdict over what every rank was doing. Pure.

A rank that is held by something of its own is named; one that waits for a peer is its victim. What was not seen is never blamed,
and a class that the unseen rank might contradict is not given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...forensics.records import Diagnosis, Verdict
from .rank_verdict import RankVerdict
from .records import Assessment

__all__ = ["Decision", "decide", "memory_verdict"]

_STILL_WEAK = ("unknown", "gpu-kernel-stuck")


@dataclass(frozen=True)
class Decision:
    """The verdict in parts. ``primary``: the rank whose wait, ledger and chain the document carries first."""

    verdict: Verdict
    primary: RankVerdict | None = None
    next: str = ""


def decide(judged: Sequence[RankVerdict], reading: Diagnosis | None, assessment: Assessment, *, hung: bool) -> Decision:
    held = [one for one in judged if one.role == "held"]
    if held:
        return _held(held, judged)
    recovered = [one for one in judged if one.recovered]
    if recovered:
        sentence = f"it moved again while it was being read ({recovered[0].recovered}): it was slow, or it recovered"
        return Decision(_verdict("not-hung", None, "medium", sentence))
    stuck = [one for one in judged if one.role == "stuck"]
    waiting = [one for one in judged if one.role == "waits for a peer"]
    if stuck:
        return _stuck(stuck, waiting)
    unread = [one for one in judged if one.role in ("not read", "ended", "at work")]
    if waiting and unread:
        # Whatever holds the others may be anything, a barrier too: the class of those that only wait would be a wrong answer.
        ended = [one for one in unread if one.role == "ended"]
        if ended and reading is not None and reading.verdict.class_ == "worker-dead":
            return _from_reading(reading, judged)
        others = f"{_names(unread)} {'has ended' if ended == unread else 'was not seen' if len(unread) == 1 else 'were not seen'}"
        sentence = f"{_names(waiting)} {_verb(waiting)} for a peer in {_kernels(waiting)}; {others}: what holds the peer is open"
        attach = f"dsv4-repro autopsy {unread[0].rank.pid} --attach"
        return Decision(_verdict("gpu-kernel-stuck" if hung else "unknown", None, "low", sentence), waiting[0], attach)
    if reading is not None and reading.verdict.class_ not in _STILL_WEAK and _may_say(reading, judged, hung=hung):
        return _from_reading(reading, judged)
    if waiting:
        own = waiting[0].diagnosis
        crossrank = own is not None and all(
            one.diagnosis is not None and one.diagnosis.verdict.class_ == "gpu-crossrank-spin" for one in waiting
        )
        sentence = f"{_names(waiting)} {_verb(waiting)} for each other in {_kernels(waiting)}; who is behind was not seen"
        class_ = "gpu-crossrank-spin" if crossrank else "gpu-kernel-stuck" if hung else "unknown"
        return Decision(_verdict(class_, None, "medium" if crossrank else "low", sentence), waiting[0], _ras_again())
    return _blind(judged, reading, assessment, hung=hung)


def _verdict(
    class_: str, cause: str | None, confidence: str, sentence: str, *, signature: str | None = None, identity: str | None = None
) -> Verdict:
    return Verdict.model_validate({
        "class": class_, "cause": cause, "confidence": confidence, "signature": signature, "identity": identity,
        "sentence": sentence,
    })  # fmt: skip


def _held(held: Sequence[RankVerdict], judged: Sequence[RankVerdict]) -> Decision:
    """Ranks held by something of their own. Those told from memory alone follow those whose device was seen."""
    seen = [one for one in held if one.diagnosis is not None]
    first = seen[0] if seen else held[0]
    own = first.diagnosis.verdict if first.diagnosis is not None else memory_verdict(first)
    keys = {one.key for one in (seen or held)}
    classes = {(one.diagnosis.verdict.class_ if one.diagnosis is not None else "gpu-spin-barrier") for one in held}
    causes = {one.key[1] for one in held}
    sentence = f"{_names(held)}: {own.sentence}"
    confidence, cause, class_, identity, signature = own.confidence, own.cause, own.class_, own.identity, own.signature
    if len(classes) > 1:
        class_, cause, identity, signature, confidence = "gpu-kernel-stuck", None, None, None, "medium"
        each = "; ".join(f"{one.name}: {_sentence(one)}" for one in held[:8])
        sentence = f"ranks are held by different things: {each}"
    elif len(causes) > 1:
        cause, signature, identity = None, None, None
        sentence += "; the held ranks do not agree on the cause"
    elif len(keys) > 1:
        identity = None
        sentence += "; the held ranks do not wait at the same place"
    elif len(held) > 1:
        sentence += f"; the same on {len(held)} ranks"
    victims = [one for one in judged if one.role == "waits for a peer"]
    if victims:
        sentence += _victims(victims, held)
    blind = [one for one in judged if one.role in ("not read", "ended")]
    if blind:
        sentence += f". {_names(blind)} {'was' if len(blind) == 1 else 'were'} not seen"
    step = first.diagnosis.next if first.diagnosis is not None else f"dsv4-repro autopsy {first.rank.pid} --attach"
    return Decision(_verdict(class_, cause, confidence, sentence, signature=signature, identity=identity), first, step)


def memory_verdict(one: RankVerdict) -> Verdict:
    """The known wait without a look at the blocks: what was read, and what follows from the launcher's arithmetic."""
    assert one.known is not None
    launch, group = one.known.launch, one.known.group
    target = one.waits[0].target if one.waits else None
    goal = f"{target}" if target is not None else "more than 1 (the group's size was not computed: the card is not known)"
    sentence = (
        f"arrival_counter of group {group} is 1 and stays 1, its target is {goal}; row {group} has length {launch.lengths[group]}, "
        f"read from device memory by the agent, and max_seq_len {launch.max_seq_len} lets the peers leave: "
        "the leader waits for ever"
    )
    return _verdict("gpu-spin-barrier", "peer-left", "medium", sentence, signature="vllm-51593")


def _sentence(one: RankVerdict) -> str:
    return one.diagnosis.verdict.sentence if one.diagnosis is not None else memory_verdict(one).sentence


def _stuck(stuck: Sequence[RankVerdict], waiting: Sequence[RankVerdict]) -> Decision:
    own = stuck[0].diagnosis
    assert own is not None
    sentence = f"{_names(stuck)}: {own.verdict.sentence}"
    if waiting:
        sentence += _victims(waiting, stuck)
    same = len({one.key for one in stuck}) == 1
    verdict = _verdict(
        own.verdict.class_, own.verdict.cause if same else None, own.verdict.confidence, sentence,
        identity=own.verdict.identity if same else None,
    )  # fmt: skip
    return Decision(verdict, stuck[0], own.next)


def _may_say(reading: Diagnosis, judged: Sequence[RankVerdict], *, hung: bool) -> bool:
    """The classifier's word counts where it does not contradict what was watched: a clean verdict not over a hang, a barrier of the
    GPU only if no rank's own state was read (it was judged above, better)."""
    class_ = reading.verdict.class_
    if class_ == "not-hung":
        return not hung
    seen = any(one.diagnosis is not None for one in judged)
    return not (seen and class_ in ("gpu-spin-barrier", "gpu-barrier-intra-block"))


def _from_reading(reading: Diagnosis, judged: Sequence[RankVerdict]) -> Decision:
    own = reading.verdict
    waiting = [one for one in judged if one.role == "waits for a peer"]
    verdict = _verdict(
        own.class_, own.cause, own.confidence, own.sentence, signature=own.signature, identity=own.identity
    )  # fmt: skip
    return Decision(verdict, waiting[0] if waiting else None, reading.next)


def _blind(judged: Sequence[RankVerdict], reading: Diagnosis | None, assessment: Assessment, *, hung: bool) -> Decision:
    """Nothing on the GPUs was read, and the rest does not decide."""
    attach = next((f"dsv4-repro autopsy {one.rank.pid} --attach" for one in judged if one.role != "ended"), "dsv4-repro doctor")
    said = "; ".join(assessment.reasons[:4])
    if hung and assessment.device_signals:
        signals = "; ".join(assessment.device_signals[:4])
        if judged and all(one.role == "idle" for one in judged):
            sentence = f"nothing moves ({said}), and no kernel was resident on any rank's GPU: what waits, waits on the host"
            return Decision(_verdict("unknown", None, "low", sentence), None, "py-spy dump --pid PID of every process, twice")
        sentence = f"nothing moves and the GPU is held ({signals}); the device's state could not be read, so the cause is open"
        return Decision(_verdict("gpu-kernel-stuck", None, "medium", sentence), None, attach)
    if reading is not None and reading.verdict.class_ == "gpu-kernel-stuck" and hung:
        return _from_reading(reading, judged)
    sentence = f"the server is {assessment.state} ({said or 'no reason given'}); what was read does not decide what it is"
    return Decision(_verdict("unknown", None, "low", sentence), None, attach)


def _ras_again() -> str:
    return "ncclras -v; sleep 30; ncclras -v    # which rank's counts are behind, and do they stay"


def _victims(waiting: Sequence[RankVerdict], for_whom: Sequence[RankVerdict]) -> str:
    whom = "it" if len(for_whom) == 1 else "them"
    return f". {_names(waiting)} {_verb(waiting)} for {whom} in {_kernels(waiting)}: a victim, not the cause"


def _names(found: Sequence[RankVerdict]) -> str:
    known = [one for one in found if one.rank.rank is not None]
    numbers = ", ".join(str(one.rank.rank) for one in known)
    parts = [f"rank{'s' if len(known) > 1 else ''} {numbers}"] if known else []
    parts += [one.name for one in found if one.rank.rank is None]
    return ", ".join(parts)


def _verb(found: Sequence[RankVerdict]) -> str:
    return "waits" if len(found) == 1 else "wait"


def _kernels(found: Sequence[RankVerdict]) -> str:
    names = dict.fromkeys(name for one in found for name in one.kernels)
    return ", ".join(list(names)[:3]) or "a kernel"
