"""The verb ``watch``: a watchdog for a server that somebody else started."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..clock import SYSTEM, Clock, utc_stamp
from ..errors import RunStoreError, SeveralServersError, UnavailableError, UsageError
from ..forensics.collect.process_table import start_ticks
from ..reports import paths
from .console import Screen, printable
from .server_names import asked_by, http_address
from .serving.canary import CanaryAnswer, completion_canary
from .serving.exporter import Exporter, parse_listen
from .serving.hang_actions import WEBHOOK_SCHEMA, HangCommand, checked_webhook
from .serving.hang_document import HangVerdict
from .serving.hang_message import MESSAGE_S, send_in_process
from .serving.hang_process import HangKept, capture_in_process
from .serving.interrupts import interrupts_held
from .serving.records import ServerTarget, Snapshot
from .serving.run_retention import prune_runs
from .serving.watch_loop import FIND_S, Hang, ObserverLike, WatchLoop
from .watch_lines import end_lines, first_lines

if TYPE_CHECKING:
    from .options import Common

__all__ = ["WatchFlags", "run_watch"]

ONCE_S = 60.0
_INDENT = "  "
#: How several servers are told apart here.
_ASKED = ("watch --pid", "  (or by its URL: --url)")
#: ``--once``: healthy for so long is decided, seconds.
SETTLED_S = 3.0
#: A diagnosis is read back for ``--json`` up to this size, bytes.
_MOST_DIAGNOSIS = 16 << 20
_STATUS = {"hung": 3, "healthy": 0, "crashed": 4, "exited": 4}


@dataclass(frozen=True, slots=True)
class WatchFlags:
    """The verb's own flags; see ``cli_production``."""

    pid: int | None = None
    url: str | None = None
    log: Path | None = None
    once: bool = False
    attach: bool = False
    on_hang: str | None = None
    on_hang_timeout_s: float = 300.0
    webhook: str | None = None
    listen: str | None = None
    canary_s: float | None = None
    keep: int = 20
    max_mb: int = 100


class _Finder:
    """The server of the flags, also after it was restarted under another pid: then by its URL. A URL that was given beside a pid
    is the one that is asked: in a container of its own the server may listen under another."""

    def __init__(self, pid: int | None, url: str | None, log: Path | None, clock: Clock) -> None:
        self._pid, self._url, self._log, self._clock = pid, url, log, clock
        self._given = pid is not None and url is not None
        if self._given and url is not None:
            self._url = url.rstrip("/").removesuffix("/v1")
        self._ticks = start_ticks(pid) if pid is not None else None
        self.why = self.help_text = ""
        #: Several servers are here and none was named: which is meant, no further look will tell.
        self.several = False
        #: The server that was found last.
        self.last: ServerTarget | None = None

    def __call__(self) -> ServerTarget | None:
        from .serving.ranks import find_named, with_log

        names: list[int | str | None] = [self._url] if self._url is not None else []
        # A pid that was given to another process since is not the server.
        if self._pid is not None and start_ticks(self._pid) == self._ticks:
            names.insert(0, self._pid)
        elif self._pid is not None and self._url is None:
            self.why = f"process {self._pid} is gone, and its URL was not known: where it comes back is not known"
            self.help_text = ""
        elif self._pid is None and self._url is None:
            names = [None]
        self.several = False
        for named in names:
            try:
                with asked_by(*_ASKED):
                    target = find_named(named, clock=self._clock)
            except UnavailableError as error:
                self.why, self.help_text = str(error), error.help_text
                self.several = isinstance(error, SeveralServersError)
                continue
            if target.api_pid is None and target.base_url is not None and not _answers(target.base_url):
                self.why = f"{target.base_url} does not answer, and no process is seen behind it"
                self.help_text, self.several = "Is the address right?", False
                continue
            self._url = self._url if self._given else target.base_url or self._url
            if self._url is not None and (self._given or target.base_url is None):
                target = replace(target, base_url=self._url)
            self.why = self.help_text = ""
            self.several = False
            self.last = with_log(target, self._log)
            return self.last
        return None

    def renewed(self, known: ServerTarget) -> ServerTarget:
        """The server that was found, looked up again; from any thread. A URL that it did not have yet is kept for its restart."""
        from .serving.ranks import refresh

        found = refresh(known, clock=self._clock)
        self._url = self._url or found.base_url
        return found


