"""The flags of ``run drain`` read as what they mean: plan, architecture, kernel, expectation; and a run written as its command."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..errors import UsageError
from ..scenarios.drain import DrainPlan, load_plan
from .exits import Expectation

if TYPE_CHECKING:
    from .options import PlanFlags, RunFlags

__all__ = ["DEFAULT_ARCH", "build_plan", "command_of", "kernel_spec", "parse_arch", "parse_expectation", "plan_words"]

#: The architecture that the CPU ground interprets where none is named: that of the published case.
DEFAULT_ARCH = 120


def parse_arch(text: str) -> int:
    """``sm_120``, ``sm120`` or ``120`` as 120. UsageError otherwise."""
    digits = text.strip().lower().removeprefix("sm").removeprefix("_")
    if not digits.isdecimal() or not 2 <= len(digits) <= 3:
        raise UsageError(f"--arch {text[:40]}: not an architecture", help_text="For example --arch sm_120")
    return int(digits)


def build_plan(flags: PlanFlags, seed: int | None) -> DrainPlan:
    """The plan of ``--plan`` with the flags over it. PlanError names the field."""
    changes = {entry.name: getattr(flags, entry.name) for entry in fields(flags) if entry.name != "plan"}
    changes["seed"] = seed
    given = {name: value for name, value in changes.items() if value is not None}
    base = load_plan(flags.plan) if flags.plan is not None else DrainPlan()
    return base.replace(**given) if given else base


def plan_words(plan: DrainPlan) -> list[str]:
    """The flags that make this plan, without those that say what is so anyway; the seed always."""
    default, words = DrainPlan(), ["--seed", str(plan.seed)]
    for name, value in plan.model_dump().items():
        if name in ("seed", "top_k") or value == getattr(default, name):
            continue
        text = (
            ",".join(map(str, value))
            if name == "capture_sizes"
            else ":".join(map(str, value))
            if isinstance(value, tuple)
            else str(value)
        )
        words += [f"--{name.replace('_', '-')}", text]
    return words


def command_of(plan: DrainPlan, flags: RunFlags, ground: str, kernel: str) -> tuple[str, ...]:
    """The command that makes this run again: the flags that differ from their defaults, ground and kernel always."""
    words = ["dsv4-repro", "run", "drain", "--on", ground, "--kernel", kernel]
    for entry in fields(flags):
        value = getattr(flags, entry.name)
        if value == entry.default or entry.name in ("on", "kernel", "expect"):
            continue
        flag = entry.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return tuple(words + plan_words(plan))


def kernel_spec(flags: RunFlags) -> tuple[str, str]:
    """(what to take after --kernel, the library that torch's op is loaded from)."""
    if flags.via not in ("driver", "op"):
        raise UsageError(f"--via {flags.via[:40]}: it is driver or op")
    if flags.via == "driver":
        return flags.kernel or "builtin", ""
    spec = flags.kernel or "installed"
    if spec == "installed":
        return spec, ""
    if spec.endswith(".so"):
        return spec, str(Path(spec).expanduser().absolute())
    raise UsageError(
        f"--via op launches through vLLM's own op; --kernel {spec[:80]} has none", help_text="--kernel installed, or FILE.so"
    )


def parse_expectation(text: str | None) -> Expectation | None:
    """The value of ``--expect``; UsageError for anything but hang and clean."""
    if text is not None and text not in ("hang", "clean"):
        raise UsageError(f"--expect {text[:40]}: it is hang or clean")
    return cast("Expectation | None", text)
