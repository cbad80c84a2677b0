"""What a GPU child's answers mean to a run: what it captured, how a step ended, what a release did. Pure.

The messages are those of ``kernels.device_child``; ``channel`` carries them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .ground import StepOutcome, UnwedgeOutcome

__all__ = ["described", "ended_step", "released"]


def described(device: Mapping[str, Any], facts: Mapping[str, Any], layers: int, origin: str) -> str:
    """Card, graphs and kernel in a line, and the first difference from the plan. ``facts``: the answer to ``prepare``."""
    graphs = ", ".join(str(size["rows"]) for size in facts.get("sizes", ()))
    differences = [text for size in facts.get("sizes", ()) for text in size["differences"]]
    description = (
        f"{device['name']} (sm_{device['sm']}, {device['sm_count']} SMs), "
        f"CUDA graphs of {graphs} rows x {layers} layers, "
        f"kernel {origin}"
    )
    if differences:
        description += f"; NOT as planned: {differences[0]}"
    return description


def ended_step(index: int, message: Mapping[str, Any]) -> StepOutcome:
    """The message ``step``: done, wrong (by layer, with the rows) or a fault (what the child wrote to stderr is not in it)."""
    state = str(message["state"])
    milliseconds = float(message["ms"])
    if state == "fault":
        return StepOutcome(index, "fault", milliseconds, int(message.get("layers_done", 0)), (str(message["error"]),))
    wrong = list(message.get("wrong", ()))
    detail: dict[str, Any] = {"rows_checked": message.get("rows_checked", 0)}
    if message.get("padding_wrong"):
        # Rows of padding slots: nobody reads them, so they are told and not judged.
        detail["padding_rows_wrong"] = sorted({int(item["row"]) for item in message["padding_wrong"]})
    if wrong:
        reasons = tuple(f"layer {item['layer']}: {item['why']}" for item in wrong[:20])
        return StepOutcome(index, "wrong", milliseconds, int(wrong[0]["layer"]), reasons, {**detail, "wrong": wrong[:200]})
    return StepOutcome(index, "done", milliseconds, detail=detail)


def released(address: int, value: int, answer: Mapping[str, Any]) -> UnwedgeOutcome:
    """The message ``release``: ``milliseconds`` from the first write to the retirement of the launch that hung."""
    detail = {key: answer[key] for key in ("total_ms", "write_ms", "writes", "layers_ms", "also_groups")}
    result = answer.get("result") or {}
    detail["rows_wrong"] = sorted({int(item["row"]) for item in result.get("wrong", ())})
    detail["padding_rows_wrong"] = sorted({int(item["row"]) for item in result.get("padding_wrong", ())})
    detail["rows_checked"] = result.get("rows_checked", 0)
    return UnwedgeOutcome(
        attempted=int(answer["writes"]) > 0,
        retired=bool(answer["retired"]),
        milliseconds=answer["first_ms"],
        address=address,
        value=value,
        why_not=str(answer["why_not"]),
        detail=detail,
    )
