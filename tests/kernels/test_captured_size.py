"""What a graph holds against what was planned, and what came out against the reference; nodes and results made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from dsv4_repro.kernels.abi import THREADS_PER_CTA
from dsv4_repro.kernels.captured_size import ROTATION, CapturedSize, PendingStep, describe_capture, wrong_rows
from dsv4_repro.kernels.driver import KernelNode
from dsv4_repro.kernels.plan import device_named, plan_launch

LAYERS = 3
PLAN = plan_launch(4, 4096, 4096, 512, device_named("H200"))
OUTPUTS = 0x10000000


def _size() -> CapturedSize:
    random = np.random.default_rng(7)
    pool = [random.standard_normal((PLAN.rows, PLAN.stride), dtype=np.float32) for _ in range(ROTATION)]
    return CapturedSize(plan=PLAN, lengths=0x1000, outputs=OUTPUTS, logits=[1, 2, 3], pool=[4, 5, 6], host_pool=pool)


def _node(layer: int, **changes: Any) -> KernelNode:
    output = OUTPUTS + 4 * PLAN.rows * PLAN.top_k * layer
    params = PLAN.params(input=0x2000, output=output, lengths=0x1000, row_states=0x3000)
    named = {name: changes.pop(name) for name in list(changes) if hasattr(params, name)}
    node = KernelNode((PLAN.grid, 1, 1), (THREADS_PER_CTA, 1, 1), PLAN.dynamic_smem, dataclasses.replace(params, **named).pack())
    return dataclasses.replace(node, **changes)


def test_a_capture_as_planned_has_no_difference_and_its_parameters_are_kept_by_layer() -> None:
    size = _size()
    nodes = [_node(layer) for layer in range(LAYERS)]
    found = describe_capture(size, [*nodes, _node(0, function="another_kernel")], layers=LAYERS)
    assert (found["rows"], found["kernel_nodes"], found["differences"], len(found["launched"])) == (4, LAYERS, [], 1)
    assert found["launched"][0]["stride"] == PLAN.stride
    assert size.frozen == {layer: nodes[layer].params for layer in range(LAYERS)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grid": (PLAN.grid + 1, 1, 1)}, f"launched grid ({PLAN.grid + 1}, 1, 1)"),
        ({"block": (512, 1, 1)}, "block (512, 1, 1)"),
        ({"dynamic_smem": 1}, "1 B; planned"),
        ({"stride": 8192}, f"stride: launched 8192, planned {PLAN.stride}"),
        ({"max_seq_len": 65536}, f"max_seq_len: launched 65536, planned {PLAN.max_seq_len}"),
    ],
)
def test_what_was_captured_otherwise_is_said(changes: dict[str, Any], said: str) -> None:
    (difference,) = describe_capture(_size(), [_node(0, **changes), _node(1), _node(2)], layers=LAYERS)["differences"]
    assert said in difference


def test_a_layer_that_was_not_captured_is_said() -> None:
    found = describe_capture(_size(), [_node(0), _node(1)], layers=LAYERS)
    assert found["differences"] == ["2 kernel nodes captured, 3 layers planned"]


def test_rows_are_held_against_the_logits_that_their_layer_read() -> None:
    size = _size()
    lengths = [4096, 700, 100, -1]
    step = PendingStep(5, size, lengths, [0, 2], 4, 0.0)
    answer = np.full((2, PLAN.rows, PLAN.top_k), -1, np.int32)
    for slot, layer in enumerate(step.check):
        logits = size.host_pool[(step.index + layer) % ROTATION]
        for row, length in enumerate(lengths):
            chosen = np.argsort(logits[row, : max(length, 0)])[::-1][: PLAN.top_k]
            answer[slot, row, : len(chosen)] = chosen
    assert wrong_rows(step, memoryview(answer.tobytes())) == ([], 8)
    answer[1, 1, 0] = answer[1, 1, 1]
    (wrong,), checked = wrong_rows(step, memoryview(answer.tobytes()))
    assert (wrong["layer"], wrong["row"], wrong["length"], checked) == (2, 1, 700, 8)
    assert wrong["why"]
