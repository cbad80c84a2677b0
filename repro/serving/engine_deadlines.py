"""When will the engine end itself? From its environment, the start of the step it waits for, and the log. Pure.

Facts, read in vLLM's source (0.23.0, v1/executor/multiproc_executor.py, distributed/device_communicators/shm_broadcast.py):

- A step is two calls to the workers (``execute_model``, ``sample_tokens``). Each gets its deadline when it is **sent**:
  ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`` (300 unless set; so in every release read, 0.20 to 0.33) on the monotonic clock. It is
  not restarted by anything and does not stop while the process is stopped.
- While it waits for an answer the engine writes the ``shm_broadcast`` line every ``VLLM_RINGBUFFER_WARNING_INTERVAL`` seconds (60),
  counted from when it began to wait, which is at most a step after the call was sent.
- The wait looks for the answer first and at the clock second: an engine that was stopped (SIGSTOP) beyond its deadline and finds
  the answer when it goes on, lives; one that finds none ends at once, with ``RPC call to sample_tokens timed out``.
- With the executor in the engine's own process (``uni``, the default for one GPU without ``--distributed-executor-backend mp``)
  there is no such deadline: it waits for ever. Ray's has ``RAY_CGRAPH_get_timeout`` (vLLM sets 300).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "EngineDeadline", "EngineLimits", "Executor", "Known", "Start", "deadline_lines", "engine_deadline", "executor_of", "limits_of",
]  # fmt: skip

Executor = Literal["mp", "uni", "ray", "unknown"]
#: How a value is known: read from the process, computed from what was read, the release's default, or not at all.
Known = Literal["measured", "inferred", "assumed", "not observed"]
State = Literal["counting", "overdue", "ended", "none", "not counting", "unknown"]

STEP_TIMEOUT = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
WARNING_INTERVAL = "VLLM_RINGBUFFER_WARNING_INTERVAL"
RAY_TIMEOUT = "RAY_CGRAPH_get_timeout"
DEFAULT_STEP_S = 300.0
DEFAULT_WARNING_S = 60.0
_LONGEST_S = 10.0**8
#: A measured start is the worker's, a few ms after the engine's; one from the log may be a step off.
_OVERDUE_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """``step_s``: how long the engine waits for a step, None: it does not stop waiting, or not known (``step_known`` says which:
    "measured" with None means no deadline). ``warning_s``: interval of the waiting line. The ``_from`` texts name the sources."""

    executor: Executor
    step_s: float | None
    step_from: str
    step_known: Known
    warning_s: float
    warning_from: str
    warning_known: Known


@dataclass(frozen=True, slots=True)
class Start:
    """When the step that is waited for was sent, as one source tells it: ``age_s`` seconds ago, ``error_s`` at most off."""

    age_s: float
    known: Known
    source: str
    error_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineDeadline:
    """The answer. ``remaining_s``: until the engine ends itself, negative if it should have; None where that is not known.

    ``known``: of the whole, i.e. the weaker of limit and start. ``text``: one sentence with numbers and how they are known.
    """

    state: State
    limit_s: float | None = None
    remaining_s: float | None = None
    error_s: float = 0.0
    known: Known = "not observed"
    text: str = ""


def executor_of(arguments: Sequence[str], roles: Mapping[int, str]) -> Executor:
    """From the server's command line (``--distributed-executor-backend``), else from its processes: workers of their own are
    ``mp``; an engine process without workers is ``uni``."""
    words = list(arguments)
    for index, word in enumerate(words):
        name, separator, value = word.partition("=")
        if name in ("--distributed-executor-backend", "--distributed_executor_backend"):
            chosen = value if separator else words[index + 1] if index + 1 < len(words) else ""
            if chosen in ("mp", "uni", "ray"):
                return chosen  # type: ignore[return-value]
    present = set(roles.values())
    if "worker" in present:
        return "mp"
    return "uni" if "engine" in present else "unknown"


def _seconds(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None and len(text) < 32 else None
    except ValueError:
        return None
    return value if value is not None and 0 < value <= _LONGEST_S else None


def limits_of(environment: Mapping[str, str] | None, executor: Executor, *, why_not: str = "") -> EngineLimits:
    """``environment``: of the engine process, None if it could not be read (``why_not``); then the defaults are assumed."""
    if environment is None:
        source = f"vLLM's default; the engine's environment could not be read{': ' + why_not if why_not else ''}"
        known: Known = "assumed"
        environment = {}
    else:
        source = "vLLM's default; not set in the engine's environment"
        known = "inferred"
    name = RAY_TIMEOUT if executor == "ray" else STEP_TIMEOUT
    step = _seconds(environment.get(name))
    warning = _seconds(environment.get(WARNING_INTERVAL))
    warning_s, warning_from, warning_known = DEFAULT_WARNING_S, source, known
    if warning is not None:
        warning_s, warning_from, warning_known = warning, f"{WARNING_INTERVAL} in the engine's environment", "measured"
    if executor == "uni":
        why = "the executor is in the engine's own process: no deadline of vLLM ends the wait"
        return EngineLimits(executor, None, why, "inferred", warning_s, warning_from, warning_known)
    if step is not None:
        return EngineLimits(
            executor, step, f"{name} in the engine's environment", "measured", warning_s, warning_from, warning_known
        )
    if executor == "unknown":
        source, known = source + "; which executor runs is not known", "assumed"
    return EngineLimits(executor, DEFAULT_STEP_S, source, known, warning_s, warning_from, warning_known)


_ORDER: tuple[Known, ...] = ("measured", "inferred", "assumed", "not observed")


def _weaker(first: Known, second: Known) -> Known:
    return max(first, second, key=_ORDER.index)


def engine_deadline(
    limits: EngineLimits, starts: Sequence[Start], *, waits: bool | None, ended: str = "", stopped: bool = False
) -> EngineDeadline:
    """How long the engine will still wait.

    ``waits``: whether a step is under way that does not end (None: not known). ``ended``: words of the log that show that it has
    ended itself. ``stopped``: the engine process is stopped (state T), so it acts on the deadline only when it goes on.
    The best-known start is taken, of equals the one with the smaller error, then the oldest: too early a warning does no harm.
    """
    if ended:
        return EngineDeadline("ended", limits.step_s, None, known="measured", text=f"the engine has ended itself: {ended}")
    if limits.step_s is None:
        return EngineDeadline("none", None, None, known=limits.step_known, text=f"it will not end itself: {limits.step_from}")
    if waits is False:
        text = f"no step stands; each is given {limits.step_s:g} s ({limits.step_from})"
        return EngineDeadline("not counting", limits.step_s, None, known=limits.step_known, text=text)
    if not starts:
        text = f"a step is given {limits.step_s:g} s ({limits.step_from}); when this one was sent was not observed"
        return EngineDeadline("unknown", limits.step_s, None, known="not observed", text=text)
    start = min(starts, key=lambda item: (_ORDER.index(item.known), item.error_s, -item.age_s))
    remaining = limits.step_s - start.age_s
    known = _weaker(limits.step_known, start.known)
    off = f", at most {start.error_s:.0f} s off" if start.error_s >= 1 else ""
    basis = (
        f"{limits.step_s:g} s for a step ({limits.step_from}: {limits.step_known}), "
        f"sent {start.age_s:.0f} s ago ({start.source}: {start.known}{off})"
    )
    if remaining < -(start.error_s + _OVERDUE_MARGIN_S):
        why = "its process is stopped, and acts on it when it goes on" if stopped else "something of this is not as assumed"
        text = f"its deadline passed {-remaining:.0f} s ago and it still runs ({why}): {basis}"
        return EngineDeadline("overdue", limits.step_s, remaining, start.error_s, known, text)
    shown = max(remaining, 0.0)
    note = "; it is stopped, and the deadline runs on" if stopped else ""
    return EngineDeadline(
        "counting", limits.step_s, remaining, start.error_s, known, f"in {shown:.0f} s the engine ends itself{note}: {basis}"
    )


def deadline_lines(deadline: EngineDeadline) -> list[str]:
    """For a person; the word for how it is known stands first."""
    return [f"deadline ({deadline.known}): {deadline.text}"]
