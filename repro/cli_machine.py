"""Verbs about this machine and what can run on it: doctor, list, show."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Common, flags

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""

    @app.command(help="What this machine, container and user can do, each with its remedy; --clean ends leftovers of earlier runs.")
    @flags(Common)
    def doctor(
        common: Common,
        clean: Annotated[bool, typer.Option("--clean", help="End leftover processes of earlier runs (asks, or --yes).")] = False,
    ) -> int:
        from .doctor import run_doctor

        return run_doctor(common, clean=clean)
