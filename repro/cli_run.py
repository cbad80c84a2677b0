"""``run SCENARIO``: the group, the defining scenario with its plan, and every other scenario with the rows of its matrix.

Others are found by file and described by the first line of the file's docstring: nothing is imported for ``--help``.
"""

from __future__ import annotations

from pathlib import Path

import typer

from .options import Common, PlanFlags, RelativeFlags, RunFlags, ServerFlags, flags

__all__ = ["register", "relatives"]

#: Bytes of a scenario's file that are read for its first line.
_HEAD = 400


def relatives() -> dict[str, str]:
    """Scenarios beside the drain: name -> the first sentence of their module."""
    found = {}
    for path in sorted((Path(__file__).parents[1] / "scenarios").glob("*_scenario.py")):
        name = path.stem.removesuffix("_scenario").replace("_", "-")
        if name != "drain":
            with path.open(encoding="utf-8") as stream:
                first = stream.read(_HEAD).partition("\n")[0]
            found[name] = first.strip('"').replace("``", "")  # its marks of code are no words
    return found


def _add(run: typer.Typer, name: str, about: str) -> None:
    @run.command(name, short_help=about)
    @flags(Common, RelativeFlags)
    def relative(common: Common, rows: RelativeFlags) -> int:
        from .relative_run import run_relative

        return run_relative(name, common, rows)

    relative.__doc__ = about


def register(app: typer.Typer) -> None:
    """Add the group and ``run drain``."""
    run = typer.Typer(
        help="Provoke a scenario, catch it, explain it.",
        short_help="Provoke a scenario, catch it, explain it.",
        no_args_is_help=True,
    )

    @run.command(short_help="A draining MTP batch wedges the persistent top-k (vLLM #51593).")
    @flags(Common, PlanFlags, RunFlags, ServerFlags)
    def drain(context: typer.Context, common: Common, plan: PlanFlags, run: RunFlags, server: ServerFlags) -> int:
        """A draining MTP batch wedges the persistent top-k (vLLM #51593).

        Runs on a GPU if one is free, else the kernel's machine code is interpreted on the CPU. With --model or --url a real
        server is drained: one that is started here, or one that runs.

        Exit status: 3 hang, 0 clean with the danger window reached, 5 window not reached.
        """
        from .drain_run import run_drain

        asked = frozenset(
            name for name in ("dump", "unwedge") if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
        )
        return run_drain(common, plan, run, server, asked=asked)

    for name, about in relatives().items():
        _add(run, name, about)
    app.add_typer(run, name="run")
