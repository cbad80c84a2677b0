"""The verb that packs a run to be sent: bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Common, flags

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""

    @app.command(short_help="Pack a run into one redacted archive to attach to an issue.")
    @flags(Common)
    def bundle(
        common: Common,
        run: Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN")],
        keep: Annotated[
            list[str] | None,
            typer.Option("--keep", help="What may stay: prompts, users, hosts, ips, macs, or text:VALUE. May be repeated."),
        ] = None,
        hide: Annotated[
            list[str] | None, typer.Option("--hide", help="A further text to replace wherever it stands. May be repeated.")
        ] = None,
        raw: Annotated[bool, typer.Option("--raw", help="Include core dumps and binary files as they are: not redacted.")] = False,
        max_size: Annotated[str, typer.Option("--max-size", help="Largest archive, e.g. 25MB.")] = "24.5MB",
    ) -> int:
        """Pack a run directory into one zip: report, evidence, manifest with hashes, reproducer command, environment.

        Private values are replaced by pseudonyms; redaction.json in the archive says what was replaced where. Core dumps are
        stripped to their tables and the stuck kernel's code. Nothing leaves this machine. An archive that is there already is
        replaced only with --yes.
        """
        from .bundling import run_bundle

        return run_bundle(run, common, keep=keep or (), hide=hide or (), raw=raw, max_size=max_size)
