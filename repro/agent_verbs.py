"""What ``agent install``, ``agent show`` and ``agent ask`` do and print."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from ..errors import UsageError
from .agent_ask import ask_row_states, row_state_lines, the_one_alive
from .agent_install import install_into_folder, install_with_python
from .agent_show import AgentDocument, agent_lines, default_folder, read_agents
from .console import Screen, printable
from .exits import STATUS
from .options import Common

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
    document = read_agents(folder or default_folder())
    _show(common, document, agent_lines(document))
    return STATUS[document.outcome]


def run_ask(common: Common, *, folder: Path | None, pid: int | None) -> int:
    """Exit status 0: answered."""
    where = folder or default_folder()
    states = ask_row_states(where, the_one_alive(where, pid), timeout=common.timeout or 2.0)
    _show(common, AgentDocument(folder=str(where), row_states=states.model_dump(mode="json")), row_state_lines(states))
    return STATUS["clean"]


def _show(common: Common, document: AgentDocument, lines: list[str]) -> None:
    screen = Screen(as_json=common.as_json)
    screen.say(*(printable(line) for line in lines))
    screen.document(document.model_dump(mode="json", by_alias=True))
