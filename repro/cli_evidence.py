"""Verbs that judge and render what is there already: autopsy, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Common, flags

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""

    @app.command(short_help="Explain a hang from a core dump, a run directory, a debugger log, or a PID.")
    @flags(Common)
    def autopsy(
        common: Common,
        targets: Annotated[
            list[str], typer.Argument(help="Core dumps, run directories, debugger logs; or one PID.", metavar="TARGET")
        ],
        attach: Annotated[
            bool, typer.Option("--attach", help="Attach cuda-gdb to the PID: freezes it for about a second.")
        ] = False,
        freeze: Annotated[
            bool,
            typer.Option("--freeze", help="With --attach: stop the engine process meanwhile, so that it cannot end its workers."),
        ] = False,
        expect: Annotated[
            str | None, typer.Option("--expect", help="hang or clean: exit 0 as expected, 1 not, 5 inconclusive.")
        ] = None,
    ) -> int:
        """Explain a hang from what was recorded of it: a GPU core dump (also .gz or .xz), a run directory, a cuda-gdb log.

        Needs no GPU, no driver and no CUDA toolkit. A PID is only touched with --attach (or --yes), and not while its server's
        counters move (--attach --yes: all the same).

        --freeze stops the engine process alone; its own deadline runs on meanwhile, and what that means is said first.

        Exit status: 3 a hang, 5 inconclusive.
        """
        from .autopsy import run_autopsy

        return run_autopsy(targets, common, attach=attach, expect=expect, freeze=freeze)

    @app.command(short_help="Render the report of a run again.")
    @flags(Common)
    def report(common: Common, run: Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN")]) -> int:
        """Render the reports of a run directory again; --out DIR, or --out FILE.md, .html or .xml, writes elsewhere."""
        from .reporting import run_report

        return run_report(run, common)
