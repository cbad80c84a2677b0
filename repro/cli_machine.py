"""Verbs about this machine and what can run on it: doctor, list, show."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Common, flags

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""

    @app.command(short_help="What this machine, container and user can do.")
    @flags(Common)
    def doctor(
        common: Common,
        clean: Annotated[bool, typer.Option("--clean", help="End leftover processes of earlier runs (asks, or --yes).")] = False,
    ) -> int:
        """What this machine, container and user can do, each with its remedy."""
        from .doctor import run_doctor

        return run_doctor(common, clean=clean)

    @app.command(name="list", short_help="The scenarios, and where each can run here.")
    @flags(Common)
    def list_(common: Common) -> int:
        """The scenarios, and where each can run on this machine."""
        from .catalogue import run_list

        return run_list(common)

    @app.command(short_help="All about one scenario: story, fixes, plan fields.")
    @flags(Common)
    def show(common: Common, scenario: Annotated[str, typer.Argument(help="A scenario's name, as in list.")]) -> int:
        """All about one scenario: what happens, the fixes, what is expected where, the fields of its plan."""
        from .catalogue import run_show

        return run_show(scenario, common)
