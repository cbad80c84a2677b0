"""Communication kernels that poll a peer GPU: two at once, a peer that is behind, or a peer that nobody looked at."""

from __future__ import annotations

from collections.abc import Iterator

from ..evidence.facts import DeviceKernel
from ..evidence.refs import Ref
from .base import FAIR, STRONG, WEAK, Finding, supported, unknown
from .device import resident_judgements
from .lateness import whereabouts
from .view import View

__all__ = ["rule_crossrank"]


def rule_crossrank(view: View) -> Iterator[Finding]:
    rule = "crossrank"
    found = [item for item in resident_judgements(view) if item[2].class_ == "gpu-crossrank-spin"]
    timeouts = view.events("deepep-timeout", "grid-sync-timeout")
    if not found:
        if timeouts:
            # DeepEP names the peer; DeepGEMM's "grid sync" is also the text of a barrier inside one GPU.
            yield supported(
                rule,
                "gpu-crossrank-spin",
                FAIR if view.events("deepep-timeout") else WEAK,
                "a communication kernel gave up waiting for a peer GPU",
                [e.ref for e in timeouts],
            )
        else:
            yield unknown(rule, "gpu-crossrank-spin", "no kernel that polls a peer GPU was seen resident")
        return
    others = [
        item
        for item in resident_judgements(view)
        if item[2].class_ in ("gpu-spin-barrier", "gpu-barrier-intra-block", "gpu-kernel-stuck")
    ]
    ranks = {facts.rank if facts.rank is not None else facts.pid for facts, _, _ in found}
    looked = {facts.rank if facts.rank is not None else facts.pid for facts in view.devices if facts.kernels is not None}
    two = [facts for facts in view.devices if sum(1 for f, _, _ in found if f is facts) > 1]
    refs = [kernel.ref for _, kernel, _ in found]
    names = {kernel.name.split("<")[0].split("(")[0] for _, kernel, _ in found}
    strength = max(judged.strength for _, _, judged in found)
    if two:
        yield supported(
            rule,
            "gpu-crossrank-spin",
            max(strength, FAIR),
            f"two kernels of one rank poll peers at once: {', '.join(sorted(names))}",
            refs,
            "two-streams",
        )
        return
    everyone = len(ranks) > 1 and ranks == looked and not others
    if everyone:
        cause = "peer-behind" if len(names) > 1 or len({_blocks_key(k) for _, k, _ in found}) > 1 else None
        yield supported(
            rule,
            "gpu-crossrank-spin",
            STRONG if strength >= FAIR else FAIR,
            "every rank looked at polls its peers in a communication kernel",
            refs,
            cause,
        )
        return
    if len(looked) > len(ranks) and not others:
        yield supported(rule, "gpu-crossrank-spin", FAIR, "some ranks poll a peer that is in no such kernel", refs, "peer-behind")
        return
    away = _peers_away(view, {(facts.rank, facts.pid) for facts, _, _ in found}) if not others else []
    if away:
        yield supported(
            rule,
            "gpu-crossrank-spin",
            FAIR,
            f"{found[0][2].text}; a peer has left the step and its GPU is idle",
            [*refs, *away],
            "peer-behind",
        )
        return
    # One rank alone: it waits for a peer that nobody looked at, or for one that is held by something else.
    yield supported(rule, "gpu-crossrank-spin", WEAK, found[0][2].text + "; why the peer does not come was not read", refs)


def _peers_away(view: View, spinning: set[tuple[int | None, int | None]]) -> list[Ref]:
    """Ranks back at their queue whose own GPU is seen idle: under asynchronous scheduling a stack alone would not tell."""
    idle = {gpu.index: gpu.refs for gpu in view.gpus_in("idle", "low") if gpu.index is not None}
    refs: list[Ref] = []
    for process in view.workers:
        if process.rank is None or process.rank not in idle or any(process.rank == r or process.pid == p for r, p in spinning):
            continue
        spot = whereabouts(process)
        if spot is not None and spot[0] in ("worker-dequeue", "queue-get"):
            refs += [spot[1], *idle[process.rank][-1:]]
    return refs


def _blocks_key(kernel: DeviceKernel) -> tuple[tuple[int, int, int], ...]:
    return tuple(b.index for b in kernel.blocks or ())
