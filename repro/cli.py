"""The command line: one application, a module ``cli_*.py`` for each family of verbs.

Each such module has ``register(app)`` and imports nothing heavy at its top; what a verb needs is imported in the verb. Modules
are found by name, so a new family of verbs is a new file. ``VERBS`` is the order in ``--help``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__

__all__ = ["VERBS", "build", "group", "modules"]

#: The verbs in the order of ``--help``; those that no module has registered are not shown.
VERBS = (
    "run", "why", "autopsy", "watch", "unwedge", "probe", "audit", "verify", "hunt", "minimise", "bisect",
    "report", "bundle", "agent", "doctor", "selftest", "list", "show",
)  # fmt: skip

_HELP = """Provoke, catch and explain GPU barrier deadlocks of LLM serving (vLLM #51593 and its relatives).

Exit status: 0 fine, 1 not as --expect says, 2 usage, 3 a hang, 4 another failure, 5 inconclusive, 70 our own fault, 130 Ctrl-C.

Start here: dsv4-repro run drain. A server is wedged: dsv4-repro why. Evidence is at hand: dsv4-repro autopsy FILE
"""


def modules() -> list[str]:
    """Names of the modules that register verbs, sorted."""
    return sorted(path.stem for path in Path(__file__).parent.glob("cli_*.py"))


def group(app: typer.Typer, name: str) -> typer.Typer:
    """The sub-application ``name`` of ``app`` (for ``run SCENARIO``); KeyError if no module has added it."""
    for entry in app.registered_groups:
        if entry.name == name and entry.typer_instance is not None:
            return entry.typer_instance
    raise KeyError(name)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"dsv4-repro {__version__}")
        raise typer.Exit


def _ordered(names: Iterable[str]) -> list[str]:
    place = {verb: index for index, verb in enumerate(VERBS)}
    return sorted(names, key=lambda name: (place.get(name, len(VERBS)), name))


def build() -> Any:
    """The click command of the whole command line."""
    app = typer.Typer(
        name="dsv4-repro",
        help=_HELP,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )

    @app.callback()
    def root(
        version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
    ) -> None:
        pass

    root.__doc__ = _HELP
    for name in modules():
        importlib.import_module(f"{__package__}.{name}").register(app)
    command: Any = typer.main.get_command(app)
    command.commands = {name: command.commands[name] for name in _ordered(command.commands)}
    return command
