"""The verb that gets a wedged server going again: unwedge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Common, flags

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""

    @app.command(short_help="Release the known wait of a wedged server. A dry run unless --yes.")
    @flags(Common)
    def unwedge(
        common: Common,
        server: Annotated[
            str | None,
            typer.Argument(
                help="A PID of the server, its URL, or a run directory; the only server here if left out.", metavar="PID|RUN"
            ),
        ] = None,
        via: Annotated[
            str, typer.Option("--via", help="auto, agent (inside, no ptrace) or debugger (cuda-gdb, one attach).")
        ] = "auto",
        url: Annotated[str | None, typer.Option("--url", help="The server's URL, where it cannot be told.")] = None,
        agent_folder: Annotated[
            Path | None, typer.Option("--agent-folder", help="The agent's folder (DSV4_REPRO_AGENT_DIR), where it cannot be told.")
        ] = None,
        layers: Annotated[
            int | None, typer.Option("--layers", help="Indexer layers, where they cannot be told.", min=1, max=1000)
        ] = None,
        fillers: Annotated[
            int | None, typer.Option("--fillers", help="So many filler requests instead of the planned number.", min=0, max=1024)
        ] = None,
        hold: Annotated[
            float,
            typer.Option(
                "--hold", help="Keep fillers in the batch until the survivors ended, at most so long (s).", min=0, max=3600
            ),
        ] = 60.0,
        rounds: Annotated[int, typer.Option("--rounds", help="Release again where it wedges again, at most.", min=1, max=20)] = 3,
    ) -> int:
        """Get a wedged server going again without a restart, where that is the known wait of vLLM #51593 and nothing else.

        Without --yes nothing is touched: what would be done is printed, beside the cost of a restart. Afterwards the server must be
        drained and restarted: the released rows held garbage.

        Exit status: 0 it goes again, 3 wedged (dry run, or still), 4 it died, 5 refused or not known.
        """
        from .unwedge_verb import run_unwedge

        return run_unwedge(
            server, common, via=via, url=url, agent_folder=agent_folder, layers=layers, fillers=fillers, hold=hold, rounds=rounds
        )
