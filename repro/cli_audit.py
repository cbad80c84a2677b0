"""The verb about builds: audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Common, flags

__all__ = ["register"]

_TARGETS = "vllm==0.27.1, 'vllm>=0.25,<0.34', installed, a wheel (file or URL), a .so, a cubin, builtin:guard, or a PID."
_RECIPE = "How the server is started: NAME=VALUE,…, a JSON or TOML file, or the 'vllm serve …' line. Default: vLLM #51593's."
_FAIL_ON = "vulnerable: a kernel is; recipe: this recipe wedges; cannot-tell: as vulnerable, or unsure; never."


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""

    @app.command(short_help="Which builds are vulnerable, proven on the shipped binary; no GPU needed.")
    @flags(Common)
    def audit(
        common: Common,
        targets: Annotated[list[str], typer.Argument(help=_TARGETS, metavar="TARGET")],
        arch: Annotated[str, typer.Option("--arch", help="sm_120, or all architectures of the build.")] = "all",
        recipe: Annotated[str | None, typer.Option("--recipe", help=_RECIPE)] = None,
        fail_on: Annotated[str, typer.Option("--fail-on", help=_FAIL_ON)] = "vulnerable",
        exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Also run all 2^32 lengths, and more shapes.")] = False,
        relatives: Annotated[bool, typer.Option("--relatives/--no-relatives", help="Also audit the related defects.")] = True,
        offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing but the target itself.")] = False,
        junit: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML to this file.")] = None,
    ) -> int:
        """Is this build affected by vLLM #51593, and does it wedge the way the server is started?

        The machine code is executed over solver terms: VULNERABLE comes with a length, which is then run on the CPU ground and
        must deadlock; PROVED means that no such length exists.

        Exit status: 0 nothing at or above --fail-on, 3 vulnerable, 5 could not tell.
        """
        from .audit_run import run_audit

        return run_audit(
            targets,
            common,
            arch=arch,
            recipe=recipe,
            fail_on=fail_on,
            exhaustive=exhaustive,
            relatives=relatives,
            offline=offline,
            junit=junit,
        )
