"""``unwedge``: look, plan, say; with ``--yes`` release, watch for recovery, cordon. Every step's outcome is in one document."""

from __future__ import annotations

import dataclasses
import os
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..clock import SYSTEM, Clock
from ..errors import RefusedError, ReproError, UnavailableError, UsageError
from .console import Screen, printable, wrap
from .options import Common
from .server_names import http_address

if TYPE_CHECKING:
    from .serving.completions import FillerRequests
    from .serving.records import ServerTarget
    from .serving.unwedge_act import Counters, RankOutcome, Recovery
    from .serving.unwedge_look import UnwedgeLook

__all__ = ["UnwedgeDocument", "cordon_lines", "run_unwedge"]

ACCEPT_S = 10.0
RECOVERY_S = 20.0
#: After the fillers left, the engine is looked at for so long.
AFTER_S = 6.0
HOLD_S, ROUNDS = 60.0, 3


class UnwedgeDocument(BaseModel):
    """``dsv4-repro unwedge --json``. ``outcome``: clean (it goes again), hang (wedged: a dry run, or still), other (it died),
    inconclusive (refused, or not known). ``ranks``: what became of each, round by round; empty in a dry run."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)

    schema_: Literal["dsv4-repro/unwedge/1"] = Field(alias="schema", default="dsv4-repro/unwedge/1")
    outcome: Literal["clean", "hang", "other", "inconclusive"]
    exit_status: int
    dry_run: bool
    refused: str = ""
    plan: dict[str, Any] = Field(default_factory=dict)
    ranks: tuple[dict[str, Any], ...] = ()
    fillers: dict[str, Any] = Field(default_factory=dict)
    recovery: dict[str, Any] = Field(default_factory=dict)
    cordon: tuple[str, ...] = ()
    unread: tuple[dict[str, str], ...] = ()
    seconds: float = 0.0


def cordon_lines(base_url: str | None, pid: int | None) -> tuple[str, ...]:
    """What to do next, and why: nothing here can undo that released rows held garbage."""
    where = base_url or "this server"
    return (
        "Cordon it now: take it out of the load balancer, send it nothing new.",
        "The released rows are padding rows; their indices are garbage that nobody is meant to read (docs/unwedge.md: what was "
        "shown of that, and what not).",
        f"Drain: wait until vllm:num_requests_running is 0 at {where}/metrics"
        + (f", then restart it (pid {pid})" if pid is not None else ", then restart it")
        + "; the next drain through a padded batch wedges it again unless the guard is armed.",
        "Upgrade to a release with both fixes, or start it with DSV4_REPRO_GUARD=1 (docs/agent.md).",
    )


def _target(named: str | None, url: str | None, agent_folder: Path | None, clock: Clock) -> ServerTarget:
    from .serving.completion_stream import shown_url
    from .serving.unwedge_look import api_pid_of_run
    from .why_verb import find_one

    # A number is a pid, also where a folder of that name lies here.
    if named is not None and not (named.isascii() and named.isdigit()) and os.path.isdir(named):
        named = str(api_pid_of_run(Path(named)))
    changes: dict[str, Any] = {}
    if url is not None:
        changes["base_url"] = shown_url(http_address(url, "--url"))
    target = find_one(named, clock, verb="unwedge")
    if agent_folder is not None:
        changes["agent_folder"] = agent_folder
    return dataclasses.replace(target, **changes)


def _headers() -> dict[str, str]:
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _plain(record: Any) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(record).items() if value is not None}


class _Work:
    """The part that acts. ``rows``: outcomes of all rounds."""

    def __init__(self, looked: UnwedgeLook, screen: Screen, *, folder: Path, hold: float, rounds: int, clock: Clock) -> None:
        self.looked, self.screen, self.folder = looked, screen, folder
        self.hold, self.rounds, self.clock = hold, rounds, clock
        self.rows: list[dict[str, Any]] = []
        self.fillers: dict[str, Any] = {}
        self.tool: Any = None

    def tool_for(self, ways: Sequence[str]) -> None:
        """Find cuda-gdb before anything is touched, where it is needed. ToolMissingError."""
        if "debugger" in ways:
            from ..forensics.collect.cuda_gdb import find_cuda_gdb, probe_cuda_gdb

            self.tool = probe_cuda_gdb(find_cuda_gdb(), self.folder, clock=self.clock)
            if self.tool.python is None:
                raise UnavailableError(
                    f"{self.tool.path} has no Python inside and cannot release again and again",
                    help_text="Name another: DSV4_REPRO_CUDA_GDB=/path/to/cuda-gdb (12.7 or later)",
                )

    def start_fillers(self, stack: ExitStack, count: int) -> FillerRequests | None:
        """Sent before anything is released, and seen to be accepted. None: there are none, and ``fillers`` says why."""
        from .serving.completions import FillerRequests
        from .serving.served_model import served_model

        target = self.looked.target
        if not count:
            return None
        if target.base_url is None:
            self.fillers = {"asked": count, "accepted": 0, "why": "the server's URL is not known (--url)"}
            return None
        try:
            model = target.model or served_model(target.base_url, _headers())
        except ReproError as error:
            self.fillers = {"asked": count, "accepted": 0, "why": str(error)}
            return None
        sent = FillerRequests(target.base_url, model, count, max_tokens=2048, clock=self.clock, headers=_headers())
        stack.enter_context(sent)
        sent.wait_accepted(ACCEPT_S)
        self.fillers = {
            "asked": count,
            "accepted": sent.accepted,
            "faults": {str(key): value for key, value in sent.faults.items()},
        }
        return sent

    def once(self, counters: Counters, before: float | None, number: int) -> Recovery | str:
        """One round: progress again, release, recovery. A text: why nothing was released."""
        from .serving.unwedge_act import release_all, still_moving, wait_for_recovery

        moves, read = still_moving(before, counters, self.clock)
        if moves:
            return f"it moves again: {moves}"
        if not read and not all(plan.way == "agent" for plan in self.looked.plan.ranks if plan.way != "none"):
            return "the metrics cannot be read, so it is not known that it still stands: no debugger is attached"
        outcomes = release_all(
            self.looked.target, self.looked.plan.ranks, folder=self.folder / f"round-{number}", agents=self.looked.agents,
            guard=self.looked.plan.guard, tool=self.tool, clock=self.clock,
        )  # fmt: skip
        self.keep(outcomes, number)
        if all(one.state in ("refused", "failed", "skipped") for one in outcomes):
            known = all(one.writes is not None for one in outcomes)
            said = "nothing was released: " if known else "whether anything was released is not known: "
            return said + "; ".join(f"pid {one.pid}: {one.why}" for one in outcomes)
        if any(one.state in ("died", "left") for one in outcomes):
            return "; ".join(f"pid {one.pid}: {one.state}: {one.why}" for one in outcomes if one.state in ("died", "left"))
        return wait_for_recovery(before, counters, seconds=RECOVERY_S, clock=self.clock)

    def keep(self, outcomes: Sequence[RankOutcome], number: int) -> None:
        for one in outcomes:
            self.rows.append({"round": number, **_plain(one)})
            name = f"rank {one.rank}" if one.rank is not None else f"pid {one.pid}"
            self.screen.say(
                f"{name}: {one.state}, {one.writes if one.writes is not None else '?'} writes, {one.seconds:.1f} s: {one.why}"
            )

    def run(self, count: int) -> tuple[Recovery | None, str]:
        """(the last recovery seen, why it ended)."""
        from .serving.unwedge_act import counters_of, survivors_done

        target = self.looked.target
        counters = counters_of(target.base_url, self.clock) if target.base_url is not None else (lambda: None)
        before, last, why = self.looked.tokens, None, ""
        with ExitStack() as stack:
            sent = self.start_fillers(stack, count)
            for number in range(1, self.rounds + 1):
                done = self.once(counters, before, number)
                if isinstance(done, str):
                    return last, done
                last, why = done, done.text
                self.screen.say(done.text)
                if done.recovered is None or (not done.recovered and not any(self.wrote(number))):
                    # Again would be no better: the metrics say nothing, or nothing could be written.
                    return last, why
                if not done.recovered:
                    before = (counters() or _NONE).generation_tokens
                    continue
                if sent is None:
                    return last, why
                ended = survivors_done(counters, sent, seconds=self.hold, clock=self.clock)
                self.fillers["survivors_ended"] = ended
                sent.stop()
                if not self.stands(counters):
                    return last, why
                # The batch passed a padded size while the fillers left: the same again, now without them.
                sent, before = None, (counters() or _NONE).generation_tokens
                why = "it wedged again while the fillers left"
                last = dataclasses.replace(last, recovered=False, text=why)
                self.screen.say(why)
        return last, why

    def wrote(self, number: int) -> list[bool]:
        """Whether each rank was written to in this round."""
        return [bool(row.get("writes")) for row in self.rows if row["round"] == number]

    def stands(self, counters: Counters) -> bool:
        """Whether requests run and no token comes for some seconds."""
        end = self.clock.monotonic() + AFTER_S
        first = counters()
        while self.clock.monotonic() < end:
            self.clock.sleep(0.5)
            sample = counters()
            if sample is None or first is None or sample.running == 0 or sample.generation_tokens != first.generation_tokens:
                return False
        return first is not None


class _Nothing:
    generation_tokens: float | None = None


_NONE = _Nothing()


def _after_refusal(refused: str, looked: UnwedgeLook, same: str) -> str:
    """``why`` for a server that is not wedged; for one that may be the evidence, and then the restart that is left. The same as
    root where the server is another user's: what decides was not read."""
    from .serving.permission import as_root, closed
    from .why_verb import attach_step

    if closed(looked.unread):
        return f"{as_root(f'dsv4-repro unwedge {same}')}    # as root, or as the server's user, more is read"
    if refused.startswith("it is not wedged") or not looked.target.ranks:
        return f"dsv4-repro why {same}    # its state, and since when"
    step = attach_step(looked.target.ranks[0].pid)
    return step if "#" in step else f"{step}    # if it stands: the evidence, then restart the server (docs/production.md)"


