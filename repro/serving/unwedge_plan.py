"""What ``unwedge`` would do to a wedged server, rank by rank, and why it would not. Pure: records in, records out.

One rule decides what may be written: the known wait and nothing else. A leader of ``persistent_topk_kernel`` whose arrival counter
is 1 of 2 and whose peer has left by the kernel's own rule can only stay for ever; the counter that is written satisfies every later
wait of that launch, and the launcher zeroes it before the next one. Facts: docs/unwedge.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ...forensics.collect.cuda_release import Verdict
from ...forensics.identity import base_name
from ...forensics.records import Diagnosis, Wait
from ...kernels.abi import ARRIVAL_COUNTER_OFFSET, RADIX_THRESHOLD, ROW_STATE_SIZE, WORKSPACE_BYTES
from .records import Rank

__all__ = [
    "KERNEL",
    "FillerPlan",
    "RankFacts",
    "RankPlan",
    "RowStateLaunch",
    "UnwedgePlan",
    "judge_diagnosis",
    "known_waits",
    "plan_fillers",
    "plan_unwedge",
    "startup_seconds",
    "zeroed_before_launch",
]

KERNEL = "persistent_topk_kernel"
SIGNATURE = "vllm-51593"
#: The known wait's identity: kernel base name, normalised wait loop, 1 of 2, leader alone, peer left. It needs no parameters, which
#: a debugger cannot always read of a launch out of a graph; without them the signature stays open.
IDENTITY = "dd4289b0e668"
#: Seconds a write, measured on one H200: through cuda-gdb in one attach (0.26 to 0.45), and by the agent's side
#: stream. The attach and the detach around it took 3.6 s on a real server (vLLM 0.23.0).
DEBUGGER_WRITE_S, AGENT_WRITE_S = 0.45, 0.01
ATTACH_S = 3.6
#: Steps that vLLM launches ahead: its scheduler is asynchronous unless told otherwise.
IN_FLIGHT = 2
_OLDEST, _NEWEST = (0, 20, 2), (0, 33, 0)
Way = Literal["agent", "debugger", "none"]


def zeroed_before_launch(version: str) -> tuple[bool, str]:
    """Whether a release's launcher zeroes the row states before each launch; without that a release poisons the next launch.

    Read in the source distributions of 0.20.0 and 0.20.1 (not always) and 0.20.2 to 0.33.0 (always). The agent has the same rule.
    """
    numbers = re.fullmatch(r"([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})", version)
    if numbers is None:
        return False, f"vLLM {version[:40] or 'of unknown version'} is no release whose launcher was read"
    release = tuple(int(part) for part in numbers.groups())
    if release < _OLDEST:
        return False, f"vLLM {version} does not zero the row states before each launch: a release would poison the next launch"
    if release > _NEWEST:
        return False, f"vLLM {version}: its launcher was not read"
    return True, f"vLLM {version} zeroes the row states before each launch"


@dataclass(frozen=True, slots=True)
class RowStateLaunch:
    """One captured launch as the agent read it: arrival counter of each group, length of each row, all int32."""

    counters: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: int
    max_seq_len: int


def known_waits(launches: Iterable[RowStateLaunch]) -> tuple[int, str]:
    """Groups that stand at the known wait, by the agent's rule (one arrival, a negative length, peers that leave), or why none."""
    found, why = 0, "no captured launch of the op is known to the agent"
    for launch in launches:
        if launch.max_seq_len > RADIX_THRESHOLD:
            why = f"max_seq_len {launch.max_seq_len} is above {RADIX_THRESHOLD}: the peers stay"
            continue
        if launch.rows > len(launch.counters):
            why = f"{launch.rows} rows in {len(launch.counters)} groups: which row a group is at is not known"
            continue
        ones = [group for group, counter in enumerate(launch.counters) if counter == 1]
        mine = [group for group in ones if group < len(launch.lengths) and launch.lengths[group] < 0]
        found += len(mine)
        if ones and not mine:
            why = f"groups {ones[:8]} have one arrival, but their rows have no negative length: not the known wait"
        elif not ones:
            why = "no group has one arrival"
    return found, "the known wait" if found else why


