"""Puts the agent together, once in a process."""

from __future__ import annotations

import os
import threading
from typing import Any

from . import __version__
from .control import Agent
from .guard import Guard
from .hooks import Hooks
from .lateimport import when_imported
from .recorder import Recorder
from .ring import Ring
from .said import Said
from .settings import Settings

__all__ = ["start"]

_lock = threading.Lock()
_started: Agent | None = None


def start(settings: Settings) -> Agent | None:
    """Hook what is there, wait for what is not; the second call in a process returns the first one's agent.

    Never raises: what is not as expected is said and left alone. None: nothing could be done.
    """
    global _started
    with _lock:
        if _started is not None:
            return _started
        said = Said()
        try:
            _folder(settings)
            _started = _assemble(settings, said)
        except Exception as error:  # a plugin that raises would stop the server
            said.feature("agent", False, f"steps aside: {type(error).__name__}: {error}")
            return None
        return _started


def _folder(settings: Settings) -> None:
    settings.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.stat(settings.folder, follow_symlinks=False)
    if found.st_uid != os.getuid():
        raise PermissionError(f"{settings.folder} belongs to another user")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vllm")
    except PackageNotFoundError:
        return ""


def _assemble(settings: Settings, said: Said) -> Agent:
    vllm = _version()

    def make_ring(runner: Any) -> Ring:
        rank = getattr(getattr(runner, "parallel_config", None), "rank", None)
        return Ring(
            settings.folder,
            slots=settings.slots,
            rank=rank if isinstance(rank, int) else -1,
            device=recorder.device,
            vllm=vllm,
            agent=__version__,
        )

    recorder = Recorder(said, make_ring, lambda: agent.start())
    recorder.armed = settings.agent or settings.rescue
    guard = Guard(said, wanted=settings.guard)
    hooks = Hooks(said, recorder, guard, row_states=settings.rescue or (settings.agent and settings.row_states))
    agent = Agent(settings, said, recorder, guard, hooks, vllm=vllm)
    when_imported(hooks.modules())
    agent.status()
    # vLLM forks its engine and workers from a process that has loaded its plugins, and does not load them again in the child.
    os.register_at_fork(after_in_child=agent.after_fork)
    return agent
