"""The grounds by name, and which one a run takes when none is named. Their modules are imported only when one is opened."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..errors import NoDeviceError, NoDriverError, UnavailableError, UsageError

if TYPE_CHECKING:
    from .ground import Ground
    from .machine import Machine

__all__ = ["GROUNDS", "MODEL_VARIABLE", "choose_ground", "grounds_here", "make_ground", "require_card", "require_ground"]

#: name -> module of this package, class.
GROUNDS: Mapping[str, tuple[str, str]] = {
    "server": ("server_ground", "ServerGround"),
    "gpu": ("gpu_ground", "GpuGround"),
    "cpu": ("cpu_ground", "CpuGround"),
}
#: A model for the server ground, so that it is the default where vLLM is installed.
MODEL_VARIABLE = "DSV4_REPRO_MODEL"


def _installed(name: str) -> bool:
    return importlib.util.find_spec(f"{__package__}.{GROUNDS[name][0]}") is not None


def require_ground(name: str) -> None:
    """UsageError for an unknown ground, UnavailableError if this release has none of that name."""
    if name not in GROUNDS:
        raise UsageError(f"--on {name[:40]}: there is no such ground", help_text=f"One of: {', '.join(GROUNDS)}")
    if not _installed(name):
        raise UnavailableError(f"--on {name}: this release has no {name} ground", help_text="See: dsv4-repro list")


def make_ground(name: str, **options: Any) -> Ground:
    """A new ground of that name; the errors of ``require_ground``."""
    require_ground(name)
    module, class_name = GROUNDS[name]
    return cast("Ground", getattr(importlib.import_module(f"{__package__}.{module}"), class_name)(**options))


def grounds_here(machine: Machine) -> dict[str, str]:
    """Where a workload can run on this machine: ground -> "yes" or why not."""
    answers = {"gpu": _gpu_here(machine), "cpu": "yes", "server": _server_here(machine)}
    return {name: answer if _installed(name) else "not in this release" for name, answer in answers.items()}


def require_card(gpus: Sequence[object] | None) -> None:
    """NoDriverError (None), NoDeviceError (none) where every trial of a campaign on the GPU would fail with the same words."""
    if gpus is None:
        raise NoDriverError("--on gpu: there is no NVIDIA driver here")
    if not gpus:
        raise NoDeviceError("--on gpu: there is a driver, but no GPU")


def _gpu_here(machine: Machine) -> str:
    if machine.gpus is None:
        return "no NVIDIA driver"
    if not machine.gpus:
        return "no GPU"
    return "every GPU is in use (--share)" if all(gpu.processes for gpu in machine.gpus) else "yes"


def _server_here(machine: Machine) -> str:
    return "yes" if machine.packages.get("vllm") and machine.gpus else "needs vLLM and a GPU, or --url"


def choose_ground(
    asked: str | None, here: Mapping[str, str], *, model: str | None = None, url: str | None = None
) -> tuple[str, str]:
    """(ground, why): the one asked for; else server if a model or server is given and it can run; else a free GPU; else the CPU."""
    if asked is not None:
        if asked not in GROUNDS:
            raise UsageError(f"--on {asked[:40]}: there is no such ground", help_text=f"One of: {', '.join(GROUNDS)}")
        return asked, "as asked"
    given = model or os.environ.get(MODEL_VARIABLE)
    if url and here["server"] != "not in this release":
        return "server", "a server is given"
    if given and here["server"] == "yes":
        return "server", "vLLM is installed and a model is given"
    server = f"server: {here['server']}; " if model else ""  # who names a model meant a server
    if here["gpu"] == "yes":
        return "gpu", f"{server}a free NVIDIA GPU"
    return "cpu", f"{server}gpu: {here['gpu']}"