def _fits(wait: Wait, diagnosis: Diagnosis) -> str:
    """ "" where a wait is the known one, else what does not fit."""
    if base_name(wait.kernel) != KERNEL:
        return f"kernel {base_name(wait.kernel)[:60]} is not {KERNEL}"
    if (wait.value, wait.target, wait.comparison) != (1, 2, ">="):
        return f"it waits for {wait.value} {wait.comparison} {wait.target}, not for 1 >= 2"
    if wait.state_field not in (None, "arrival_counter") or wait.state_field is None:
        return "the polled word is not shown to be an arrival counter"
    if wait.role != "leader" or wait.group is None:
        return "the waiting block is not shown to be its group's leader"
    if wait.address is None:
        return "the polled word's address is not known"
    own = [group for group in diagnosis.ledger if group.group == wait.group]
    if len(own) != 1 or wait.block[0] not in own[0].spinning:
        return f"block {wait.block[0]} is not shown to wait in group {wait.group}"
    if not own[0].exited or own[0].running or own[0].never_started or own[0].unknown:
        return f"the peer of group {wait.group} is not shown to have left"
    # The counter's target is the size of the group: the leader waits alone, and every other block of it has left.
    if set(own[0].spinning) != {wait.block[0]} or len(set(own[0].exited)) + 1 != wait.target:
        return f"group {wait.group} is not shown to be this leader, alone, and one that left"
    return ""


