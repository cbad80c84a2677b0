"""One request of a drain load: how far it is, as the steering sees it, and what has arrived of it and is not yet written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .completion_stream import CompletionStream, StreamEvent
from .load_plan import RequestSpec
from .steering import StreamView

__all__ = ["LoadRequest"]


@dataclass
class LoadRequest:
    """A request of the current wave, sent or not. ``state``: held, due, sent or ended.

    ``at`` (seconds, monotonic), ``counts`` (tokens so far), ``ids`` (those that came) or ``texts``: arrivals not yet written.
    """

    spec: RequestSpec
    state: str
    stream: CompletionStream | None = None
    task: asyncio.Task[None] | None = None
    why: str = ""
    extended: bool = False
    at: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[Sequence[int]] | None = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def view(self) -> StreamView:
        """As the steering sees it."""
        stream = self.stream
        state: Any = self.state
        if state == "sent" and stream is not None and stream.tokens:
            state = "streaming"
        outcome = stream.outcome if stream is not None else None
        return StreamView(
            id=self.spec.id,
            state=state,
            tokens=stream.tokens if stream is not None else 0,
            max_tokens=self.spec.max_tokens,
            cancel_after=self.spec.cancel_after,
            fault=outcome is not None and outcome.fault,
        )

    def heard(self, event: StreamEvent) -> bool:
        """Keep an arrival until it is written; whether it is the first. One without token ids ends the ids of this request."""
        first = not self.at and self.stream is not None and self.stream.first_token_at == event.at
        self.at.append(event.at)
        self.counts.append(event.tokens)
        if event.token_ids is None:
            self.ids = None
        if self.ids is not None:
            self.ids.append(event.token_ids or ())
        elif self.stream is not None:
            self.texts.append(self.stream.text_so_far)
        return first

    def take_arrivals(self) -> dict[str, Any]:
        """The fields of a ``tokens`` line for what has arrived since the last one; empty if nothing has."""
        if not self.at:
            return {}
        what: dict[str, Any] = {"at": [round(at, 6) for at in self.at], "n": self.counts}
        if self.ids is not None:
            what["ids"] = [list(some) for some in self.ids]
        else:
            what["text"] = self.texts[-len(self.at) :]
        self.at, self.counts, self.texts = [], [], []
        self.ids = [] if self.ids is not None else None
        return what
