"""``agent ask``: the row states, read by the agent inside the server, also while its GPU is wedged. No ptrace; files alone."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..clock import SYSTEM, Clock, Deadline
from ..errors import DeadlineError, EvidenceError, UnavailableError
from .agent_show import read_agents, read_document
from .atomic import write_atomic

__all__ = ["AskedLaunch", "Released", "RowStates", "ask_release", "ask_row_states", "row_state_lines", "the_one_alive"]

POLL_S = 0.02
_Answer = TypeVar("_Answer", bound=BaseModel)
#: JSON of Python may say NaN and Infinity.
_Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
_Int = Annotated[int, Field(ge=-(1 << 63), le=(1 << 64) - 1)]


class AskedLaunch(BaseModel):
    """One captured launch of the op: addresses in hex, arrival counter (int32) of each group, length (int32) of each row."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    workspace: str = Field(max_length=32, pattern=r"^0x[0-9a-f]+$")
    lengths_address: str = Field(max_length=32, pattern=r"^0x[0-9a-f]+$")
    rows: _Int
    width: _Int
    top_k: _Int
    max_seq_len: _Int
    arrival_counters: list[_Int] = Field(max_length=4096)
    lengths: list[_Int] = Field(max_length=4096)
    read_ns: _Int


class RowStates(BaseModel):
    """The agent's answer. ``stalled_s``: seconds since the launch of the oldest step that has not ended; 0 if there is none."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    launches: list[AskedLaunch] = Field(max_length=256)
    stalled_s: _Seconds


class Released(BaseModel):
    """The agent's answer to a request to release: launches released, why no more, and how its guard stands."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    released: int = Field(ge=0, le=1 << 31)
    why_no_more: str = Field(default="", max_length=4000)
    guard: bool = False
    guard_needed: bool | None = None
    stalled_s: _Seconds = 0.0


def the_one_alive(folder: Path, pid: int | None) -> str:
    """Name of the agent to ask (``PID-START``): that of ``pid``, or the only one that is running.

    Raises EvidenceError (nothing of an agent there), UnavailableError (none runs, or several and none was named).
    """
    ranks = [rank for rank in read_agents(folder).ranks if rank.alive is not False and rank.ring and pid in (None, rank.pid)]
    if len(ranks) == 1:
        return ranks[0].name
    if not ranks:
        raise UnavailableError(f"no running worker with an agent in {folder}", help_text=f"See all: dsv4-repro agent show {folder}")
    listed = ", ".join(str(rank.pid) for rank in ranks[:16])
    raise UnavailableError(f"{len(ranks)} workers: {listed}", help_text="Name one: dsv4-repro agent ask --pid PID")


def ask_row_states(folder: Path, name: str, *, timeout: float = 2.0, clock: Clock = SYSTEM) -> RowStates:
    """Ask the agent ``name`` for its row states; ``timeout`` in seconds.

    Raises DeadlineError (no answer), UnavailableError (it answers that it cannot, in its words), EvidenceError (no sense in it),
    RunStoreError (the folder cannot be written).
    """
    return _checked(*_asked(folder, name, {}, timeout, clock), RowStates)


def ask_release(folder: Path, name: str, *, guard: bool, timeout: float = 3.0, clock: Clock = SYSTEM) -> Released:
    """Ask the agent ``name`` to release the known wait, under the conditions of its rescue; ``guard``: and to arm its guard first.

    It works for 0.6 s at most and answers; ask again while launches are released. Raises as ``ask_row_states``.
    """
    return _checked(*_asked(folder, name, {"kind": "release", "guard": guard}, timeout, clock), Released)


def _asked(folder: Path, name: str, request: dict[str, Any], timeout: float, clock: Clock) -> tuple[dict[str, Any], Path]:
    token = secrets.token_hex(8)
    answer = folder / f"answer-{name}.json"
    write_atomic(folder / f"ask-{name}.json", json.dumps({"id": token, **request}).encode())
    deadline = Deadline(timeout, clock)
    while True:
        document = read_document(answer) if os.path.lexists(answer) else {}
        if document.get("id") == token:
            return document, answer
        if deadline.expired:
            raise DeadlineError(
                f"the agent {name} did not answer within {timeout:g} s",
                help_text="It looks for requests five times a second once a step has run; see: dsv4-repro agent show",
            )
        clock.sleep(POLL_S)


def _checked(document: dict[str, Any], path: Path, kind: type[_Answer]) -> _Answer:
    if "error" in document:
        raise UnavailableError(f"the agent says: {str(document['error'])[:300]}")
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        raise EvidenceError(
            f"no answer of an agent: {first['msg']}", path=str(path), place=".".join(str(part) for part in first["loc"])
        ) from None


def row_state_lines(states: RowStates) -> list[str]:
    """The answer for a person: numbers as read, no judgement."""
    lines = [f"oldest step under way: {states.stalled_s:.2f} s" if states.stalled_s else "no step is under way"]
    if not states.launches:
        lines.append("no captured launch of persistent_topk is known to the agent")
    for launch in states.launches:
        lines.append(
            f"rows {launch.rows}, width {launch.width}, k {launch.top_k}, max_seq_len {launch.max_seq_len}, {launch.workspace}"
        )
        lines.append(f"  arrival counters {launch.arrival_counters}")
        lines.append(f"  lengths          {launch.lengths}")
    return lines