def judge_diagnosis(diagnosis: Diagnosis) -> Verdict:
    """What may be written, from a reading of the frozen process: nothing unless every wait in it is the known one.

    The addresses are those of all groups of the same workspace: another batch's padding row is in another group.
    """
    verdict = diagnosis.verdict
    if (verdict.class_, verdict.cause) != ("gpu-spin-barrier", "peer-left"):
        return Verdict(why=f"the reading says {verdict.class_} ({verdict.cause}), not a peer that left: {verdict.sentence[:200]}")
    if verdict.signature != SIGNATURE and (verdict.signature is not None or verdict.identity != IDENTITY):
        return Verdict(why=f"a peer left, but this is not {SIGNATURE} (signature {verdict.signature}, identity {verdict.identity})")
    if not diagnosis.waits:
        return Verdict(why="no wait was read")
    addresses: set[int] = set()
    for wait in diagnosis.waits:
        why = _fits(wait, diagnosis)
        if why:
            return Verdict(why=f"block {wait.block[0]}: {why}")
        assert wait.address is not None
        assert wait.group is not None
        base = int(wait.address, 16) - wait.group * ROW_STATE_SIZE - ARRIVAL_COUNTER_OFFSET
        if base <= 0 or base % 4:
            return Verdict(why=f"block {wait.block[0]}: {wait.address} is no arrival counter of group {wait.group}")
        groups = min(WORKSPACE_BYTES // ROW_STATE_SIZE, 64)
        addresses |= {base + group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET for group in range(groups)}
    return Verdict(KERNEL, tuple(sorted(addresses)), 1, "the known wait")


@dataclass(frozen=True, slots=True)
class FillerPlan:
    """``count`` requests to add. ``still``: live counts that the batch can pass later and that wedge again."""

    count: int
    text: str
    still: tuple[int, ...] = ()


def plan_fillers(live: int | None, padded: Sequence[int] | None, most: int | None) -> FillerPlan:
    """Requests that move ``live`` off the padded counts (``padded``) and keep the batch off them while the survivors end.

    With ``most`` (max_num_seqs) not padded: as many as fill the batch, and one more for each survivor, which waits in the queue and
    takes its place in the very step in which it leaves. Otherwise the fewest that help now, with the counts that are passed later.
    """
    if live is None or padded is None:
        why = "the live requests" if live is None else "the padded counts"
        return FillerPlan(1, f"1, because {why} are not known")
    bad = set(padded)
    if most is not None and most > live and most not in bad:
        words = f"{most}: {most - live} fill the batch to {most}, which no graph pads, and {live} wait to replace survivors"
        return FillerPlan(most, words)
    ceiling = most if most is not None else max([live, *padded], default=live) + 1
    choices = [count for count in range(0 if live not in bad else 1, max(ceiling - live, 0) + 1) if live + count not in bad][:8]
    if not choices:
        return FillerPlan(0, f"none helps: every batch from {live} to {ceiling} live is padded", tuple(sorted(bad)))

    def passed(count: int) -> tuple[int, ...]:
        return tuple(sorted(one for one in bad if count <= one < live + count))

    best = min(choices, key=lambda count: (len(passed(count)), count))
    later = passed(best)
    words = f"{best}: {live} live become {live + best}, which no graph pads" if best else f"none: a batch of {live} is not padded"
    if later:
        words += f"; on the way down {', '.join(map(str, later))} live would wedge again"
    return FillerPlan(best, words, later)


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What is known of one rank. ``releases``: versions whose deciding Python it runs; ``version``: what its agent says.

    ``agent``: it answers; ``row_states``: what it answered, None: not asked or no answer (``row_states_why``).
    ``guard_needed``: the agent found that the build's producer lacks the clamp.
    """

    rank: Rank
    releases: tuple[str, ...] = ()
    version: str | None = None
    agent: bool = False
    agent_why: str = ""
    guard_needed: bool | None = None
    row_states: tuple[RowStateLaunch, ...] | None = None
    row_states_why: str = ""
    moved: str = ""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """``way``: through whom it is released; "none": refused, for ``why``."""

    pid: int
    rank: int | None
    way: Way
    why: str
    proof: str


@dataclass(frozen=True, slots=True)
class UnwedgePlan:
    """``refused``: why nothing at all is done ("" otherwise). ``seconds``: (least, most) until nothing waits; None: not known.

    ``writes``: a step's writes times the steps in flight, for each rank; None: the layers are not known. ``guard``: the agents arm
    the guard with the release, so that later steps do not wedge and no filler is needed.
    """

    ranks: tuple[RankPlan, ...]
    refused: str
    writes: int | None
    layers: int | None
    in_flight: int
    seconds: tuple[float, float] | None
    fillers: FillerPlan
    guard: bool
    restart_s: float | None
    restart_why: str

    def lines(self) -> list[str]:
        """For a person."""
        found = []
        for one in self.ranks:
            name = f"rank {one.rank}" if one.rank is not None else "rank not known"
            does = {
                "agent": "released by the agent inside it",
                "debugger": "released by cuda-gdb, one attach",
                "none": "left alone",
            }
            found.append(f"{name} (pid {one.pid}): {does[one.way]}: {one.why}")
            if one.proof:
                found.append(f"  wedged, as shown by: {one.proof}")
        if self.refused:
            return [*found, f"Refused: {self.refused}"]
        if self.writes is not None:
            found.append(f"writes: {self.layers} indexer layers x {self.in_flight} steps in flight = {self.writes} for each rank")
        else:
            found.append(
                f"writes: indexer layers (not known) x {self.in_flight} steps in flight, for each rank; until nothing waits"
            )
        if self.seconds is not None:
            low, high = self.seconds
            found.append(f"time: {low:.1f} to {high:.1f} s (0.45 s a write through cuda-gdb, 0.01 s inside: one H200)")
        found.append(f"filler requests: {self.fillers.text}")
        if self.guard:
            found.append("guard: armed with the release, so that later steps do not wedge (control.json switches it off)")
        cost = f"{self.restart_s:.0f} s, its own last start" if self.restart_s is not None else f"not known ({self.restart_why})"
        found.append(f"a restart instead: {cost}, and every running request is lost")
        return found


def _build(facts: RankFacts) -> tuple[bool, str]:
    names = facts.releases or ((facts.version,) if facts.version else ())
    if not names:
        return False, "which build it is could not be told, so it is not known whether the row states are zeroed before each launch"
    for name in names:
        able, why = zeroed_before_launch(name)
        if not able:
            return False, why
    how = "its Python, byte for byte" if facts.releases else "by the version it says"
    return True, f"vLLM {' or '.join(names)} ({how}) zeroes the row states before each launch"


def _plan_rank(facts: RankFacts, via: str, hung: str) -> RankPlan:
    def plan(way: Way, why: str, proof: str = "") -> RankPlan:
        return RankPlan(facts.rank.pid, facts.rank.rank, way, why, proof)

    if facts.moved:
        return plan("none", f"it moves: {facts.moved}")
    able, why = _build(facts)
    if not able:
        return plan("none", why)
    proof = hung
    if facts.row_states is not None:
        count, said = known_waits(facts.row_states)
        if not count:
            return plan("none", f"the row states were read, and {said}")
        proof = f"row states: {count} at the known wait" + (f"; {hung}" if hung else "")
    elif not hung:
        return plan("none", f"not shown to be wedged: {facts.row_states_why or 'its row states were not read'}")
    inside = facts.agent and facts.row_states is not None
    if via == "agent" and not inside:
        return plan("none", f"no answer from an agent in it: {facts.agent_why or facts.row_states_why or 'not armed'}")
    if inside and via != "debugger":
        return plan("agent", why, proof)
    return plan("debugger", f"{why}; what waits is read first, and nothing is written unless it is the known wait", proof)


def plan_unwedge(
    ranks: Sequence[RankFacts],
    *,
    hung: str,
    healthy: str,
    live: int | None,
    padded: Sequence[int] | None,
    max_num_seqs: int | None,
    layers: int | None,
    in_flight: int = IN_FLIGHT,
    via: str = "auto",
    restart_s: float | None = None,
    restart_why: str = "",
) -> UnwedgePlan:
    """``hung``: what shows that the server is wedged, by other means than row states ("" if nothing does); ``healthy``: what shows
    that it is not ("" otherwise). ``via``: auto, agent or debugger."""
    planned = tuple(_plan_rank(one, via, hung) for one in ranks)
    refused = ""
    if healthy:
        refused = f"it is not wedged: {healthy}"
    elif not ranks:
        refused = "no worker process was found"
    elif all(one.way == "none" for one in planned):
        refused = "no rank may be released (see above)"
    acting = [one for one in planned if one.way != "none"]
    writes = layers * in_flight if layers is not None else None
    seconds: tuple[float, float] | None = None
    if writes is not None and acting:
        each = max(DEBUGGER_WRITE_S if one.way == "debugger" else AGENT_WRITE_S for one in acting)
        start = ATTACH_S if any(one.way == "debugger" for one in acting) else 0.1
        seconds = (start + each * layers, start + each * writes) if layers is not None else None
    guard = bool(acting) and all(one.way == "agent" for one in acting) and all(one.guard_needed for one in ranks)
    fillers = FillerPlan(0, "none: the guard keeps later steps from wedging") if guard else plan_fillers(live, padded, max_num_seqs)
    return UnwedgePlan(planned, refused, writes, layers, in_flight, seconds, fillers, guard, restart_s, restart_why)


_STAMP = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_SERVING = ("Starting vLLM server on", "Starting vLLM API server", "Application startup complete")


def startup_seconds(head: str) -> float | None:
    """Seconds from the log's first stamped line to the one that says that it serves; None: one of them is not there.

    ``head``: the beginning of the log (at most a MiB is looked at). Stamps have no year; a start over midnight is understood.
    """
    first: int | None = None
    last: int | None = None
    for line in head[: 1 << 20].splitlines():
        match = _STAMP.search(line[:400])
        if match:
            _, _, hour, minute, second = (int(part) for part in match.groups())
            last = hour * 3600 + minute * 60 + second
            first = last if first is None else first
        if any(word in line for word in _SERVING) and first is not None and last is not None:
            # "Starting vLLM API server" opens the log of some releases: nothing has been loaded by then.
            taken = (last - first) % 86400
            if taken > 0:
                return float(taken)
    return None
