"""What ``watch`` does on a hang: a run directory, the operator's command, the message."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..clock import Clock, utc_stamp
from ..errors import RunStoreError
from .console import Screen, printable
from .serving.hang_actions import WEBHOOK_SCHEMA, HangCommand
from .serving.hang_document import HangVerdict
from .serving.hang_message import MESSAGE_S, send_in_process
from .serving.hang_process import HangKept, capture_in_process
from .serving.interrupts import interrupts_held
from .serving.run_retention import prune_runs
from .serving.watch_loop import Hang

__all__ = ["WatchActions", "WatchFlags"]

_INDENT = "  "


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


class WatchActions:
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
