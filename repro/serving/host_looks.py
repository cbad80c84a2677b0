"""Looks at the host side of every process: row states by the agent inside it, and Python stacks by py-spy, side by side."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ...clock import SYSTEM, Clock
from ...errors import ReproError
from ...forensics.collect import Collected, CollectedFile, Disturbance, write_artefact
from ...forensics.collect.host_stacks import HostStackCollector, find_py_spy
from ...forensics.device_state import DeviceState, Unread
from ...kernels.abi import ARRIVAL_COUNTER_OFFSET, ROW_STATE_SIZE
from ..agent_ask import RowStates, ask_row_states
from .capture_log import CaptureLog, rank_folder, rank_tag, safely, together, who
from .rank_numbers import agent_names
from .ranks import is_same
from .records import Rank, ServerTarget

__all__ = ["AgentAskCollector", "StackLook", "ask_agents", "look_at_stacks"]

#: py-spy reads one process in 0.1 to 1 s; one that takes longer is asked without stopping the process.
_STACK_S = 4.0
#: Processes of which stacks are taken at a time: each py-spy is a process of its own.
_STACKS_AT_ONCE = 8
_ASK_S = 1.0


class AgentAskCollector:
    """Writes ``row_states-TAG.json``: counters and lengths of each captured launch, read inside the worker on its side stream.

    Asked twice within the time: ``unchanged`` says whether the two answers agree.
    """

    name = "agent_row_states"
    disturbance: Disturbance = "none"
    deadline_s = 2 * _ASK_S + 0.5

    def __init__(self, folder: Path, agent_folder: Path, agent: str, tag: str, *, clock: Clock = SYSTEM) -> None:
        self._folder, self._agent_folder, self._agent, self._tag, self._clock = folder, agent_folder, agent, tag, clock

    def collect(self) -> Collected:
        first = ask_row_states(self._agent_folder, self._agent, timeout=_ASK_S, clock=self._clock)
        second: RowStates | None = None
        why = ""
        try:
            second = ask_row_states(self._agent_folder, self._agent, timeout=_ASK_S, clock=self._clock)
        except ReproError as error:
            why = str(error)
        last = second or first
        unchanged = None if second is None else _words(first) == _words(second)
        facts = {"stalled_s": last.stalled_s, "unchanged": unchanged, "launches": [launch.model_dump() for launch in last.launches]}
        path = write_artefact(self._folder / f"row_states-{self._tag}.json", json.dumps(facts, indent=1))
        memory: dict[int, int] = {}
        for launch in last.launches:
            base, lengths = int(launch.workspace, 16), int(launch.lengths_address, 16)
            memory |= {
                base + group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET: count & 0xFFFFFFFF
                for group, count in enumerate(launch.arrival_counters)
            }
            memory |= {lengths + 4 * row: length & 0xFFFFFFFF for row, length in enumerate(launch.lengths)}
        unread = [] if second is not None else [Unread("row states, second look", why, "dsv4-repro agent ask")]
        if not last.launches:
            remedy = "The agent must be loaded before the graphs are captured."
            unread.append(Unread("row states", "the agent knows no captured launch of persistent_topk", remedy))
        state = DeviceState("row states, asked inside the worker", "measured", grids=(), memory=memory) if memory else None
        files = (CollectedFile("row-states-list", path),)
        return Collected(self.name, self.disturbance, 0.0, files, state, facts, tuple(unread))


def _words(states: RowStates) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(one.workspace, tuple(one.arrival_counters), tuple(one.lengths)) for one in states.launches]


def ask_agents(target: ServerTarget, log: CaptureLog, *, clock: Clock = SYSTEM, root: Path = Path("/proc")) -> None:
    """Every rank's agent for its row states, side by side."""
    folder = target.agent_folder
    if folder is None:
        return  # the first sample has said that there is no agent
    names = agent_names(folder, target.ranks, root)
    asked: list[tuple[Rank, AgentAskCollector]] = []
    for rank in target.ranks:
        if rank.pid not in names:
            item = Unread(f"row states of {rank_tag(rank)}", "no agent answers for it", "dsv4-repro doctor --pid PID")
            log.missing("agent_row_states", "none", item, **who(rank))
            continue
        place = log.folder / rank_folder(rank, target.ranks)
        asked.append((rank, AgentAskCollector(place, folder, names[rank.pid], rank_tag(rank), clock=clock)))
    if not asked:
        return
    log.begin("agent_row_states", "none", AgentAskCollector.deadline_s, ranks=len(asked))
    jobs = [_collecting(collector, clock) for _, collector in asked]
    for (rank, collector), answer in zip(asked, together(jobs, seconds=AgentAskCollector.deadline_s + 0.5), strict=True):
        log.collected(answer or _silent(collector.name, "none", collector.deadline_s), **who(rank))


