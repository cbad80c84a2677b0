"""The flags that many verbs share, declared once, and the decorator that adds them to a command.

``@flags(Common, Plan)`` on a command function replaces its parameters ``common: Common`` and ``plan: Plan`` by one option for
each field of those dataclasses; the function gets the filled records. The dataclasses hold nothing but their options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

__all__ = ["Common", "PlanFlags", "RelativeFlags", "RunFlags", "ServerFlags", "flags"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _place(text: str | Path) -> Path:
    """A path as given; an empty one, as from an unset variable of a script, is not the current directory."""
    if not str(text):
        raise typer.BadParameter("it is empty")
    return Path(text)


@dataclass(frozen=True, slots=True)
class Common:
    """The five flags of every verb."""

    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write to this directory (or file) instead of ./runs/…", parser=_place, metavar="PATH"),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output, all text on standard error.")] = (
        False
    )
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of everything that is drawn at random.", min=0)] = None
    timeout: Annotated[float | None, typer.Option("--timeout", help="Seconds that the whole verb may take.", min=0.1)] = None
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask; consent to what would be asked.")] = False


@dataclass(frozen=True, slots=True)
class PlanFlags:
    """The drain plan: a file, and a flag for each field. None: not given, so the plan's own value or default holds."""

    plan: Annotated[Path | None, typer.Option("--plan", help="A plan file (JSON or TOML); flags override its fields.")] = None
    requests: Annotated[int | None, typer.Option("--requests", help="Requests in the wave.")] = None
    min_live: Annotated[int | None, typer.Option("--min-live", help="Drain down to this many live requests.")] = None
    prompt: Annotated[str | None, typer.Option("--prompt", help="Prompt tokens, N or LOW:HIGH.")] = None
    output: Annotated[str | None, typer.Option("--output", help="Output tokens, N or LOW:HIGH.")] = None
    mtp: Annotated[int | None, typer.Option("--mtp", help="Speculative tokens per step (MTP depth); 0 is plain decode.")] = None
    acceptance: Annotated[float | None, typer.Option("--acceptance", help="Chance that a speculative token is accepted.")] = None
    max_num_seqs: Annotated[int | None, typer.Option("--max-num-seqs", help="As in vllm serve.")] = None
    capture_sizes: Annotated[
        str | None, typer.Option("--capture-sizes", help="Captured CUDA graph sizes in tokens, comma separated.")
    ] = None
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", help="As in vllm serve.")] = None
    compress: Annotated[int | None, typer.Option("--compress", help="Compress ratio of the indexer (4 for C4).")] = None
    dp: Annotated[int | None, typer.Option("--dp", help="Data-parallel size: ranks are padded to the largest.")] = None
    layers: Annotated[int | None, typer.Option("--layers", help="Indexer layers per step.")] = None
    steps: Annotated[int | None, typer.Option("--steps", help="Decode steps at most.")] = None


