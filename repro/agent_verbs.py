"""What ``agent install``, ``agent show`` and ``agent ask`` do and print."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from ..errors import UnavailableError, UsageError
from .agent_ask import ask_row_states, row_state_lines, the_one_alive
from .agent_install import install_into_folder, install_with_python
from .agent_show import AgentDocument, agent_lines, default_folder, read_agents
from .atomic import keep_document
from .console import Screen
from .exits import STATUS
from .options import Common
from .server_names import asked_by

__all__ = ["run_ask", "run_install", "run_show"]


def run_install(common: Common, *, python: Path | None, into: Path | None) -> int:
    """Exit status 0: installed, and seen to be there."""
    if (python is None) == (into is None):
        raise UsageError(
            "say where: --python INTERPRETER or --into FOLDER, one of them",
            help_text="dsv4-repro agent install --python /path/to/venv/bin/python, or --into DIR and PYTHONPATH=DIR",
        )
    if into is not None:
        done = install_into_folder(into)
    else:
        assert python is not None
        with tempfile.TemporaryDirectory(prefix="dsv4-repro-agent-") as scratch:
            done = install_with_python(python, Path(scratch))
    _show(common, AgentDocument(installed=dataclasses.asdict(done)), done.lines())
    return STATUS["clean"]


def run_show(common: Common, *, folder: Path | None) -> int:
    """Exit status 0: all was read."""
    document = read_agents(_folder(folder))
    # One that runs; whether its last step stands or is about to end, only a look over time tells.
    running = [f"next: dsv4-repro why {rank.pid}" for rank in document.ranks if rank.alive][:1]
    _show(common, document, [*agent_lines(document), *running])
    return STATUS[document.outcome]


def _folder(given: Path | None, verb: str = "agent show") -> Path:
    """The folder that was named, or that of the server whose pid was; without either the usual one. UnavailableError: no such
    server, or no agent in it."""
    if given is None:
        return default_folder()
    text = str(given)
    if not (text.isascii() and text.isdigit()) or given.exists():
        return given
    from .serving.permission import as_root, closed
    from .serving.ranks import find_named

    with asked_by(verb):
        target = find_named(int(text[:18]))
    if target.agent_folder is None and (names := closed(target.unread)):
        raise UnavailableError(
            f"whether the server of process {text} has an agent cannot be told: {names[0]} is closed to this user",
            help_text=f"As root, or as the server's user: {as_root(f'dsv4-repro agent show {text}')}",
        )
    if target.agent_folder is None:
        raise UnavailableError(
            f"the server of process {text} shows no agent",
            help_text=f"Whether it was asked for one: dsv4-repro doctor --pid {text}",
        )
    return target.agent_folder


def run_ask(common: Common, *, folder: Path | None, pid: int | None) -> int:
    """Exit status 0: answered."""
    where = _folder(folder, "agent ask")
    name = the_one_alive(where, pid)
    states = ask_row_states(where, name, timeout=common.timeout or 2.0)
    lines = [*row_state_lines(states), f"next: dsv4-repro why {name.partition('-')[0]}"]
    _show(common, AgentDocument(folder=str(where), row_states=states.model_dump(mode="json")), lines)
    return STATUS["clean"]


def _show(common: Common, document: AgentDocument, lines: list[str]) -> None:
    screen = Screen(as_json=common.as_json)
    screen.tell(lines, indent="    ")
    kept = document.model_dump(mode="json", by_alias=True)
    keep_document(common.out, "agent", kept)
    screen.document(kept)
