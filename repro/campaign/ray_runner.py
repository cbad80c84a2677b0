"""The same blocks as Ray tasks, spread over hosts: ``--ray local`` or ``--ray ADDRESS``. Needs the extra ``hunt``.

A task runs one block and returns all its results, so nothing of a block is stored until all of it is back; a task whose worker or
node is lost is given out again by the hunt, and a number that is stored already is not stored twice. Ray itself retries nothing
(``max_retries=0``): what was lost is recorded. A task that takes longer than the limit is cancelled by force.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...clock import SYSTEM, Clock
from ...errors import ToolMissingError, UnavailableError
from .cells import Cell, TrialResult
from .pools import TRIAL_LIMIT_S, Message, run_block
from .sampler import Block
from .session import TrialSession

__all__ = ["RayPool", "run_remote_block"]

#: Blocks given out for each slot: the next one waits at the node, so that a worker does not wait for the driver between two.
_AHEAD = 2
#: What the cluster looks like is asked for again after so long, seconds: each question goes to Ray's control service.
_LOOK_S = 1.0
_KEPT: dict[str, TrialSession] = {}
_IDENTITIES: dict[str, Any] = {}


def run_remote_block(document: dict[str, Any], seeds: Sequence[int], gpu: bool) -> tuple[str, list[dict[str, Any]]]:
    """In a Ray worker: (node and process, results of the block). A GPU worker ends its workload with each block, since the next
    task on this GPU may be another process's.
    """
    import ray

    if gpu:
        document = {**document, "device": "0"}  # Ray shows a task only its own GPU
    results = [result.document() for result in run_block(Cell.from_document(document), seeds, _KEPT, _IDENTITIES, _silent)]
    if gpu:
        for session in _KEPT.values():
            session.close()
        _KEPT.clear()
    return f"{ray.get_runtime_context().get_node_id()[:8]}/{os.getpid()}", results


def _silent(*_words: Any, **_fields: Any) -> None:
    """A task's notes stay with its results."""


class RayPool:
    """``address``: "local" starts Ray here, anything else is a cluster's address ("auto" finds one). ToolMissingError without Ray,
    UnavailableError if the cluster cannot be reached.
    """

    def __init__(self, address: str, *, gpu: bool = False, limit_s: float = TRIAL_LIMIT_S, clock: Clock = SYSTEM) -> None:
        try:
            import ray
        except ImportError as error:
            raise ToolMissingError(f"--ray needs Ray: {error}", help_text="pip install 'dsv4-repro[hunt]'") from error
        self._ray: Any = ray
        self._gpu, self._limit, self._clock = gpu, limit_s, clock
        package = sys.modules[__name__.partition(".")[0]]
        folder = str(Path(package.__path__[0]).absolute().parent)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
        options: dict[str, Any] = {"runtime_env": {"env_vars": {"PYTHONPATH": path}}, "log_to_driver": False}
        self._owned = not ray.is_initialized()
        if self._owned:
            try:
                ray.init(
                    address=None if address == "local" else address,
                    include_dashboard=False if address == "local" else None,
                    **options,
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UnavailableError(f"no Ray cluster at {address}: {str(error)[:300]}", help_text="ray status") from error
        resources = {"num_gpus": 1, "num_cpus": 1} if gpu else {"num_cpus": 1}
        self._task = ray.remote(max_retries=0, scheduling_strategy="SPREAD", **resources)(run_remote_block)
        self._flying: dict[Any, tuple[Block, float]] = {}
        self._seen: tuple[float, int, int] | None = None

    def _look(self) -> tuple[int, int]:
        """(slots, nodes alive), at most ``_LOOK_S`` old."""
        now = self._clock.monotonic()
        if self._seen is None or now - self._seen[0] >= _LOOK_S:
            slots = max(int(self._ray.cluster_resources().get("GPU" if self._gpu else "CPU", 0)), 0)
            self._seen = (now, slots, sum(node["Alive"] for node in self._ray.nodes()))
        return self._seen[1], self._seen[2]

    def slots(self) -> int:
        """Blocks that the cluster can run at once now."""
        return self._look()[0]

    def free(self) -> int:
        """Blocks that may be given out: two a slot; some always, so that an empty cluster shows as waiting and not as the end."""
        return _AHEAD * max(self.slots(), 1) - len(self._flying)

    def submit(self, block: Block) -> None:
        """Give a block to Ray."""
        reference = self._task.remote(block.cell.document(), list(block.seeds), self._gpu)
        self._flying[reference] = (block, self._clock.monotonic())

    def poll(self, timeout_s: float) -> list[Message]:
        """Blocks that came back, were lost, or took too long."""
        found: list[Message] = []
        if not self._flying:
            return found
        ready, _rest = self._ray.wait(list(self._flying), num_returns=len(self._flying), timeout=0)
        if not ready:
            ready, _rest = self._ray.wait(list(self._flying), num_returns=1, timeout=timeout_s)
        for reference in ready:
            block, _since = self._flying.pop(reference)
            found += self._collect(reference, block)
        now = self._clock.monotonic()
        for reference, (block, since) in list(self._flying.items()):
            if now - since > self._limit * max(len(block.numbers), 1):
                del self._flying[reference]
                with contextlib.suppress(self._ray.exceptions.RayError, ValueError, RuntimeError):
                    self._ray.cancel(reference, force=True)
                found.append(Message("lost", "ray", block, why=f"took longer than {self._limit:g} s a trial; cancelled"))
        return found

    def _collect(self, reference: Any, block: Block) -> list[Message]:
        try:
            worker, documents = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            return [Message("lost", "ray", block, why=f"{type(error).__name__}: {first}"[:500])]
        results = [TrialResult.from_document(document) for document in documents]
        messages = [Message("result", worker, block, number, result) for number, result in zip(block.numbers, results, strict=True)]
        return [*messages, Message("done", worker, block)]

    def doing(self) -> list[str]:
        """A line a block in flight, and the nodes."""
        now = self._clock.monotonic()
        slots, nodes = self._look()
        lines = [f"ray: {nodes} nodes, {slots} slots, {len(self._flying)} blocks out"]
        return lines + [f"{block.cell.name}: {now - since:.1f} s" for block, since in list(self._flying.values())[:16]]

    def close(self) -> None:
        """Cancel what is out, and end the Ray that this pool started."""
        for reference in self._flying:
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError, RuntimeError):
                self._ray.cancel(reference, force=True)
        self._flying.clear()
        if self._owned:
            self._ray.shutdown()
