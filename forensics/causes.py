"""Causes of a stuck barrier between blocks, each a rule over what one device state shows: supported, contradicted or unknown.

The arithmetic behind them: a member that waits at phase p (target (p + 1) * members) has itself added p + 1 arrivals, and the
counter only grows. So counter minus the waiting members' own arrivals is what the missing members added; a negative difference
means that the counter was written by something else than arrivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..kernels.abi import RADIX_THRESHOLD
from ..kernels.sasstext import SassLine
from .arrivals import Arrivals, arrivals
from .barrier import GridView, PolledWait
from .ledger import GroupModel, Ledger
from .operands import operand
from .waitloop import CodeView

__all__ = ["GroupFacts", "Rule", "arrival_is_fenced", "causes", "decide", "group_facts", "zeroes_counter"]

Judgement = Literal["supported", "contradicted", "unknown"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause judged. ``reasons``: facts for and against, as sentences; ``firm``: nothing in it was only likely."""

    cause: str
    judgement: Judgement
    reasons: tuple[str, ...]
    firm: bool = False


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A waiting group in numbers. ``value``: the counter; ``own``: arrivals that the spinning members themselves have added;
    ``missing_arrivals``: what is left for the others (None if not computable, or while a member is still running).

    ``phases``: phase index of each spinning block (None: the target is no multiple of the group's size). ``settled``: no arrival
    can have happened after the poll (memory was read too, or a watchdog saw that nothing moves); ``polled``: every spinning
    member's value was polled after its own arrival, so the last of them saw all arrivals. ``counted``: resident members that were
    not read, and have arrived by the counter; ``deduced``: ``own`` rests on the counter, not on every member's registers.
    """

    group: int
    ctas: int
    value: int | None
    target: int | None
    phases: tuple[int | None, ...]
    own: int | None
    missing_arrivals: int | None
    spinning: tuple[int, ...]
    running: tuple[int, ...]
    exited: tuple[int, ...]
    never_started: tuple[int, ...]
    unknown: tuple[int, ...]
    leader_spins: bool
    leader_restarted: bool
    firm: bool
    why: str
    settled: bool = False
    polled: bool = False
    counted: tuple[int, ...] = ()
    deduced: bool = False


def group_facts(view: GridView, model: GroupModel, ledger: Ledger, group: int, *, hung: bool) -> GroupFacts:
    """The numbers of one waiting group. ``hung``: somebody watched and saw no progress."""
    fates = ledger.groups[group] if group < len(ledger.groups) else {}
    found = arrivals(view, model, fates, group, hung=hung)
    counted = found.unread if found.deduced else ()
    spinning = fates.get("spinning", ())
    return GroupFacts(
        group, model.ctas, found.value, found.target, found.phases, found.own, found.rest, spinning, fates.get("running", ()),
        fates.get("exited", ()), fates.get("never_started", ()),
        tuple(block for block in fates.get("unknown", ()) if block not in set(counted)),
        any(model.role(block) == "leader" for block in spinning), _restarted(spinning, found.phases, model),
        group in ledger.firm, ledger.why[group] if group < len(ledger.why) else "",
        hung or (bool(found.waits) and all(wait.live is not None for wait in found.waits)), _polled(found), counted, found.deduced,
    )  # fmt: skip


def _restarted(spinning: Sequence[int], phases: Sequence[int | None], model: GroupModel) -> bool:
    """Whether the leader waits at an earlier phase than every other waiting member: it has begun anew."""
    of = dict(zip(spinning, phases, strict=False))
    leader = next((phase for block, phase in of.items() if model.role(block) == "leader"), None)
    others = [phase for block, phase in of.items() if model.role(block) != "leader"]
    return leader is not None and bool(others) and all(phase is not None and phase > leader for phase in others)


def _polled(found: Arrivals) -> bool:
    return bool(found.waits) and all(wait.live is not None or wait.seen.value_status == "measured" for wait in found.waits)


def arrival_is_fenced(code: CodeView | None, wait: PolledWait) -> bool | None:
    """Whether a fence stands between data and arrival: a MEMBAR before each add to the polled word. None: not seen in the code."""
    if code is None:
        return None
    tail = wait.loop.address.rpartition("[")[2]
    offset = tail.partition("+0x")[2]
    order = sorted(code.lines)
    verdicts = []
    for index, place in enumerate(order):
        line = code.lines[place]
        adds = line.base in ("RED", "REDG", "ATOM", "ATOMG") and "ADD" in line.modifiers
        if adds and offset and any(text.endswith(f"+0x{offset}") for text in line.operands):
            verdicts.append(_fenced([code.lines[before] for before in order[max(index - 24, 0) : index]]))
    return None if not verdicts else all(verdicts)


def _fenced(before: Sequence[SassLine]) -> bool:
    for line in reversed(before):
        if line.base in ("MEMBAR", "FENCE"):
            return True
        if line.base == "BAR":
            return False
    return False


def zeroes_counter(code: CodeView | None, wait: PolledWait) -> bool | None:
    """Whether the kernel itself stores a zero at the polled word's offset. None: no code, or the load has no offset to go by."""
    offset = wait.loop.address.rpartition("[")[2].partition("+0x")[2]
    if code is None or not offset:
        return None
    return any(
        line.base in ("ST", "STG")
        and any(text.endswith(f"+0x{offset}") for text in line.operands)
        and operand(line.operands[-1]) == operand("RZ")
        for line in code.lines.values()
    )


# ---------------------------------------------------------------------------------------------------------------------------------
# The rules


def causes(facts: GroupFacts, model: GroupModel, view: GridView, wait: PolledWait, *, others_run: bool) -> tuple[Rule, ...]:
    """Every cause of the class judged for one waiting group. ``others_run``: another resident block on the device is at work."""
    fenced, zeroes = arrival_is_fenced(view.code, wait), zeroes_counter(view.code, wait)
    return (
        _peer_left(facts, model, fenced),
        _not_co_resident(facts, model, others_run),
        _reset_race(facts, zeroes),
        _init_race(facts, zeroes),
        _missing_fence(facts, fenced),
        Rule("stale-counter", "contradicted" if facts.missing_arrivals == 0 and not facts.deduced else "unknown", (_stale(facts),)),
    )


def _stale(facts: GroupFacts) -> str:
    if facts.deduced:
        return "a counter that did not start at zero cannot be told from members that were not read and have arrived"
    if facts.missing_arrivals is None:
        return "the counter, or what the members have added, is not known"
    if facts.missing_arrivals:
        return "arrivals of members that are gone cannot be told from a counter that did not start at zero"
    return "the counter is explained by arrivals that started at zero"


_UNSETTLED = "a last arrival may have come after the value was polled: memory was not read, and nobody watched"


def _words(blocks: Sequence[int]) -> str:
    shown = ", ".join(map(str, blocks[:6])) + (", …" if len(blocks) > 6 else "")
    return f"block{'s' if len(blocks) != 1 else ''} {shown}"


def _peer_left(facts: GroupFacts, model: GroupModel, fenced: bool | None) -> Rule:
    reasons: list[str] = []
    if not facts.exited:
        return Rule("peer-left", "contradicted", ("no member of the group has left",) if not facts.unknown else (facts.why,))
    reasons.append(f"{_words(facts.exited)} of the group left ({facts.why})")
    if facts.running or facts.unknown or facts.never_started:
        other = facts.running or facts.unknown or facts.never_started
        return Rule("peer-left", "unknown", (*reasons, f"{_words(other)} may still arrive or never came"))
    rest = facts.missing_arrivals
    if rest is None:
        return Rule("peer-left", "unknown", (*reasons, "counter or phase are not known"))
    if rest < 0:
        return Rule("peer-left", "contradicted", (*reasons, "the counter is lower than the waiting members' own arrivals"))
    if rest > 0:
        reasons.append(f"{rest} arrivals came from members that are gone")
        if not facts.settled:
            return Rule("peer-left", "unknown", (*reasons, _UNSETTLED))
        return Rule("peer-left", "supported" if fenced else "unknown", tuple(reasons))
    reasons.append(f"the counter, {facts.value}, is the waiting members' own arrivals: the others never arrived")
    params = model.params
    firm = facts.firm and model.certain
    if params is not None:
        early = params.max_seq_len <= RADIX_THRESHOLD
        peers_only = all(model.role(block) == "peer" for block in facts.exited)
        if not (early and peers_only):
            reasons.append(f"by its parameters (max_seq_len {params.max_seq_len}) none of them leaves before its last barrier")
            return Rule("peer-left", "unknown", tuple(reasons))
        reasons.append(f"max_seq_len {params.max_seq_len} <= {RADIX_THRESHOLD}: by its parameters every peer leaves at entry")
    return Rule("peer-left", "supported", tuple(reasons), firm)


def _not_co_resident(facts: GroupFacts, model: GroupModel, others_run: bool) -> Rule:
    if not facts.never_started:
        why = f"{_words(facts.exited)} did start ({facts.why})" if facts.exited else "every member of the group is resident"
        return Rule("not-co-resident", "unknown" if facts.unknown else "contradicted", (facts.why if facts.unknown else why,))
    reasons = [f"{_words(facts.never_started)} of the group never started ({facts.why})"]
    if others_run or facts.running:
        return Rule("not-co-resident", "unknown", (*reasons, "blocks that are at work may end and make room"))
    if facts.missing_arrivals is None or facts.missing_arrivals != 0 or facts.exited or facts.unknown:
        return Rule("not-co-resident", "unknown", (*reasons, "the counter does not equal the resident members' arrivals"))
    early = model.params is not None and model.params.max_seq_len <= RADIX_THRESHOLD
    if early and all(model.role(block) == "peer" for block in facts.never_started):
        return Rule("not-co-resident", "unknown", (*reasons, "by its parameters they would leave at entry if they started"))
    have = len(facts.spinning) + len(facts.counted)
    if facts.deduced:
        reasons.append(
            f"the counter, {facts.value}, is the number of resident members: all of them have arrived, if it started at zero "
            f"(not every one was read in full)"
        )
    else:
        reasons.append(f"the counter, {facts.value}, is the arrivals of the {have} resident members, and all of them wait")
    return Rule("not-co-resident", "supported", tuple(reasons), facts.firm and model.certain and not facts.deduced)


def _reset_race(facts: GroupFacts, zeroes: bool | None) -> Rule:
    if facts.value is None or not facts.spinning:
        return Rule("reset-race", "unknown", ("the counter is not known",))
    own = facts.own
    if own is None and facts.value != 0:
        return Rule("reset-race", "unknown", ("the phase is not known",))
    least = len(facts.spinning) if own is None else own
    if facts.value >= least:
        return Rule("reset-race", "contradicted", (f"the counter holds all {least} arrivals of the waiting members",))
    reasons = [f"the counter is {facts.value}, and the waiting members alone have added {least}: it was written over"]
    if zeroes is not None:
        reasons.append(
            "the kernel stores a zero there itself" if zeroes else "no plain store of a zero to it is in the kernel's code"
        )
    if facts.leader_spins and not facts.leader_restarted:
        return Rule(
            "reset-race", "unknown", (*reasons, "the leader, which resets it at the end, still waits at a phase like the others")
        )
    if facts.running or facts.unknown:
        return Rule("reset-race", "unknown", (*reasons, "a member's state is not known"))
    if not facts.settled and not facts.polled:
        return Rule("reset-race", "unknown", (*reasons, _UNSETTLED))
    reasons.append("the leader waits at an earlier phase again" if facts.leader_spins else "the leader is gone")
    return Rule("reset-race", "supported", tuple(reasons), facts.firm and own is not None)


def _init_race(facts: GroupFacts, zeroes: bool | None) -> Rule:
    if facts.value is None or facts.own is None:
        return Rule("init-race", "unknown", ("counter or phase are not known",))
    if facts.value >= facts.own:
        return Rule("init-race", "contradicted", (f"no arrival of a waiting member is missing: {facts.value} >= {facts.own}",))
    lost = facts.own - facts.value
    reasons = [f"{lost} of {facts.own} arrivals of the waiting members are not in the counter"]
    if zeroes is False:
        reasons.append("no plain store of a zero to it is in the kernel's code")
    if set(facts.phases) != {0} or len(facts.spinning) != facts.ctas:
        return Rule("init-race", "unknown", (*reasons, "not all members wait at the first phase"))
    if not facts.settled and not facts.polled:
        return Rule("init-race", "unknown", (*reasons, _UNSETTLED))
    return Rule("init-race", "supported", (*reasons, "all members are resident and wait at the first phase"), True)


def _missing_fence(facts: GroupFacts, fenced: bool | None) -> Rule:
    if fenced:
        return Rule("missing-fence", "contradicted", ("a fence stands before every arrival in the kernel's code",))
    rest = facts.missing_arrivals
    if not rest or rest < 0 or not facts.exited:
        return Rule("missing-fence", "contradicted" if rest == 0 else "unknown", ("no member left after arriving",))
    reasons = [f"members that are gone had arrived {rest} times: they left at another phase than those that wait"]
    if not facts.settled:
        return Rule("missing-fence", "unknown", (*reasons, _UNSETTLED))
    if fenced is None or facts.running or facts.unknown or facts.never_started:
        return Rule("missing-fence", "unknown", (*reasons, "whether a fence orders data before the arrival is not known"))
    return Rule(
        "missing-fence", "supported", (*reasons, "no fence stands between data and arrival in the kernel's code"), facts.firm
    )


def decide(rules: Sequence[Rule]) -> Rule | None:
    """The one supported cause; None if none or several are: then the class stands without a cause."""
    supported = [rule for rule in rules if rule.judgement == "supported"]
    return supported[0] if len(supported) == 1 else None
