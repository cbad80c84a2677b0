"""A vLLM server that is ours: started in a session of its own, watched until it has answered a request, ended with all it started.

It does not die with this program: after ``kill -9`` it runs on, carries the run's mark, and ``doctor --clean`` finds and ends it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from ...clock import SYSTEM, Clock, Deadline
from ...errors import DeadlineError, ServerError
from ...forensics.collect.engine_log_tail import LogTail
from ..console import printable
from ..ground import CloseOutcome
from ..leftovers import MARKS, RUN_VARIABLE
from .completions import CompletionOutcome, complete_once
from .gpu_holders import GpuHolders, gpu_holders
from .interrupts import interrupts_held
from .process_tree import ProcessTree
from .recipe import LaunchSpec
from .records import ServerTarget
from .startup import Startup, failure_lines

__all__ = ["ServerProcess"]

#: A start with a download, a compile and a capture of a large model; the user's --timeout is the shorter one.
START_S = 3600.0
_GRACE_S = 8.0
_LOOK_S = 0.25
_FIRST_COMPLETION_S = 300.0
#: Between two tries of the first completion: the log may say "serving" a moment before the port is open.
_RETRY_S = 1.0
#: A card is given so long to show that none of our processes holds it, seconds.
_IDLE_S = 5.0


class ServerProcess:
    """One server. ``end`` may be called at any time and more than once; ``complete`` and ``holders`` are for tests."""

    def __init__(
        self,
        spec: LaunchSpec,
        clock: Clock = SYSTEM,
        *,
        complete: Callable[..., CompletionOutcome] = complete_once,
        holders: Callable[[], GpuHolders] = gpu_holders,
        grace_s: float = _GRACE_S,
    ) -> None:
        self.spec = spec
        self.startup = Startup()
        self._clock = clock
        self._complete = complete
        self._holders = holders
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._tree: ProcessTree | None = None
        self._tail: LogTail | None = None
        self._ended: CloseOutcome | None = None
        self._interrupted = False

    # -- start ---------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it. ServerError if the interpreter cannot be run or the log cannot be written."""
        spec = self.spec
        try:
            with spec.log_path.open("ab") as log, interrupts_held():
                self._process = subprocess.Popen(
                    spec.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(spec.env) | _marks(),
                    cwd=spec.log_path.parent,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or error
            raise ServerError(
                f"the server cannot be started: {spec.argv[0]}: {why}",
                help_text="Name the interpreter that has vLLM: --python /path/to/venv/bin/python",
            ) from error
        self._tree = ProcessTree(self._process.pid, _marks().get(RUN_VARIABLE, ""), self._clock)
        self._tail = LogTail(spec.log_path)

    @property
    def pid(self) -> int | None:
        """Of the process that was started (the API server); None before."""
        return self._process.pid if self._process is not None else None

    def poll(self) -> int | None:
        """Exit status of that process, negative for a signal; None while it lives or before it was started."""
        return self._process.poll() if self._process is not None else None

    def read_log(self) -> None:
        """Take in what the server has written since the last look."""
        if self._tail is not None:
            self.startup.feed(self._tail.read_new().lines)

    # -- readiness -----------------------------------------------------------------------------------------------------------

    def wait_ready(self, deadline: Deadline | None = None, on_phase: Callable[[str, str, float], None] | None = None) -> float:
        """Wait until a completion is answered; seconds since the call. ``on_phase(phase, waits for, seconds)``: every look.

        Raises ServerError (it ended, or said that it cannot start; with its own last lines) and DeadlineError.
        """
        began = self._clock.monotonic()
        until = deadline or Deadline(START_S, self._clock)
        attempt: _Attempt | None = None
        last: CompletionOutcome | None = None
        again = 0.0
        while True:
            status = self.poll()
            self.read_log()
            if status is not None:
                raise self._failed(f"the server ended while it started ({_how(status)})")
            if self.startup.phase == "failed":
                self._await_end(5.0)
                raise self._failed("the server cannot start")
            now = self._clock.monotonic()
            if attempt is not None and attempt.outcome is not None:
                last, attempt = attempt.outcome, None
                if last.completed:
                    if self._tree is not None:
                        self._tree.look()
                    return now - began
                again = now + _RETRY_S
            if attempt is None and self.startup.phase == "serving" and now >= again:
                attempt = _Attempt(self._complete, self.spec, min(_FIRST_COMPLETION_S, max(until.remaining(), 1.0)), self._clock)
            if on_phase is not None:
                on_phase(self.startup.phase, self.startup.waits_for, now - began)
            if until.expired:
                told = f"; its last answer to a completion: {last.kind} {last.detail}".rstrip() if last is not None else ""
                raise DeadlineError(
                    f"the server was not ready after {now - began:.0f} s: it waits for {self.startup.waits_for}{told}; "
                    f"its log is {self.spec.log_path}",
                    help_text="Give it more time: --timeout SECONDS",
                )
            self._clock.sleep(_LOOK_S)

    def _await_end(self, seconds: float) -> None:
        """A server that has said why it fails is given a moment to say it whole."""
        until = Deadline(seconds, self._clock)
        while self.poll() is None and not until.expired:
            self._clock.sleep(0.1)
        self.read_log()

    def _failed(self, what: str) -> ServerError:
        self.read_log()
        lines = [printable(line, limit=300) for line in failure_lines(self.startup.tail)]
        said = f": {lines[0]}" if lines else ": it wrote nothing"
        more = "".join(f"\n    {line}" for line in lines[1:])
        return ServerError(f"{what}{said}{more}\n  its log: {self.spec.log_path}", help_text=_remedy("\n".join(lines), self.spec))

    # -- what it is ----------------------------------------------------------------------------------------------------------

    def target(self) -> ServerTarget:
        """The server as the observer and the capture want it, its workers as far as they can be recognised now."""
        from .ranks import find_server

        spec = self.spec
        if self._tree is not None:
            self._tree.look()
        found = ServerTarget(base_url=spec.base_url)
        if self.pid is not None and self.poll() is None:
            found = find_server(self.pid, clock=self._clock)
        return replace(
            found,
            base_url=spec.base_url,
            model=spec.model,
            api_pid=self.pid,
            log_path=spec.log_path,
            agent_folder=spec.agent_folder,
            owned=True,
            changes=spec.changes,
            unread=(*found.unread, *spec.unread),
        )

    def processes(self) -> tuple[int, ...]:
        """Pids of all that belongs to it and lives."""
        return self._tree.alive() if self._tree is not None else ()

    # -- the end -------------------------------------------------------------------------------------------------------------

    def end(self) -> CloseOutcome:
        """SIGTERM to its group, SIGKILL to whatever is left, and a look whether the GPUs are free. Ctrl-C makes it quicker."""
        if self._ended is not None:
            return self._ended
        if self._tree is None and self._process is not None:
            self._tree = ProcessTree(self._process.pid, _marks().get(RUN_VARIABLE, ""), self._clock)
        if self._tree is None or self._process is None:
            self._ended = CloseOutcome("clean", device_idle=None, detail="no server was started")
            return self._ended
        try:
            how = self._tree.end(grace_s=self._grace_s)
        except KeyboardInterrupt:
            how = self._tree.end(grace_s=0.0)
            self._interrupted = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        if self._tail is not None:
            self.read_log()
            self._tail.close()
        idle, said = self._idle()
        left = self._tree.alive()
        detail = "; ".join(
            part for part in (f"{len(self._tree.seen)} processes", said, f"still there: {left}" if left else "") if part
        )
        self._ended = CloseOutcome(how, device_idle=idle, detail=detail)
        if self._interrupted:
            raise KeyboardInterrupt
        return self._ended

    def _idle(self) -> tuple[bool | None, str]:
        """Whether no GPU is held by any process that was ours; None where NVML does not say."""
        assert self._tree is not None
        ours = set(self._tree.seen)
        until = Deadline(_IDLE_S, self._clock)
        while True:
            holders = self._holders()
            if holders.count is None or holders.unread:
                why = "; ".join(item.why for item in holders.unread) or "NVML gave no answer"
                return None, f"whether the GPUs are free is not known: {why}"
            held = ours & set(holders.held)
            if not held:
                return True, f"none of them holds a GPU ({holders.count} looked at)"
            if until.expired:
                return False, f"NVML still shows {sorted(held)} on a GPU"
            self._clock.sleep(0.2)


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _marks() -> dict[str, str]:
    """The marks of ``leftovers.mark_run`` that this process carries now."""
    return {name: os.environ[name] for name in MARKS if name in os.environ}


_REMEDIES: Mapping[str, str] = {
    "No module named": "Name the interpreter that has vLLM: --python /path/to/venv/bin/python",
    "unrecognized arguments": "This release does not know a flag of the recipe or one of yours after --; see its own help",
    "ddress already in use": "Leave --port out for a free one, or look for an earlier run's server: dsv4-repro doctor",
    "Free memory on device": "The GPU is in use: end what holds it (dsv4-repro doctor), or give -- --gpu-memory-utilization 0.5",
    "out of memory": "Give the engine less: -- --gpu-memory-utilization 0.8 --max-model-len 65536",
}


def _remedy(text: str, spec: LaunchSpec) -> str:
    for piece, remedy in _REMEDIES.items():
        if piece in text:
            return remedy
    return f"All that it said: less {spec.log_path}"


class _Attempt:
    """One completion in a thread of its own, so that the log and the process are looked at meanwhile."""

    def __init__(self, complete: Callable[..., CompletionOutcome], spec: LaunchSpec, timeout_s: float, clock: Clock) -> None:
        self.outcome: CompletionOutcome | None = None
        self._arguments = (complete, spec, timeout_s, clock)
        threading.Thread(target=self._run, name="dsv4-repro-first-completion", daemon=True).start()

    def _run(self) -> None:
        complete, spec, timeout_s, clock = self._arguments
        self.outcome = complete(spec.base_url, spec.model, timeout_s=timeout_s, headers=spec.headers, clock=clock)
