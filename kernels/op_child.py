"""The GPU process of ``--via op``: the launch is made by vLLM's own launcher, ``torch.ops._C.persistent_topk``.

``python -m dsv4_repro.kernels.op_child FD ORDINAL PARENT_PID``. Everything else is ``device``: the same buffers, the same graphs,
captured on the same stream; only the nodes of a layer come from torch's op. What was captured is read back from the graph and held
against the plan (``ready``: ``differences``), which is the check of this package's launch arithmetic by vLLM's own.

Needs torch and either an installed vLLM or the path of a ``_C`` library that this torch can load (vLLM 0.20.2 to 0.26.0 pin torch
2.11.0, 0.27.0 to 0.32.0 2.13.0, 0.33.0 2.14.0). Missing: ToolMissingError.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from ..errors import KernelNotFoundError, ToolMissingError
from .abi import WORKSPACE_BYTES
from .captured_size import CapturedSize
from .device import DeviceWorkload
from .device_child import main as child_main
from .device_records import Setup
from .driver import Driver

__all__ = ["OpWorkload"]


class _Array:
    """Device memory of ours as torch sees it (``__cuda_array_interface__`` version 3)."""

    def __init__(self, address: int, shape: tuple[int, ...], kind: str) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": shape, "typestr": kind, "version": 3, "strides": None}


class OpWorkload(DeviceWorkload):
    """The workload whose layers are launched by torch's op."""

    def _load(self) -> dict[str, int]:
        try:
            import torch
        except ImportError as error:
            raise ToolMissingError(
                f"--via op needs torch: {error}", help_text="Launch the same machine code without torch: --via driver"
            ) from error
        if not torch.cuda.is_available():
            raise ToolMissingError("--via op needs a torch with CUDA; this one says that CUDA is not available")
        self._torch: Any = torch
        self._tensors: dict[tuple[int, tuple[int, ...]], Any] = {}
        library = self._setup.library
        try:
            if library:
                torch.ops.load_library(library)
            else:
                import vllm._C  # noqa: F401
            self._op: Any = torch.ops._C.persistent_topk
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            raise KernelNotFoundError(
                f"torch {torch.__version__} cannot load torch.ops._C.persistent_topk from "
                f"{library or 'the installed vLLM'}: {error}",
                help_text="Launch the same machine code without torch: --via driver",
            ) from error
        device = self._setup.ordinal
        torch.cuda.set_device(device)
        self._torch_stream = torch.cuda.ExternalStream(int(self._stream), device=device)
        self._note(f"torch {torch.__version__}: torch.ops._C.persistent_topk from {library or 'the installed vLLM'}")
        return {}

    def _tensor(self, address: int, shape: tuple[int, ...], kind: str) -> Any:
        key = (address, shape)
        if key not in self._tensors:
            self._tensors[key] = self._torch.as_tensor(_Array(address, shape, kind), device=f"cuda:{self._setup.ordinal}")
        return self._tensors[key]

    def _launch_layer(self, size: CapturedSize, layer: int) -> None:
        plan = size.plan
        with self._torch.cuda.stream(self._torch_stream):
            self._op(
                self._tensor(size.logits[layer % len(size.logits)], (plan.rows, plan.stride), "<f4"),
                self._tensor(size.lengths, (plan.rows,), "<i4"),
                self._tensor(size.outputs + 4 * plan.rows * plan.top_k * layer, (plan.rows, plan.top_k), "<i4"),
                self._tensor(self._workspace, (WORKSPACE_BYTES,), "|u1"),
                plan.top_k,
                plan.max_seq_len,
            )


def _workload(driver: Driver, setup: Setup, note: Callable[[str], None]) -> DeviceWorkload:
    return OpWorkload(driver, setup, note=note)


if __name__ == "__main__":
    status = child_main(sys.argv[1:], _workload)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
