"""The verbs about the agent inside a server: agent install, agent show, agent ask."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Common, flags

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    agent = typer.Typer(help="The flight recorder, guard and rescue inside vLLM's own processes.", no_args_is_help=True)
    app.add_typer(agent, name="agent", short_help="Flight recorder, guard and rescue inside a server: install, show, ask.")

    @agent.command(short_help="Put the agent into a server's environment.")
    @flags(Common)
    def install(
        common: Common,
        python: Annotated[Path | None, typer.Option("--python", help="The interpreter that runs vLLM; its pip installs.")] = None,
        into: Annotated[Path | None, typer.Option("--into", help="A folder to unpack it into, for PYTHONPATH; no pip.")] = None,
    ) -> int:
        """Put the agent into a server's environment. It stays inert until DSV4_REPRO_AGENT=1 (or _GUARD, _RESCUE) is set there.

        Nothing is fetched. Undo: PYTHON -m pip uninstall dsv4-repro-agent, or delete the folder.
        """
        from .agent_verbs import run_install

        return run_install(common, python=python, into=into)

    @agent.command(short_help="What the agents on this machine recorded, armed or not and why.")
    @flags(Common)
    def show(
        common: Common,
        folder: Annotated[
            Path | None,
            typer.Argument(help="The agent's folder (DSV4_REPRO_AGENT_DIR), or a PID of its server.", metavar="FOLDER|PID"),
        ] = None,
    ) -> int:
        """Per process: last step, steps not seen to end, what is armed, what was found and what not. Reads files only.

        Exit status: 0 read, 5 something could not be read.
        """
        from .agent_verbs import run_show

        return run_show(common, folder=folder)

    @agent.command(short_help="Row states of a running server's top-k, read from inside; no ptrace.")
    @flags(Common)
    def ask(
        common: Common,
        folder: Annotated[
            Path | None,
            typer.Argument(help="The agent's folder (DSV4_REPRO_AGENT_DIR), or a PID of its server.", metavar="FOLDER|PID"),
        ] = None,
        pid: Annotated[int | None, typer.Option("--pid", help="The worker to ask, where there are several.", min=1)] = None,
    ) -> int:
        """Ask the agent in a worker for arrival counters and lengths, also while its GPU is wedged. Writes one file to FOLDER.

        Exit status: 0 answered, 5 no answer, or it cannot.
        """
        from .agent_verbs import run_ask

        return run_ask(common, folder=folder, pid=pid)
