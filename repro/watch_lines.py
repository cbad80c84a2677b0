"""What ``watch`` says first and last: what it looks at and what it will do, then the state, what shows it, and the next command."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from .serving.canary import CANARY_PROMPT, CANARY_TOKENS
from .serving.permission import as_root, closed
from .serving.watch_loop import autopsy_of

if TYPE_CHECKING:
    from pathlib import Path

    from .serving.exporter import WatchState
    from .serving.records import Assessment, ServerTarget

__all__ = ["Watched", "end_lines", "first_lines"]


class Watched(Protocol):
    """The flags that the first lines speak of (``watch_actions.WatchFlags``)."""

    @property
    def pid(self) -> int | None: ...
    @property
    def url(self) -> str | None: ...
    @property
    def once(self) -> bool: ...
    @property
    def attach(self) -> bool: ...
    @property
    def on_hang(self) -> str | None: ...
    @property
    def webhook(self) -> str | None: ...
    @property
    def canary_s(self) -> float | None: ...


def first_lines(flags: Watched, root: Path, seconds: float | None) -> list[str]:
    """What is looked at, for how long, what of it the server feels, and what follows a hang. ``seconds``: None, until it is ended.

    The webhook's address and the command stay unsaid: both may hold a secret.
    """
    named = " and ".join(
        [*([f"process {flags.pid}"] if flags.pid is not None else []), *([flags.url[:200]] if flags.url is not None else [])]
    )
    end = "until Ctrl-C or SIGTERM" if seconds is None else f"for {seconds:g} s at most"
    if flags.once:
        end = f"until its state is decided, {end}"
    touches = "reads only, sends nothing to it" if flags.canary_s is None and not flags.attach else "reads"
    lines = [f"watch: the server of {named or 'this machine'}, {end}; {touches}"]
    if flags.canary_s is not None:
        lines.append(
            f"--canary: a completion of {CANARY_PROMPT} tokens in and {CANARY_TOKENS} out every {flags.canary_s:g} s, one at a "
            "time; it joins the batch, is counted and billed"
        )
    follow = [f"evidence and report in {root / 'watch'}"]
    follow += ["cuda-gdb is attached (--attach), which stops the process for seconds"] if flags.attach else []
    follow += ["the command of --on-hang"] if flags.on_hang is not None else []
    follow += ["a message to --webhook"] if flags.webhook is not None else []
    return [*lines, f"on a hang: {'; then '.join(follow)}"]


def end_lines(
    state: WatchState, assessment: Assessment | None, target: ServerTarget | None, *, once: bool, why: str, help_text: str
) -> list[str]:
    """Verdict, what shows it, next command. ``target``: the server that was last found; ``why``, ``help_text``: why none is."""
    if not once:
        log = target.log_path if target is not None and state.state in ("exited", "crashed") else None
        counts = f"{state.hangs} hang(s), {state.restarts} restart(s)"
        found = f"{state.state}{': ' + why if state.state == 'no server' and why else ''}"
        return [
            f"watch ended; {counts} seen; the server: {found}",
            *([f"last run: {state.run}"] if state.run else []),
            *([f"next: {autopsy_of(log)}"] if log is not None else []),
        ]  # fmt: skip
    if state.state == "hung":
        return []
    if state.state == "no server":
        # A command is not to be broken: the one that lists what is here stands for those of the help.
        more = [help_text] if help_text and "dsv4-repro" not in help_text else []
        return [f"NOT DECIDED: no server{': ' + why if why else ''}", *more, "next: dsv4-repro why"]
    named = None if target is None else target.api_pid or target.base_url
    shown = "; ".join(assessment.reasons) if assessment is not None and assessment.reasons else state.reason
    if state.state == "healthy":
        moved = f"it moved {state.still_s:.1f} s before the last look" if state.still_s is not None else "it moves"
        live = "not known" if state.live_requests is None else str(state.live_requests)
        return [f"HEALTHY: {shown or moved}; live requests: {live}", *_blind_line(assessment)]
    if state.state in ("exited", "crashed"):
        log = target.log_path if target is not None else None
        follow = [f"next: {autopsy_of(log)}"] if log is not None else []
        return [f"ENDED ({state.state}): {shown or 'its processes are gone'}", *follow]
    lines = [f"NOT DECIDED: {state.state}{': ' + shown if shown else ''}", *_blind_line(assessment)]
    command = f"dsv4-repro why {named}"
    if target is not None and closed(target.unread):
        command = f"{as_root(command)}    # as root, or as the server's user, more is read"
    return [*lines, *([f"next: {command}"] if named is not None else [])]


def _blind_line(assessment: Assessment | None) -> list[str]:
    """What could not speak, by name; why, ``why`` tells. A canary that nobody asked for is not missing."""
    names: Iterable[str] = dict.fromkeys(item.signal for item in assessment.blind) if assessment is not None else ()
    missing = [name for name in names if name != "canary"]
    return [f"not seen: {', '.join(missing)}"] if missing else []