def _check_named(flags: WatchFlags, clock: Clock) -> None:
    """What no waiting mends is refused before the watch begins. UnavailableError: no process of that pid, or several servers and
    none named. A server that is not there yet, or ends later, is waited for."""
    from .serving.ranks import find_named

    if flags.pid is None and flags.url is not None:
        return
    try:
        with asked_by(*_ASKED):
            find_named(flags.pid, clock=clock)
    except SeveralServersError:
        if flags.url is None:
            raise
    except UnavailableError:
        if flags.pid is not None and start_ticks(flags.pid) is None:  # another namespace's number, or a zombie
            raise


def _together(pid: int, url: str, clock: Clock) -> str:
    """What is to be said of a pid and a URL that were both given; "" if they are one server's. UsageError if they are two."""
    from .serving.ranks import find_server

    try:
        by_url, by_pid = find_server(url, clock=clock), find_server(pid, clock=clock)
    except UnavailableError as error:
        return f"whether {url} is process {pid}'s cannot be checked now: {error}"
    behind, own = _processes(by_url), _processes(by_pid)
    if not behind:
        why = "; ".join(item.why for item in by_url.unread) or "who listens there is not seen"
        return f"whether {url} is process {pid}'s cannot be checked: {why}"
    if behind & own:
        return ""
    raise UsageError(
        f"--url {url[:120]} is served by process {by_url.api_pid or min(behind)}, which is none of the server of --pid {pid}",
        help_text="Give the two of one server, or only one of them.",
    )


def _processes(target: ServerTarget) -> set[int]:
    return {*target.tree, *target.engine_pids, *((target.api_pid,) if target.api_pid is not None else ())}


def _answers(url: str) -> bool:
    from ..forensics.collect.engine_metrics import scrape

    reading = scrape(url, timeout_s=2.0)
    return reading.health is not None or bool(reading.values)


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