def _judge(
    work: _Work, last: Recovery | None, target: ServerTarget
) -> tuple[Literal["clean", "hang", "other", "inconclusive"], int]:
    if any(row["state"] == "died" for row in work.rows):
        return "other", 4
    if last is not None and last.recovered:
        return "clean", 0
    if last is not None and last.recovered is False and work.rows:
        return "hang", 3
    return "inconclusive", 5


def run_unwedge(
    named: str | None,
    common: Common,
    *,
    via: str = "auto",
    url: str | None = None,
    agent_folder: Path | None = None,
    layers: int | None = None,
    fillers: int | None = None,
    hold: float = HOLD_S,
    rounds: int = ROUNDS,
    clock: Clock = SYSTEM,
) -> int:
    """The verb. Exit status: 0 it goes again, 3 wedged (dry run, or still), 4 it died, 5 refused or not known."""
    from .serving.unwedge_act import locked
    from .serving.unwedge_look import look_and_plan

    if via not in ("auto", "agent", "debugger"):
        raise UsageError(f"--via {via[:40]}: auto, agent or debugger")
    screen = Screen(as_json=common.as_json, clock=clock)
    began = clock.monotonic()
    screen.progress("looking, without touching anything")
    target = _target(named, url, agent_folder, clock)
    looked = look_and_plan(target, via=via, layers=layers, clock=clock)
    screen.end_progress()
    plan = looked.plan
    pid = target.api_pid if target.api_pid is not None else next(iter(target.engine_pids), None)
    same = str(pid) if pid is not None else target.base_url or "PID"
    if not plan.refused:
        known = any(one.way == "agent" for one in plan.ranks)
        what = "WEDGED in the known wait of vLLM #51593" if known else "STANDS STILL; what it waits for is judged after the attach"
        screen.say(*wrap(f"{target.base_url or same}: {what}"), style="bad")
    screen.say(*(text for line in plan.lines() for text in wrap(line, indent="  ")))
    blind = [f"could not read: {item.what}: {item.why}" for item in looked.unread[:12]]
    screen.say(*(text for line in blind for text in wrap(line, indent="  ")), style="dim")

    def document(outcome: Literal["clean", "hang", "other", "inconclusive"], status: int, **more: Any) -> int:
        made = UnwedgeDocument(
            outcome=outcome, exit_status=status, dry_run=not common.yes, plan=dataclasses.asdict(plan),
            unread=tuple({"what": item.what, "why": item.why, "remedy": item.remedy} for item in looked.unread),
            seconds=round(clock.monotonic() - began, 2), **more,
        )  # fmt: skip
        screen.document(made.model_dump(mode="json", by_alias=True))
        return status

    if plan.refused:
        screen.say(f"next: {_after_refusal(plan.refused, looked, same)}")
        return document("inconclusive", 5, refused=plan.refused)
    if not common.yes:
        given = (
            ("--via", None if via == "auto" else via), ("--url", url), ("--agent-folder", agent_folder), ("--layers", layers),
            ("--fillers", fillers), ("--hold", None if hold == HOLD_S else hold),
            ("--rounds", None if rounds == ROUNDS else rounds),
        )  # fmt: skip
        words = [text for flag, value in given if value is not None for text in (flag, str(value))]
        screen.say("Nothing was touched.", f"next: {printable(shlex.join(['dsv4-repro', 'unwedge', same, *words, '--yes']))}")
        return document("hang", 3)
    folder = common.out or Path(tempfile.mkdtemp(prefix="dsv4-repro-unwedge-"))
    folder.mkdir(parents=True, exist_ok=True)
    work = _Work(looked, screen, folder=folder, hold=hold, rounds=rounds, clock=clock)
    try:
        work.tool_for([one.way for one in plan.ranks])
        with locked(target):
            last, why = work.run(plan.fillers.count if fillers is None else fillers)
    except RefusedError as error:
        screen.say(*wrap(f"Refused: {error}"))
        return document("inconclusive", 5, refused=str(error))
    outcome, status = _judge(work, last, target)
    if last is None or why != last.text:  # else it was said as it came
        screen.say(printable(why), style="good" if outcome == "clean" else "bad")
    verdict = {"clean": "GOING AGAIN", "hang": "STILL WEDGED", "other": "DIED"}.get(outcome, "NOT KNOWN")
    screen.say(verdict, style="good" if outcome == "clean" else "bad")
    # A number of writes that is not known (no entry) may be one: cordoned, too.
    cordon = cordon_lines(target.base_url, target.api_pid) if any(row.get("writes", 1) for row in work.rows) else ()
    screen.say(*(text for line in cordon for text in wrap(line, indent="  ")))
    return document(
        outcome, status, ranks=tuple(work.rows), fillers=work.fillers, cordon=cordon, why=why, folder=str(folder),
        recovery=_plain(last) if last is not None else {},
    )  # fmt: skip