@dataclass(frozen=True, slots=True)
class RunFlags:
    """Where and what to run, and what to do on a hang."""

    on: Annotated[str | None, typer.Option("--on", help="Ground: server, gpu or cpu.")] = None
    kernel: Annotated[
        str | None,
        typer.Option("--kernel", help="Whose code: builtin[:VARIANT], vllm==0.27.1, installed, or a .whl, .so or .cubin file."),
    ] = None
    arch: Annotated[str | None, typer.Option("--arch", help="Architecture to interpret with --on cpu, e.g. sm_120.")] = None
    via: Annotated[str, typer.Option("--via", help="Who launches: driver, or op (vLLM's own launcher; needs torch and vLLM).")] = (
        "driver"
    )
    device: Annotated[str | None, typer.Option("--device", help="GPU number; with --on cpu the GPU to stand for, by name.")] = None
    sms: Annotated[int | None, typer.Option("--sms", help="With --on cpu: SMs of the interpreted device.", min=1, max=4096)] = None
    slots_per_sm: Annotated[
        int | None, typer.Option("--slots-per-sm", help="With --on cpu: CTAs that an SM holds at once.", min=1, max=64)
    ] = None
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule", help="With --on cpu: smallest-pc, random or priority (one CTA gets far ahead); the last two by --seed."
        ),
    ] = "smallest-pc"
    checks: Annotated[
        bool,
        typer.Option("--checks/--no-checks", help="With --on cpu: check every memory access (bounds, alignment, unwritten words)."),
    ] = False
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel size of the server.", min=1)] = 1
    producer: Annotated[str, typer.Option("--producer", help="raw (as before vLLM 0.28.0) or clamped.")] = "raw"
    trials: Annotated[int, typer.Option("--trials", help="Run the plan so many times.", min=1, max=1_000_000)] = 1
    dump: Annotated[bool, typer.Option("--dump/--no-dump", help="On a hang, take a GPU core dump of our own child last.")] = True
    unwedge: Annotated[
        bool,
        typer.Option("--unwedge/--no-unwedge", help="On a hang, write a large count into the stuck counter, as an experiment."),
    ] = True
    share: Annotated[bool, typer.Option("--share", help="Run on a GPU that already holds somebody's compute process.")] = False
    expect: Annotated[
        str | None, typer.Option("--expect", help="hang or clean: exit 0 as expected, 1 not as expected, 5 inconclusive.")
    ] = None


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """The server of ``--on server``: which one, how it is started, and how it is prepared."""

    model: Annotated[
        str | None, typer.Option("--model", help="With --on server: a model's path or name, or dummy (tiny, random weights).")
    ] = None
    url: Annotated[str | None, typer.Option("--url", help="With --on server: one that runs already; it is left as found.")] = None
    python: Annotated[
        str | None, typer.Option("--python", help="With --on server: the interpreter that has vLLM, if it is not this one.")
    ] = None
    port: Annotated[int | None, typer.Option("--port", help="With --on server: its port; a free one if not given.")] = None
    bare: Annotated[bool, typer.Option("--bare", help="With --on server: change nothing to prepare evidence.")] = False
    guard: Annotated[bool, typer.Option("--guard", help="With --on server: the producer's clamp at run time, as a control.")] = (
        False
    )
    rescue: Annotated[bool, typer.Option("--rescue", help="With --on server: the agent releases the known wait from inside.")] = (
        False
    )
    attach: Annotated[
        bool | None,
        typer.Option(
            "--attach/--no-attach",
            help="With --on server: cuda-gdb on each worker of a hung server (--url: only with --yes or this); after it the driver "
            "makes no GPU core dump.",
            show_default=False,
        ),
    ] = None
    engine: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ENGINE FLAGS", help="After --: flags of vllm serve, put over the recipe's.", show_default=False),
    ] = None


@dataclass(frozen=True, slots=True)
class RelativeFlags:
    """Which row of a relative's matrix, with whose code, where."""

    on: Annotated[str | None, typer.Option("--on", help="Ground: cpu (the default) or gpu.")] = None
    fix: Annotated[
        str | None, typer.Option("--fix", metavar="ROW", help="The row to run: a defect or a fix, by name; default the defect.")
    ] = None
    all_rows: Annotated[bool, typer.Option("--all", help="All rows side by side, defect and fixes; no run directory.")] = False
    explore: Annotated[
        bool,
        typer.Option(
            "--explore", help="Every order of execution of the row's launch, over a model of its barrier; nothing is run."
        ),
    ] = False
    count: Annotated[bool, typer.Option("--count", help="Go through every order of execution, for a rate of n.")] = False
    kernel: Annotated[
        str | None, typer.Option("--kernel", help="Whose code instead of the row's: builtin[:VARIANT], vllm==0.27.1, or a file.")
    ] = None
    arch: Annotated[str | None, typer.Option("--arch", help="Architecture to interpret, e.g. sm_90; default sm_120.")] = None
    device: Annotated[str | None, typer.Option("--device", help="With --on gpu: the GPU's number.")] = None
    trials: Annotated[int, typer.Option("--trials", help="With --on gpu: so many launches.", min=1, max=1_000_000)] = 1
    share: Annotated[bool, typer.Option("--share", help="With --on gpu: although the GPU holds somebody's process.")] = False
    dump: Annotated[bool, typer.Option("--dump/--no-dump", help="With --on gpu: a core dump at the first hang.")] = True
    unwedge: Annotated[
        bool, typer.Option("--unwedge/--no-unwedge", help="With --on gpu: write a large count into the stuck counter, to see.")
    ] = True
    expect: Annotated[str | None, typer.Option("--expect", help="hang or clean: exit 0 as expected, 1 not as expected.")] = None


def flags(*records: type) -> Callable[[_Command], _Command]:
    """Replace each parameter annotated with one of ``records`` by that record's options."""

    def decorate(command: _Command) -> _Command:
        hints = get_type_hints(command, include_extras=True)
        own: list[inspect.Parameter] = []
        grouped: dict[str, type] = {}
        for name, parameter in inspect.signature(command).parameters.items():
            if hints[name] in records:
                grouped[name] = hints[name]
            else:
                own.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
        for record in grouped.values():
            record_hints = get_type_hints(record, include_extras=True)
            own += [
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=record_hints[field.name]
                )
                for field in fields(record)
            ]

        @functools.wraps(command)
        def wrapper(**values: Any) -> Any:
            for name, record in grouped.items():
                values[name] = record(**{field.name: values.pop(field.name) for field in fields(record)})
            return command(**values)

        wrapper.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
        return wrapper  # type: ignore[return-value]

    return decorate
