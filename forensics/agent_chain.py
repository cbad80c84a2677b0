"""Links of the causal chain that the agent's evidence carries: batch and padding from the ring, length and counter from memory.

Each link cites the file that it was read from. What neither file says stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .chain import LINKS, ChainInput, StepFacts, causal_chain
from .evidence.agent_facts import recorded_step
from .evidence.refs import Ref
from .records import ChainLink
from .rules.agent_view import AgentRank

__all__ = ["agent_links", "agent_step", "stronger"]

_STRENGTH = ("not observed", "inferred", "computed", "interpreted", "measured")

Ids = Callable[[Sequence[Ref]], tuple[str, ...]]


def agent_step(one: AgentRank) -> StepFacts | None:
    """The step that its ring shows under way, as measured."""
    return recorded_step(one.step) if one.step is not None else None


def _disagreement(one: AgentRank) -> str:
    assert one.wait is not None
    launch = one.wait.launch
    return (
        f"peers decide once, from max_seq_len {launch.max_seq_len} <= 32768, and return; the leader decides per row, from device "
        f"memory: row {one.wait.group} with length {one.wait.length}, read as unsigned, takes the path that all its group must take"
    )


def agent_links(one: AgentRank, ids: Ids) -> dict[str, ChainLink]:
    """The links that this rank's ring and row states tell, by name; none that they do not."""
    wait = one.wait
    equation = ""
    if wait is not None:
        reads = "does not change between reads" if one.agreed else "was read once"
        equation = (
            f"arrival_counter of group {wait.group}, at {wait.address:#x}, is 1 and {reads}, while the step does not end; no "
            "instruction was seen"
        )
    seen = ChainInput(
        "measured",
        row=wait.group if wait is not None else None,
        row_length=wait.length if wait is not None else None,
        disagreement=_disagreement(one) if wait is not None else "",
        equation=equation,
    )
    ring = ids([one.ring.ref]) if one.ring is not None else ()
    read = ids([one.reading.ref]) if one.reading is not None else ()
    sources: Mapping[str, tuple[str, ...]] = {
        "drain": ring, "mtp": ring, "graph-padding": ring, "producer": read, "barrier": read,
    }  # fmt: skip
    links: dict[str, ChainLink] = {}
    for link in causal_chain(seen, agent_step(one), ()):
        if link.status == "not observed" or link.link == "host":
            continue
        links[link.link] = link.model_copy(update={"evidence": sources.get(link.link, ()) if link.status == "measured" else ()})
    return links


def stronger(own: Mapping[str, ChainLink], added: Mapping[str, ChainLink]) -> dict[str, ChainLink]:
    """Both, in the chain's order; where both have a link, the better known one, and ``own`` where they are equally well known."""
    merged: dict[str, ChainLink] = {}
    for name in LINKS:
        first, second = own.get(name), added.get(name)
        if first is None or (second is not None and _STRENGTH.index(second.status) > _STRENGTH.index(first.status)):
            first = second
        if first is not None:
            merged[name] = first
    return merged
