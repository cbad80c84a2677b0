"""Which server ``watch`` watches: found by PID, by URL or because it is the only one, and again after it was restarted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..clock import Clock
from ..errors import SeveralServersError, UnavailableError, UsageError
from ..forensics.collect.process_table import start_ticks
from .server_names import asked_by
from .serving.records import ServerTarget

__all__ = ["WatchFinder", "check_named", "together"]

#: How several servers are told apart here.
_ASKED = ("watch --pid", "  (or by its URL: --url)")


class WatchFinder:
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


def check_named(pid: int | None, url: str | None, clock: Clock) -> None:
    """What no waiting mends is refused before the watch begins. UnavailableError: no process of that pid, or several servers and
    none named. A server that is not there yet, or ends later, is waited for."""
    from .serving.ranks import find_named

    if pid is None and url is not None:
        return
    try:
        with asked_by(*_ASKED):
            find_named(pid, clock=clock)
    except SeveralServersError:
        if url is None:
            raise
    except UnavailableError:
        if pid is not None and start_ticks(pid) is None:  # another namespace's number, or a zombie
            raise


def together(pid: int, url: str, clock: Clock) -> str:
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