class _Actions:
    """What follows a hang: run directory, command, message. One command at a time; a newer hang's waits for nothing."""

    def __init__(
        self, flags: WatchFlags, root: Path, screen: Screen, clock: Clock, capture: Callable[..., HangKept] = capture_in_process
    ) -> None:
        self._flags, self._root, self._screen, self._clock, self._capture = flags, root, screen, clock, capture
        self._command: HangCommand | None = None
        self._told: HangCommand | None = None
        self._messages: list[threading.Thread] = []
        self._stop = threading.Event()
        #: Whether the watch was asked to end: a capture is then ended too.
        self.asked: Callable[[], bool] = lambda: False
        self.last: HangKept | None = None

    def __call__(self, hang: Hang) -> str:
        kept = self._capture(
            hang, self._root, attach=self._flags.attach, stop=self.asked, say=self._say, clock=self._clock
        )  # fmt: skip
        self.last = kept
        if kept.stopped:
            self._screen.tell([f"HUNG; {kept.lost}"], style="bad", indent=_INDENT)
            return str(kept.run or "")
        verdict = kept.verdict
        name = f"{verdict.class_}{' / ' + verdict.cause if verdict.cause else ''}"
        self._screen.tell([f"HUNG: {name}, {verdict.confidence} confidence"], style="bad", indent=_INDENT)
        if verdict.sentence:
            self._screen.tell([verdict.sentence], indent=_INDENT)
        if not kept.lost:
            self._screen.say(printable(f"kept in {kept.run}"))
        self._screen.tell([f"next: dsv4-repro why {hang.target.api_pid or hang.target.base_url}"])
        # Nobody is to sleep on because a disk is full: command and message go out with what is known.
        self._start_command(hang, kept.run, verdict)
        self._start_message(hang, verdict)
        for path in prune_runs(self._root / "watch", keep=self._flags.keep, max_bytes=self._flags.max_mb << 20):
            self._screen.tell([f"removed {path} (--keep {self._flags.keep}, --max-mb {self._flags.max_mb})"], indent=_INDENT)
        if kept.lost:
            raise RunStoreError(printable(kept.lost), help_text=printable(kept.help_text))
        return str(kept.run)

    def _say(self, *lines: str, style: str = "") -> None:
        self._screen.tell(lines, style=style, indent=_INDENT)

    def _start_command(self, hang: Hang, run: Path | None, verdict: HangVerdict) -> None:
        if self._flags.on_hang is None:
            return
        if self._command is not None and self._command.running:
            self._screen.tell(["--on-hang of the hang before still runs: it is ended"], style="note")
            self._command.stop()
        environment = {
            "DSV4_REPRO_RUN": str(run or ""),
            "DSV4_REPRO_OUTCOME": verdict.outcome,
            "DSV4_REPRO_CLASS": verdict.class_,
            "DSV4_REPRO_CAUSE": verdict.cause or "",
            "DSV4_REPRO_CONFIDENCE": verdict.confidence,
            "DSV4_REPRO_SIGNATURE": verdict.signature or "",
            "DSV4_REPRO_SERVER_PID": str(hang.target.api_pid or ""),
            "DSV4_REPRO_SERVER_URL": hang.target.base_url or "",
            "DSV4_REPRO_HANG_NUMBER": str(hang.number),
        }
        # Without a run directory there is no place for its output.
        output = (run or Path(os.devnull)) / "on-hang.log"
        limit = self._flags.on_hang_timeout_s
        self._command = HangCommand(self._flags.on_hang, environment, output, timeout_s=limit, clock=self._clock)

    def _start_message(self, hang: Hang, verdict: HangVerdict) -> None:
        if self._flags.webhook is None:
            return
        document = {
            "schema": WEBHOOK_SCHEMA, "event": "hang", "when": utc_stamp(self._clock), "outcome": verdict.outcome,
            "class": verdict.class_, "cause": verdict.cause, "confidence": verdict.confidence, "signature": verdict.signature,
            "sentence": verdict.sentence, "live_requests": hang.assessment.live_requests, "hang_number": hang.number,
            "still_s": round(hang.assessment.at - hang.assessment.since, 1),
        }  # fmt: skip
        url = self._flags.webhook
        thread = threading.Thread(target=lambda: self._send(url, document), name="dsv4-repro-webhook", daemon=True)
        self._messages = [old for old in self._messages if old.is_alive()]
        self._messages.append(thread)
        thread.start()

    def _send(self, url: str, document: dict[str, Any]) -> None:
        told = send_in_process(url, document, clock=self._clock, stop=self._stop)
        self._screen.tell([f"webhook: {told}"], indent=_INDENT)

    def tell(self) -> None:
        """Say what became of the command, once."""
        if self._command is not None and self._command is not self._told and not self._command.running:
            self._told = self._command
            self._screen.tell([f"--on-hang: {self._command.outcome}"], indent=_INDENT)

    def finish(self, *, patient: bool) -> None:
        """``patient``: the command and the messages may come to their own end (within their deadlines)."""
        try:
            if patient:
                if self._command is not None:
                    self._command.wait(self._flags.on_hang_timeout_s + 15.0)
                for thread in self._messages:
                    thread.join(MESSAGE_S + 5.0)
        finally:
            # However often Ctrl-C is pressed: the command is ended, which takes seconds where it does not want to.
            with interrupts_held():
                self._stop.set()
                if self._command is not None:
                    self._command.stop()
                for thread in self._messages:
                    thread.join(1.0)
                self.tell()


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
    _check_named(flags, clock)
    screen = Screen(as_json=common.as_json, clock=clock)
    if flags.pid is not None and flags.url is not None and (note := _together(flags.pid, flags.url, clock)):
        screen.note(printable(note))
    root = common.out if common.out is not None else Path("runs")
    seconds = common.timeout if common.timeout is not None else ONCE_S if flags.once else None
    screen.tell(first_lines(flags, root, seconds), indent=_INDENT)
    if flags.attach and (missing := _no_debugger()):
        screen.tell([f"--attach: nothing would be attached: {missing}"], style="note", indent=_INDENT)
    finder = _Finder(flags.pid, flags.url, flags.log, clock)
    actions = _Actions(flags, root, screen, clock)
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


def _end(flags: WatchFlags, loop: WatchLoop, finder: _Finder, actions: _Actions, screen: Screen) -> int:
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
