"""The stand-in's scheduler: pure, no clock, no process. Requests go in, batches come out, and tokens by seed."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .settings import Settings

__all__ = ["Batch", "Request", "Scheduler"]

BLOCK = 64


@dataclass
class Request:
    """One completion. ``least``/``most``: tokens; ``length``: where it ends, chosen at its start."""

    name: str
    prompt: int
    most: int
    least: int = 0
    ignore_eos: bool = False
    computed: int = 0
    generated: int = 0
    length: int = 0

    @property
    def context(self) -> int:
        return self.computed + self.generated


@dataclass
class Batch:
    """One step: tokens by request; sizes as the graph has them. ``decode``: every request has its whole prompt."""

    number: int
    tokens: dict[str, int] = field(default_factory=dict)
    decode: bool = False
    mode: str = "NONE"
    padded_rows: int = 0
    padded_requests: int = 0
    prefill: int = 0
    longest: int = 0
    contexts: list[int] = field(default_factory=list)

    @property
    def live(self) -> int:
        return len(self.tokens)

    @property
    def rows(self) -> int:
        return sum(self.tokens.values())


class Scheduler:
    """Waiting and running queues. ``settings`` may be replaced while it runs."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps = 0
        self.preemptions = 0

    def add(self, document: dict[str, Any]) -> None:
        """A request, as the API process sends it."""
        request = Request(
            document["id"], document["prompt"], document["max"], document.get("min", 0), bool(document.get("ignore_eos"))
        )
        if request.ignore_eos:
            request.length = request.most
        else:
            request.length = min(max(request.least, 1 + int(self.random.expovariate(1 / 120))), request.most)
        self.waiting.append(request)

    def abort(self, name: str) -> None:
        """Drop a request wherever it is."""
        self.waiting = deque(request for request in self.waiting if request.name != name)
        self.running = [request for request in self.running if request.name != name]

    @property
    def blocks(self) -> int:
        """KV blocks in use."""
        return sum(1 + request.context // BLOCK for request in self.running)

    @property
    def usage(self) -> float:
        return min(self.blocks / self.settings.kv_blocks, 1.0)

    def schedule(self) -> Batch | None:
        """The next step's batch; None: nothing to do (or nothing is admitted)."""
        settings = self.settings
        if not settings.admission or self.steps < settings.after:
            while self.waiting and len(self.running) < settings.max_num_seqs and self.blocks < settings.kv_blocks:
                self.running.append(self.waiting.popleft())
        while self.running and self.blocks > settings.kv_blocks:
            self._preempt()
        if settings.thrash and self.steps >= settings.after and self.running:
            self._preempt()
            self.running.append(self.waiting.popleft())
        if not self.running:
            return None
        self.steps += 1
        batch = Batch(self.steps)
        budget = settings.max_tokens_step
        for request in self.running:
            missing = request.prompt - request.computed
            share = min(missing, budget) if missing > 0 else min(1 + settings.mtp, budget)
            if share <= 0:
                continue
            budget -= share
            batch.tokens[request.name] = share
            batch.contexts.append(request.context + share)
            if missing > 0:
                batch.prefill += share
                batch.longest = max(batch.longest, request.prompt)
        batch.decode = batch.prefill == 0
        batch.padded_rows, batch.padded_requests = batch.rows, batch.live
        if batch.decode and not settings.eager:
            size = next((size for size in settings.sizes if size >= batch.rows), 0)
            if size:
                batch.mode, batch.padded_rows = "FULL", size
                batch.padded_requests = size // (1 + settings.mtp)
        return batch

    def _preempt(self) -> None:
        victim = self.running.pop()
        victim.computed = 0
        self.waiting.appendleft(victim)
        self.preemptions += 1

    def wedges(self, batch: Batch) -> bool:
        """Whether this step never ends."""
        settings = self.settings
        if settings.wedge_step and batch.number == settings.wedge_step:
            return True
        return (
            batch.live in settings.wedge_at
            and batch.mode == "FULL"
            and batch.padded_requests > batch.live
            and settings.mtp > 0
            and not settings.guard
            and all(request.generated > 0 for request in self.running)
        )

    def finish(self, batch: Batch) -> dict[str, Any]:
        """The step has ended: what came out of it, as the API process gets it."""
        settings = self.settings
        out: list[tuple[str, int, str]] = []
        drafts = drafted = accepted = prompt = generated = 0
        for request in list(self.running):
            share = batch.tokens.get(request.name, 0)
            if not share:
                continue
            if request.computed < request.prompt:
                request.computed += share
                prompt += share
                if request.computed < request.prompt or (settings.thrash and self.steps >= settings.after):
                    continue
                count = 1
            else:
                taken = 0
                while taken < settings.mtp and self.random.random() < settings.acceptance:
                    taken += 1
                drafts, drafted, accepted = drafts + 1, drafted + settings.mtp, accepted + taken
                count = 1 + taken
            count = min(count, request.length - request.generated)
            request.generated += count
            generated += count
            reason = ""
            if request.generated >= request.length:
                reason = "length" if request.generated >= request.most else "stop"
                self.running.remove(request)
            out.append((request.name, count, reason))
        return {
            "out": out, "rows": batch.rows, "prompt": prompt, "generated": generated, "drafts": drafts, "drafted": drafted,
            "accepted": accepted, **self.stats(),
        }  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """The gauges."""
        return {
            "running": len(self.running), "waiting": len(self.waiting), "kv": round(self.usage, 4), "preemptions": self.preemptions,
        }  # fmt: skip
