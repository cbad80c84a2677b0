"""``run SCENARIO``: the group, and the defining scenario. Other scenarios add themselves with ``cli.group(app, "run")``."""

from __future__ import annotations

import typer

from .options import Common, PlanFlags, RunFlags, flags

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the group and ``run drain``."""
    run = typer.Typer(
        help="Provoke a scenario, catch it, explain it.",
        short_help="Provoke a scenario, catch it, explain it.",
        no_args_is_help=True,
    )

    @run.command(short_help="A draining MTP batch wedges the persistent top-k (vLLM #51593).")
    @flags(Common, PlanFlags, RunFlags)
    def drain(common: Common, plan: PlanFlags, run: RunFlags) -> int:
        """A draining MTP batch wedges the persistent top-k (vLLM #51593).

        Runs on a GPU if one is free, else the kernel's machine code is interpreted on the CPU.

        Exit status: 3 hang, 0 clean with the danger window reached, 5 window not reached.
        """
        from .drain_run import run_drain

        return run_drain(common, plan, run)

    app.add_typer(run, name="run")
