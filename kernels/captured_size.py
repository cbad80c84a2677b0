"""One captured size of a decode workload: what was really captured, held against the plan; what came out, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .abi import PARAMS_SIZE, THREADS_PER_CTA, TopKParams
from .driver import Handle, KernelNode
from .plan import LaunchPlan

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ROTATION", "CapturedSize", "PendingStep", "describe_capture", "wrong_rows"]

#: Distinct logits arrays per size: layer l of step i reads array (i + l) % ROTATION.
ROTATION = 3


@dataclass(slots=True)
class CapturedSize:
    """One captured size: its launch, device addresses and executable graph."""

    plan: LaunchPlan
    lengths: int
    outputs: int
    logits: list[int]
    pool: list[int]
    host_pool: list[np.ndarray[Any, Any]]
    graph: Handle = None
    executable: Handle = None
    #: Parameters as they stand in the captured graph, by layer (told apart by the output's address).
    frozen: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class PendingStep:
    """A step on the device. ``check``: layers whose results come back; ``live_rows``: the first so many; ``began``: seconds."""

    index: int
    size: CapturedSize
    lengths: list[int]
    check: list[int]
    live_rows: int
    began: float


def describe_capture(size: CapturedSize, nodes: Sequence[KernelNode], *, layers: int) -> dict[str, Any]:
    """What was captured beside what was planned: ``rows``, ``kernel_nodes``, the distinct ``launched`` and the ``differences``.

    ``nodes``: as read back from the graph; ``size.frozen`` takes their parameters by layer.
    """
    plan = size.plan
    nodes = [node for node in nodes if "topk" in node.function or not node.function]
    differences: list[str] = []
    launched: list[dict[str, Any]] = []
    for node in nodes:
        seen: dict[str, Any] = {"grid": list(node.grid), "block": list(node.block), "dynamic_smem": node.dynamic_smem}
        if node.grid != (plan.grid, 1, 1) or node.block[0] != THREADS_PER_CTA or node.dynamic_smem != plan.dynamic_smem:
            differences.append(
                f"launched grid {node.grid}, block {node.block}, {node.dynamic_smem} B; "
                f"planned ({plan.grid}, 1, 1), ({THREADS_PER_CTA}, 1, 1), {plan.dynamic_smem} B"
            )
        if len(node.params) >= PARAMS_SIZE:
            actual = TopKParams.unpack(node.params)
            layer, rest = divmod(actual.output - size.outputs, 4 * plan.rows * plan.top_k)
            if rest == 0 and 0 <= layer < layers:
                size.frozen[layer] = node.params
            for name in ("num_rows", "stride", "top_k", "chunk_size", "ctas_per_group", "max_seq_len"):
                planned = plan.rows if name == "num_rows" else getattr(plan, name)
                seen[name] = getattr(actual, name)
                if seen[name] != planned:
                    differences.append(f"{name}: launched {seen[name]}, planned {planned}")
        if seen not in launched:
            launched.append(seen)
    if len(nodes) != layers:
        differences.append(f"{len(nodes)} kernel nodes captured, {layers} layers planned")
    return {"rows": plan.rows, "kernel_nodes": len(nodes), "launched": launched, "differences": sorted(set(differences))}


def wrong_rows(pending: PendingStep, results: memoryview) -> tuple[list[dict[str, Any]], int]:
    """(rows whose chosen set is not the reference's, with layer, row, length and why; how many rows were checked).

    ``results``: the chosen indices of the layers ``pending.check`` in turn, int32 [rows, k] each.
    """
    import numpy as np

    from .reference import check_rows

    plan = pending.size.plan
    layer_words = plan.rows * plan.top_k
    words = np.frombuffer(results, dtype=np.int32)
    lengths = np.array(pending.lengths, dtype=np.int64)
    # Candidates behind the longest row cannot be chosen by a right answer; leaving them out of the reference saves its time.
    longest = max(int(np.clip(lengths, 0, plan.stride).max()), 1)
    wrong: list[dict[str, Any]] = []
    for slot, layer in enumerate(pending.check):
        chosen = words[slot * layer_words : (slot + 1) * layer_words].reshape(plan.rows, plan.top_k)
        logits = pending.size.host_pool[(pending.index + layer % len(pending.size.logits)) % ROTATION]
        wrong.extend(
            {"layer": layer, "row": verdict.row, "length": verdict.length, "why": verdict.text}
            for verdict in check_rows(chosen, logits[:, :longest], lengths, plan.top_k)
            if not verdict.ok
        )
    return wrong, len(pending.check) * plan.rows
