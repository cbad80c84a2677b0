"""What ``why`` says, as a document (schema ``dsv4-repro/why/1``) and as lines."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .console import printable, wrap

__all__ = ["WhyBuild", "WhyCause", "WhyDeadline", "WhyDocument", "WhyRank", "why_lines"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class WhyRank(_Part):
    """A worker process. ``window``: the batch of the step that it has under way, by the recorder."""

    pid: int
    rank: int | None = None
    gpu: str | None = None
    unfinished_s: float | None = None
    window: str = ""


class WhyCause(_Part):
    """The most likely class, in the words of the diagnosis. ``sentence``: what decides it."""

    class_: str = Field(alias="class")
    cause: str | None = None
    confidence: Literal["high", "medium", "low"]
    sentence: str = ""
    signature: str | None = None


class WhyDeadline(_Part):
    """When the engine ends itself. ``remaining_s`` null: it does not, or that is not known (``state`` says which)."""

    state: Literal["counting", "overdue", "ended", "none", "not counting", "unknown"]
    limit_s: float | None = None
    remaining_s: float | None = None
    known: Literal["measured", "inferred", "assumed", "not observed"]
    text: str


class WhyBuild(_Part):
    """Is the build affected. ``live_requests``: counts at which decode batches are padded with the server's flags."""

    affected: Literal["yes", "possible", "no", "not known"]
    text: str
    releases: tuple[str, ...] = ()
    live_requests: tuple[int, ...] | None = None


class WhyDocument(_Part):
    """``dsv4-repro why --json``. ``still_s``: for how long nothing has moved, at least; null: not known."""

    schema_: Literal["dsv4-repro/why/1"] = Field(alias="schema", default="dsv4-repro/why/1")
    outcome: Literal["hang", "clean", "other", "inconclusive"]
    state: Literal["healthy", "idle", "starting", "suspect", "hung", "ended", "unknown", "no server"]
    exit_status: int
    base_url: str | None = None
    engine_pids: tuple[int, ...] = ()
    ranks: tuple[WhyRank, ...] = ()
    still_s: float | None = None
    still_known: Literal["measured", "inferred", "not observed"] = "not observed"
    live_requests: int | None = None
    reasons: tuple[str, ...] = ()
    device_signals: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    power: tuple[str, ...] = ()
    cause: WhyCause | None = None
    deadline: WhyDeadline | None = None
    build: WhyBuild | None = None
    agent: tuple[str, ...] = ()
    unread: tuple[dict[str, Any], ...] = ()
    next: tuple[str, ...] = ()
    seconds: float = 0.0


def why_lines(document: WhyDocument) -> list[str]:
    """For a person: the state first, what to do next last."""
    where = document.base_url or (f"engine {document.engine_pids[0]}" if document.engine_pids else "")
    still = (
        f", nothing has moved for at least {document.still_s:.0f} s ({document.still_known})"
        if document.still_s is not None and document.state in ("hung", "suspect")
        else ""
    )
    lines = wrap(f"{document.state.upper()}{': ' + where if where else ''}{still}", indent="  ")
    live = "not known" if document.live_requests is None else str(document.live_requests)
    if document.base_url is not None or document.engine_pids:
        lines.append(f"live requests: {live}")
    for title, texts in (
        ("seen", document.reasons), ("on the device", document.device_signals), ("against a hang", document.against),
        ("power", document.power),
    ):  # fmt: skip
        for text in texts:
            lines += wrap(f"{title}: {text}", indent="  ")
    for rank in document.ranks:
        name = f"rank {rank.rank}" if rank.rank is not None else "worker"
        lines += wrap(
            f"{name}: pid {rank.pid}, GPU {rank.gpu or 'not known'}{', ' + rank.window if rank.window else ''}", indent="  "
        )
    if document.cause is not None:
        cause = document.cause
        name = f"{cause.class_}{' / ' + cause.cause if cause.cause else ''}"
        lines += wrap(f"most likely: {name}, {cause.confidence} confidence. {cause.sentence}", indent="  ")
    if document.deadline is not None:
        lines += wrap(f"deadline ({document.deadline.known}): {document.deadline.text}", indent="  ")
    if document.build is not None:
        lines += wrap(f"vllm-51593 in this build: {document.build.affected}; {document.build.text}", indent="  ")
    for text in document.agent:
        lines += wrap(f"agent: {text}", indent="  ")
    starts = document.state == "starting"
    if starts and document.unread:
        lines += wrap(f"not there yet, or not readable: {', '.join(str(item['what']) for item in document.unread)}", indent="  ")
    for item in () if starts else document.unread:
        remedy = f" ({item['remedy']})" if item.get("remedy") else ""
        lines += wrap(f"could not read {item['what']}: {item['why']}{remedy}", indent="  ")
    lines += [printable(f"{'next' if number == 0 else 'then'}: {text}") for number, text in enumerate(document.next)]
    return lines
