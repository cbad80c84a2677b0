"""Verbs about this machine and what can run on it: doctor, list, show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from .options import Common, flags

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""

    @app.command(short_help="What this machine, container and user can do.")
    @flags(Common)
    def doctor(
        common: Common,
        clean: Annotated[bool, typer.Option("--clean", help="End leftover processes of earlier runs (asks, or --yes).")] = False,
        pid: Annotated[
            int | None, typer.Option("--pid", help="A server's process: is the agent armed in each of its workers?", min=1)
        ] = None,
        model: Annotated[
            Path | None,
            typer.Option("--model", help="A model's folder or config.json: has FlashInfer its decode kernel for SM120?"),
        ] = None,
        tp: Annotated[int, typer.Option("--tp", help="With --model: tensor-parallel size.", min=1)] = 1,
        draft: Annotated[int, typer.Option("--draft", help="With --model: draft tokens of a DSpark draft.", min=0)] = 0,
        flashinfer: Annotated[
            str, typer.Option("--flashinfer", help="With --model: a release such as 0.6.17, or installed.")
        ] = "installed",
    ) -> int:
        """What this machine, container and user can do, each with its remedy; with --pid also a server's agents, with --model
        whether FlashInfer has the (heads, top_k) kernels that the model needs on SM120.
        """
        from .doctor import run_doctor

        if model is None and (tp != 1 or draft or flashinfer != "installed"):
            raise UsageError("--tp, --draft and --flashinfer go with --model", help_text="dsv4-repro doctor --model DIR --tp 4")
        return run_doctor(common, clean=clean, pid=pid, model=(model, tp, draft, flashinfer) if model is not None else None)

    @app.command(short_help="About a minute on any card, and one small file to paste back.")
    @flags(Common)
    def selftest(
        common: Common,
        on: Annotated[str | None, typer.Option("--on", help="gpu (default) or cpu.")] = None,
        device: Annotated[
            str | None, typer.Option("--device", help="GPU number; with --on cpu the GPU to stand for, by name.")
        ] = None,
        share: Annotated[bool, typer.Option("--share", help="Run on a GPU that already holds somebody's compute process.")] = False,
    ) -> int:
        """Environment, the hang and its controls with the builtin kernel and every cached release, capture, autopsy, unwedge.

        Writes one small file to paste back, marked with card, driver and architecture. Downloads nothing.

        Exit status: 0 all as expected, 4 something is not, 5 something is open (or no GPU: try --on cpu).
        """
        from .selftest import run_selftest

        return run_selftest(common, on=on, device=device, share=share)

    @app.command(name="list", short_help="The scenarios, and where each can run here.")
    @flags(Common)
    def list_(common: Common) -> int:
        """The scenarios, and where each can run on this machine."""
        from .catalogue import run_list

        return run_list(common)

    @app.command(short_help="All about one scenario: story, fixes, plan fields.")
    @flags(Common)
    def show(
        common: Common, scenario: Annotated[str, typer.Argument(help="A scenario's name, as in list.", metavar="SCENARIO")]
    ) -> int:
        """All about one scenario: what happens, the fixes, what is expected where, the fields of its plan."""
        from .catalogue import run_show

        return run_show(scenario, common)
