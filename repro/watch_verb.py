"""The verb ``watch``: a watchdog for a server that somebody else started."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..clock import SYSTEM, Clock, utc_stamp
from ..errors import UnavailableError, UsageError
from ..reports import paths
from .console import Screen, printable
from .server_names import http_address
from .serving.canary import CanaryAnswer, completion_canary
from .serving.exporter import Exporter, parse_listen
from .serving.hang_actions import checked_webhook
from .serving.hang_process import HangKept
from .serving.records import ServerTarget, Snapshot
from .serving.watch_loop import FIND_S, ObserverLike, WatchLoop
from .watch_actions import WatchActions, WatchFlags
from .watch_lines import end_lines, first_lines
from .watched_server import WatchFinder, check_named, together

if TYPE_CHECKING:
    from .options import Common

__all__ = ["run_watch"]

ONCE_S = 60.0
_INDENT = "  "
#: ``--once``: healthy for so long is decided, seconds.
SETTLED_S = 3.0
#: A diagnosis is read back for ``--json`` up to this size, bytes.
_MOST_DIAGNOSIS = 16 << 20
_STATUS = {"hung": 3, "healthy": 0, "crashed": 4, "exited": 4}


def _observe(
    target: ServerTarget,
    emit: Callable[..., None],
    clock: Clock,
    canary_s: float | None,
    renew: Callable[[ServerTarget], ServerTarget],
) -> ObserverLike:
    from .serving.observer import Observer

    asks: dict[str, Callable[[float], CanaryAnswer]] = {}

    def ask(timeout_s: float) -> CanaryAnswer:
        url = observer.target.base_url
        if url is None:
            return CanaryAnswer("failed", "the server's URL is not known yet")
        return asks.setdefault(url, completion_canary(url, clock=clock))(timeout_s)

    # A watch may begin before its server has a port or a worker, and go on for weeks.
    observer = Observer(
        target, emit=emit, clock=clock, ask=ask if canary_s is not None else None, canary_s=canary_s or 30.0, renew=renew
    )
    return observer


@contextmanager
def _terminable() -> Iterator[threading.Event]:
    """SIGTERM (systemd, Kubernetes) and SIGHUP (a terminal that is closed) end the watch in order."""
    asked = threading.Event()

    def ask(_number: int, _frame: FrameType | None) -> None:
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, ask)}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup's choice stays
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_watch(flags: WatchFlags, common: Common, *, clock: Clock = SYSTEM) -> int:
    """The verb. With ``--once``: 3 a hang, 0 fine, 4 it has ended, 5 not decided. Else until SIGTERM (0) or Ctrl-C (130)."""
    if flags.log is not None and not os.path.isfile(flags.log):
        raise UsageError(f"--log {str(flags.log)[:200]}: there is no such file")
    if flags.webhook is not None:
        checked_webhook(flags.webhook)
    address = None if flags.once and flags.listen is None else parse_listen(flags.listen)
    if flags.url is not None:
        flags = replace(flags, url=http_address(flags.url, "--url"))
    check_named(flags.pid, flags.url, clock)
    screen = Screen(as_json=common.as_json, clock=clock)
    if flags.pid is not None and flags.url is not None and (note := together(flags.pid, flags.url, clock)):
        screen.note(printable(note))
    root = common.out if common.out is not None else Path("runs")
    seconds = common.timeout if common.timeout is not None else ONCE_S if flags.once else None
    screen.tell(first_lines(flags, root, seconds), indent=_INDENT)
    if flags.attach and (missing := _no_debugger()):
        screen.tell([f"--attach: nothing would be attached: {missing}"], style="note", indent=_INDENT)
    finder = WatchFinder(flags.pid, flags.url, flags.log, clock)
    actions = WatchActions(flags, root, screen, clock)
    say = _teller(screen, clock)

    def observe(target: ServerTarget, emit: Callable[..., None]) -> ObserverLike:
        if flags.canary_s is not None and target.base_url is None:
            say("--canary: none is sent before the server's URL is known; give it: --url", style="note")
        observers[:] = [_observe(target, emit, clock, flags.canary_s, finder.renewed)]
        return observers[0]

    def newest() -> Snapshot | None:
        latest = observers[0].latest() if observers else None
        return latest[0] if latest is not None else None

    observers: list[ObserverLike] = []
    loop = WatchLoop(finder, observe, actions, say, clock=clock)
    exporter = Exporter(address, lambda: loop.state) if address is not None else None
    patient = False
    with _terminable() as asked:
        actions.asked = asked.is_set
        try:
            if exporter is not None:
                exporter.start()
                host, port = exporter.address
                screen.tell([f"serving http://{f'[{host}]' if ':' in host else host}:{port}/metrics and /livez"])
                if exporter.open_to_others:
                    screen.tell(
                        ["other machines may read these, without a password; not so: --listen 127.0.0.1:PORT"],
                        style="note", indent=_INDENT,
                    )  # fmt: skip
            decided = _Decided(loop, clock, canary=newest if flags.canary_s is not None else None) if flags.once else None

            absent = ""

            def over() -> bool:
                nonlocal absent
                actions.tell()
                if finder.why != absent and loop.target is None:
                    # A watch that waits for its server says so, once for each reason.
                    absent = finder.why
                    more = f". {finder.help_text}" if finder.several else ""
                    say(f"no server: {absent}{more}; looked for every {FIND_S:g} s" if absent else "", style="note")
                return asked.is_set() or (decided is not None and (finder.several or decided()))

            loop.run(until=over, seconds=seconds)
            patient = flags.once
        finally:
            actions.finish(patient=patient)
            if exporter is not None:
                exporter.stop()
    return _end(flags, loop, finder, actions, screen)


def _no_debugger() -> str:
    """Why an attach would fail before it began, as far as is known now; at the hang it is too late to learn it."""
    from ..forensics.collect.cuda_gdb import find_cuda_gdb

    try:
        find_cuda_gdb()
    except UnavailableError as error:
        return str(error)
    return ""


def _teller(screen: Screen, clock: Clock) -> Callable[..., None]:
    def say(*lines: str, style: str = "") -> None:
        # A command is there to be pasted: no time before it.
        stamped = (line if line.startswith("next: ") else f"{utc_stamp(clock)} {line}" for line in lines if line)
        screen.tell(stamped, style=style, indent=_INDENT)

    return say


class _Decided:
    """``--once``: the first state that is one, and has lasted. Healthy is one that was seen to move, is idle, or says why it
    stands: before anything could be seen to stand still, a wedged server looks healthy too. ``canary``: the newest look, where
    one is sent: what came of it is waited for."""

    def __init__(self, loop: WatchLoop, clock: Clock, *, canary: Callable[[], Snapshot | None] | None = None) -> None:
        self._loop, self._clock, self._canary = loop, clock, canary
        self._healthy: float | None = None

    def __call__(self) -> bool:
        state = self._loop.state.state
        if state in ("hung", "crashed", "exited"):
            return True
        if state != "healthy":
            self._healthy = None
            return False
        self._healthy = self._clock.monotonic() if self._healthy is None else self._healthy
        seen = self._loop.assessment
        shown = seen is not None and (bool(seen.reasons) or seen.live_requests == 0 or seen.at - seen.since < SETTLED_S / 2)
        return shown and not self._waits() and self._clock.monotonic() - self._healthy >= SETTLED_S

    def _waits(self) -> bool:
        """Whether the canary has not come back yet."""
        target = self._loop.target if self._canary is not None else None
        if self._canary is None or target is None or target.base_url is None:
            return False  # none is sent
        seen = self._canary()
        return seen is None or seen.canary_waiting_s is not None or (seen.canary_age_s is None and not seen.canary_error)


def _end(flags: WatchFlags, loop: WatchLoop, finder: WatchFinder, actions: WatchActions, screen: Screen) -> int:
    state = loop.state
    status = _STATUS.get(state.state, 5) if flags.once else 0
    style = {0: "good", 3: "bad", 4: "bad"}.get(status, "note") if flags.once else "note"
    said = end_lines(
        state, loop.assessment, finder.last, once=flags.once, why=finder.why, help_text=finder.help_text
    )  # fmt: skip
    screen.tell(said[:1], style=style, indent=_INDENT)
    screen.tell(said[1:], indent=_INDENT)
    if actions.last is not None:
        where = {"run": str(actions.last.run)} if actions.last.run is not None else {}
        screen.document({**_document_of(actions.last), **where, "exit_status": status})
    else:
        screen.document({**_quiet(status, state.state, state.reason), "exit_status": status})
    return status


def _document_of(kept: HangKept) -> dict[str, Any]:
    """The diagnosis as the run has it; its head and why there is no more, where it has none."""
    if kept.run is not None and not kept.lost:
        try:
            with (kept.run / paths.DIAGNOSIS).open("rb") as stream:
                document = json.loads(stream.read(_MOST_DIAGNOSIS))
            if isinstance(document, dict):
                return document
        except (OSError, ValueError, RecursionError):
            pass
    verdict = kept.verdict.words()
    outcome = verdict.pop("outcome")
    why = kept.lost or "diagnosis.json cannot be read any more"
    unread = [{"what": "the capture", "why": why, "remedy": kept.help_text}]
    return _valid({"outcome": outcome, "ground": "server", "verdict": verdict, "unread": unread})


def _quiet(status: int, state: str, reason: str) -> dict[str, Any]:
    """The diagnosis of a watch that found no hang."""
    clean = status == 0
    verdict = {"class": "not-hung" if clean else "unknown", "confidence": "medium" if clean else "low"}
    sentence = f"the server is {state}{': ' + reason if reason else ''}"
    document = {"outcome": "clean" if clean else "inconclusive", "ground": "server", "verdict": {**verdict, "sentence": sentence}}
    return _valid(document)


def _valid(document: dict[str, Any]) -> dict[str, Any]:
    # Its model is for the end alone: it would stay in memory for weeks.
    from ..forensics.records import Diagnosis

    return Diagnosis.model_validate(document).document()
