"""What the agent in the workers saw: a launched step that does not end, and a barrier's counter that stands one short.

Neither saw an instruction: the counter and the row's length are memory, the step is an event that never fired. So the wait is of
medium confidence where reads agree and low where there is one; a step that does not end says only that the GPU holds it.
"""

from __future__ import annotations

from collections.abc import Iterator

from .agent_view import AgentRank
from .base import FAIR, WEAK, Finding, contradicted, supported, unknown
from .view import View

__all__ = ["all_launched", "overdue", "rule_agent_step", "rule_agent_wait"]

#: A replayed decode graph takes milliseconds, a prefill seconds: from these ages on a step counts as overdue, seconds.
_GRAPH_S = 1.0
_OTHER_S = 30.0
#: From this age on a single worker's step is no slow one.
_LONG_S = 5.0
_HOST = ("host-jit-compile", "host-ipc-stall", "host-cpu-livelock", "scheduler-stall")


def overdue(one: AgentRank) -> bool:
    """Its oldest launched step is older than such a step ever takes."""
    if one.step is None or one.age_s is None:
        return False
    return one.age_s >= (_GRAPH_S if one.step.graph_mode == "full" else _OTHER_S)


def all_launched(view: View) -> bool:
    """Every worker has launched the step that does not end: no host is behind. Only where the number of workers is known."""
    late = [one for one in view.agents if overdue(one)]
    if not late or len(late) != len(view.agents):
        return False
    world = view.world if view.world is not None else 1 if view.single_gpu is True else None
    return world == len(late) and len({one.step.number for one in late if one.step is not None}) == 1


def _step_words(one: AgentRank) -> str:
    assert one.step is not None
    step = one.step
    batch = ""
    if step.requests is not None:
        padded = f" padded to {step.padded_requests}" if step.padded_requests not in (None, step.requests) else ""
        tokens = f", {step.tokens} tokens" if step.tokens is not None else ""
        tokens += f" to {step.padded_tokens}" if step.padded_tokens not in (None, step.tokens) else ""
        batch = f" ({step.requests} requests{padded}{tokens}, graph {step.graph_mode})"
    return f"{one.name}: step {step.number}{batch} was launched and has not ended after {one.age_s:.1f} s"


def rule_agent_wait(view: View) -> Iterator[Finding]:
    """One arrival in a group whose row has a negative length, while a step is overdue (vllm-project/vllm#51593)."""
    rule = "agent-row-states"
    held = [one for one in view.agents if one.wait is not None]
    if not held:
        gone = [one for one in view.agents if one.moved_on]
        if gone:
            text = f"{gone[0].name} had a counter that stood one short, and steps ended after that: the wait is over"
            yield unknown(rule, "gpu-spin-barrier", text, refs=[ref for one in gone for ref in one.refs])
        else:
            yield unknown(rule, "gpu-spin-barrier", "no row states that show a wait", "dsv4-repro agent ask")
        return
    for one in held:
        wait = one.wait
        assert wait is not None
        # Tokens that flow speak of another engine, or of later: then the memory alone is not enough.
        strength = FAIR if one.agreed and not view.flow.moving else WEAK
        reads = "in reads that agree" if one.agreed else "in one read"
        text = (
            f"{one.name}: arrival_counter of group {wait.group} is 1 {reads}; row {wait.group} has length {wait.length}, and "
            f"max_seq_len {wait.launch.max_seq_len} lets the peers leave: the leader waits for ever (read from device memory by "
            "the agent; no instruction was seen)"
        )
        yield supported(rule, "gpu-spin-barrier", strength, text, one.refs, "peer-left")


def rule_agent_step(view: View) -> Iterator[Finding]:
    """A step whose launches are done and whose event never fired: the GPU holds it. Which kernel, the recorder does not know."""
    rule = "agent-recorder"
    late = [one for one in view.agents if overdue(one)]
    rings = [one for one in view.agents if one.ring is not None]
    if not late:
        why = "no launched step is overdue" if rings else "no flight recorder of the agent"
        refs = [one.ring.ref for one in rings if one.ring is not None]
        yield unknown(rule, "gpu-kernel-stuck", why, "DSV4_REPRO_AGENT=1 (docs/agent.md)" if not rings else "", refs)
        return
    refs = [ref for one in late for ref in one.refs]
    everywhere = all_launched(view)
    text = "; ".join(_step_words(one) for one in late[:3])
    alone = len(view.agents) == 1 and everywhere
    long = all(one.age_s is not None and one.age_s >= _LONG_S for one in late)
    strength = FAIR if alone and (view.flow.frozen or long) and not view.flow.moving else WEAK
    yield supported(rule, "gpu-kernel-stuck", strength, f"{text}: the GPU does not finish", refs)
    if not view.flow.moving:
        yield contradicted(rule, "not-hung", f"{text}: something does not move", refs)
    if everywhere and not view.flow.moving:
        for class_ in _HOST:
            yield contradicted(rule, class_, "every worker has launched the step: the host is not what it waits for", refs)
