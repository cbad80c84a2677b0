"""Verbs for a server that nobody started through us: why, watch, probe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Common, flags

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""

    @app.command(short_help="What is it with this server: read-only, ten seconds.")
    @flags(Common)
    def why(
        common: Common,
        server: Annotated[
            str | None, typer.Argument(help="A PID of the server, or its URL; the only one here if left out.", metavar="PID|URL")
        ] = None,
        log: Annotated[Path | None, typer.Option("--log", help="The server's log, where it goes to no file that is found.")] = None,
    ) -> int:
        """What is it with this server: state and since when, live requests, power, the most likely class, when the engine ends
        itself, whether the build is affected, and the next command.

        Reads only: no ptrace, no signal, nothing written to the target; at most ten seconds.

        Exit status: 3 a hang, 0 fine, 4 it has ended, 5 not decided.
        """
        from .why_verb import run_why

        return run_why(server, common, log=log)

    @app.command(short_help="Watch a running server; on a hang keep the evidence and say so.")
    @flags(Common)
    def watch(
        common: Common,
        pid: Annotated[int | None, typer.Option("--pid", help="Any process of the server.", min=1)] = None,
        url: Annotated[
            str | None,
            typer.Option("--url", help="The server's URL, e.g. http://127.0.0.1:8000; with --pid: of the same server."),
        ] = None,
        log: Annotated[Path | None, typer.Option("--log", help="The server's log, where it goes to no file that is found.")] = None,
        once: Annotated[bool, typer.Option("--once", help="Look until the state is decided (at most a minute), then end.")] = False,
        attach: Annotated[
            bool, typer.Option("--attach", help="On a hang attach cuda-gdb, after one more look at whether anything moves.")
        ] = False,
        on_hang: Annotated[
            str | None, typer.Option("--on-hang", help="A shell command, run once for each hang.", metavar="CMD")
        ] = None,
        on_hang_timeout: Annotated[
            float, typer.Option("--on-hang-timeout", help="Seconds that the command may take.", min=1, max=86400)
        ] = 300.0,
        webhook: Annotated[str | None, typer.Option("--webhook", help="POST a JSON message (redacted) here on a hang.")] = None,
        listen: Annotated[
            str | None, typer.Option("--listen", help="Serve /metrics and /livez here; without it 127.0.0.1:9477; off: none.")
        ] = None,
        canary: Annotated[
            float | None,
            typer.Option(
                "--canary",
                help="Send a completion of our own (8 tokens in, 1 out; key: VLLM_API_KEY) every so many SECONDS, one at a time. "
                "Off without it: it joins the batch, is counted and billed, and another size of batch can hide or set off a hang.",
                metavar="SECONDS",
                min=5,
                max=600,
            ),
        ] = None,
        keep: Annotated[int, typer.Option("--keep", help="Run directories kept, the oldest go first.", min=1, max=10_000)] = 20,
        max_mb: Annotated[int, typer.Option("--max-mb", help="MiB that they may take in all.", min=1, max=1_000_000)] = 100,
    ) -> int:
        """Watch a server that somebody else started. Reads only, unless --attach or --canary is given.

        On a hang: a run directory with evidence, diagnosis and report, the command, the webhook; once for each hang. Lives on when
        the server restarts.

        Exit status: with --once 3 a hang, 0 fine, 4 it has ended, 5 not decided; else 130 after Ctrl-C. 5 at once where there is no
        such PID, or several servers are here and none is named.
        """
        from .watch_actions import WatchFlags
        from .watch_verb import run_watch

        return run_watch(
            WatchFlags(
                pid=pid, url=url, log=log, once=once, attach=attach, on_hang=on_hang, on_hang_timeout_s=on_hang_timeout,
                webhook=webhook, listen=listen, canary_s=canary, keep=keep, max_mb=max_mb,
            ),
            common,
        )  # fmt: skip

    @app.command(short_help="An exec liveness probe: do steps end?")
    @flags(Common)
    def probe(
        common: Common,
        max_stall: Annotated[
            float, typer.Option("--max-stall", help="Seconds that requests may run without any progress.", min=1, max=86400)
        ],
        pid: Annotated[int | None, typer.Option("--pid", help="Any process of the server.", min=1)] = None,
        url: Annotated[str | None, typer.Option("--url", help="The server's URL.")] = None,
        agent_dir: Annotated[Path | None, typer.Option("--agent-dir", help="The folder of the agent's recorders.")] = None,
        state: Annotated[Path | None, typer.Option("--state", help="Where the last progress is remembered between probes.")] = None,
    ) -> int:
        """An exec liveness probe: quick, touches nothing. With its recorders it needs no memory of its own; else it remembers
        between two probes when a counter last moved.

        Exit status: 0 alive (or idle, or, with --pid, starting), 3 no progress for --max-stall seconds, 5 not known. A liveness
        probe fails on anything but 0: map 5 to 0 where "not known" should not restart a pod (docs/production.md).
        """
        from .probe_verb import run_probe

        return run_probe(common, max_stall=max_stall, pid=pid, url=url, agent_dir=agent_dir, state=state)