def _collecting(collector: AgentAskCollector | StackLook, clock: Clock) -> Callable[[], Collected]:
    return lambda: safely(collector, clock)


def _silent(name: str, disturbance: Disturbance, seconds: float) -> Collected:
    return Collected(name, disturbance, seconds, unread=(Unread(name, f"no end within {seconds:g} s; it is left alone"),))


class StackLook:
    """py-spy on one process: paused for a moment, or, if that does not come to an end, read while it runs."""

    name = "host_stacks"
    disturbance: Disturbance = "pauses"

    def __init__(self, pid: int, folder: Path, file_name: str, tool: Path, *, deadline_s: float, clock: Clock = SYSTEM) -> None:
        self._pid, self._folder, self._file_name, self._tool, self._clock = pid, folder, file_name, tool, clock
        self.deadline_s = deadline_s

    def collect(self) -> Collected:
        each = self.deadline_s / 2
        first = safely(
            HostStackCollector(
                self._pid, self._folder, deadline_s=each, clock=self._clock, tool=self._tool, file_name=self._file_name
            ),
            self._clock,
        )
        denied = any("may not read process" in item.why for item in first.unread)
        if first.files or denied or first.seconds < each / 2:
            return first
        second = safely(
            HostStackCollector(
                self._pid, self._folder, deadline_s=each, clock=self._clock, tool=self._tool, file_name=self._file_name,
                nonblocking=True,
            ),
            self._clock,
        )  # fmt: skip
        return second if second.files else dataclasses.replace(second, unread=(*first.unread, *second.unread))


def look_at_stacks(
    target: ServerTarget,
    log: CaptureLog,
    number: int,
    *,
    seconds: float,
    clock: Clock = SYSTEM,
    py_spy: Path | None = None,
    root: Path = Path("/proc"),
) -> bool:
    """The ``number``-th look at the stacks of every Python process of the server. False if none can be had at all."""
    try:
        tool = py_spy or find_py_spy()
    except ReproError as error:
        log.missing("host_stacks", "pauses", Unread("host stacks", str(error), error.help_text or ""))
        return False
    ranks = {rank.pid: rank for rank in target.ranks}
    others = [pid for pid, role in target.tree.items() if role in ("api", "engine") and pid not in ranks]
    each = max(min(_STACK_S, seconds - 0.5), 0.5)
    pids: list[int] = []
    looks: list[StackLook] = []
    for pid in [*ranks, *others]:
        rank = ranks.get(pid)
        if rank is not None and not is_same(rank, root):
            log.missing("host_stacks", "pauses", Unread(f"host stacks of {rank_tag(rank)}", "the process has ended"), **who(rank))
            continue
        place = log.folder / rank_folder(rank, target.ranks) if rank is not None else log.folder
        tag = rank_tag(rank) if rank is not None else f"{target.tree[pid]}-pid-{pid}"
        looks.append(StackLook(pid, place, f"host_stacks-{tag}-look{number}.txt", tool, deadline_s=each, clock=clock))
        pids.append(pid)
    if not looks:
        log.missing("host_stacks", "pauses", Unread("host stacks", "no process of the server is known", "Name its pid."))
        return False
    log.begin("host_stacks", "pauses", each, look=number, processes=len(looks))
    jobs = [_collecting(look, clock) for look in looks]
    answers: Sequence[Collected | None] = together(jobs, seconds=seconds + 4.5, width=_STACKS_AT_ONCE)
    for pid, look, answer in zip(pids, looks, answers, strict=True):
        facts = who(ranks[pid]) if pid in ranks else {"pid": pid, "role": target.tree[pid]}
        log.collected(answer or _silent(look.name, "pauses", seconds), look=number, **facts)
    return any(answer is not None and answer.files for answer in answers)
