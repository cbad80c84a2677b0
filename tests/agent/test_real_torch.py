"""What is taken from torch, with the real one (on the CPU); skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from dsv4_repro_agent import guard as guard_module
from dsv4_repro_agent.guard import Guard, load_clamp
from dsv4_repro_agent.hooks import Hooks
from dsv4_repro_agent.recorder import Recorder
from dsv4_repro_agent.ring import Ring
from dsv4_repro_agent.said import Said

torch: Any = pytest.importorskip("torch")
SCHEMA = "(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int max_seq_len) -> ()"


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    """An op of the server's name and schema, implemented here: it fills the output with 7."""
    one = torch.library.Library("_C", "FRAGMENT")
    one.define("persistent_topk" + SCHEMA)

    def fill(logits: Any, lengths: Any, output: Any, workspace: Any, k: int, max_seq_len: int) -> None:
        output.fill_(7)

    one.impl("persistent_topk", fill, "CPU")
    yield one
    one._destroy()


def no_ring(runner: Any) -> Ring:
    raise AssertionError("no step is begun here")


def test_the_op_of_a_real_torch_is_wrapped_and_runs_unchanged(library: Any) -> None:
    said = Said()
    hooks = Hooks(said, Recorder(said, no_ring, lambda: None), Guard(said, wanted=False), row_states=True)
    before = torch.ops._C.persistent_topk
    try:
        hooks.wrap_op()
        hooks.wrap_op()
        assert torch.ops._C.persistent_topk is not before
        assert torch.ops._C.persistent_topk.default is before.default
        logits, lengths = torch.zeros(8, 100), torch.zeros(4, 2, dtype=torch.int32)
        output, workspace = torch.zeros(8, 512, dtype=torch.int32), torch.zeros(1 << 20, dtype=torch.uint8)
        torch.ops._C.persistent_topk(logits, lengths, output, workspace, 512, 100)
        assert int(output.min()) == 7
        (launch,) = hooks.launches.values()
        assert (launch.workspace, launch.lengths) == (workspace.data_ptr(), lengths.data_ptr())
        assert (launch.rows, launch.width, launch.top_k, launch.max_seq_len) == (8, 100, 512, 100)
        assert (launch.workspace_size, launch.captured, launch.groups) == (1 << 20, False, 8)
        for more in range(1, 400):
            torch.ops._C.persistent_topk(logits, torch.zeros(8, dtype=torch.int32)[: more % 8 + 1], output, workspace, 512, 100)
        assert len(hooks.launches) <= 256
    finally:
        torch.ops._C.persistent_topk = before


def test_decode_lengths_are_read_from_a_real_tensor() -> None:
    said = Said()
    recorder = Recorder(said, no_ring, lambda: None)
    from dsv4_repro_agent.ring import Step

    recorder._local.step = Step(1)
    recorder.decode(torch.tensor([2, 2, 2, 0], dtype=torch.int32), next_n=2, native=True, guarded=False)
    step = recorder.current
    assert step is not None
    assert (step.decode_min, step.decode_max, step.decode_slots, step.decode_zero, step.next_n) == (0, 2, 4, 1, 2)


def test_no_cuda_is_said_once_and_nothing_is_recorded_on_a_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    from dsv4_repro_agent.ring import Step

    said = Said()
    recorder = Recorder(said, no_ring, lambda: None)
    assert recorder._record_event(Step(1)) is None
    assert "no CUDA" in said.features["events"]["why"]


@pytest.mark.parametrize("layout", ["whole", "offset", "columns", "every other", "empty", "scalar"])
def test_the_clamps_kernel_is_run_on_memory_of_its_own(layout: str) -> None:
    """Laid out as the lengths, which keep what they hold."""
    base = torch.arange(-20, 44, dtype=torch.int32)
    lengths = {
        "whole": base, "offset": base[3:11], "columns": base.view(8, 8)[:, :2], "every other": base[1::2], "empty": base[:0],
        "scalar": base[5],
    }[layout]  # fmt: skip
    before = base.clone()
    load_clamp(lengths)
    assert torch.equal(base, before)


class OnDevice:
    """A tensor that says it is on a GPU."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.device = torch.device("cuda", 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@pytest.mark.parametrize(("needed", "capturing", "loads"), [(True, False, 2), (True, True, 0), (False, False, 0), (None, False, 0)])
def test_the_clamp_is_loaded_once_for_each_layout_before_it_is_armed(
    needed: bool | None, capturing: bool, loads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel's first launch waits for the device: armed first in a wedge it would block the driver, and the rescue with it."""
    loaded: list[Any] = []
    monkeypatch.setattr(guard_module, "load_clamp", loaded.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    guard = Guard(Said(), wanted=False)
    guard.needed = needed
    base = torch.tensor([-1] * 16, dtype=torch.int32)
    for lengths in (base, base, base[1:], base[1:]):
        assert not guard.apply((OnDevice(lengths),), torch.zeros(4, dtype=torch.int32))
    assert len(loaded) == loads
    assert int(base.max()) == -1
