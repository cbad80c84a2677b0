"""The parts of the GPU process that need no GPU: records, refusals before anything is started, and the missing driver."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest

from dsv4_repro.errors import KernelNotFoundError, NoDeviceError, NoDriverError, PlanError
from dsv4_repro.kernels.abi import ROW_STATE_SIZE
from dsv4_repro.kernels.device import DeviceWorkload
from dsv4_repro.kernels.device_child import setup_of
from dsv4_repro.kernels.device_records import Setup, counters_of, launch_document, launch_of
from dsv4_repro.kernels.driver import CudaCallError, Driver, _typed
from dsv4_repro.kernels.plan import device_named, plan_launch
from dsv4_repro.repro.child import package_path

H200 = device_named("H200")
PLAN = plan_launch(8, 16384, 16384, 512, H200)


def test_a_launch_survives_its_way_to_the_child() -> None:
    assert launch_of(json.loads(json.dumps(launch_document(PLAN)))) == PLAN


def test_a_set_up_message_is_read_back() -> None:
    message = {
        "function": "f", "top_k": 512, "layers": 21, "seed": 3, "ordinal": 1,
        "launches": {"8": launch_document(PLAN)}, "library": "x",
    }  # fmt: skip
    setup = setup_of(json.loads(json.dumps(message)))
    assert (setup.function, setup.layers, setup.seed, setup.ordinal, setup.cubin, setup.library) == ("f", 21, 3, 1, b"", "x")
    assert setup.launches == {8: PLAN}


def test_counters_of_raw_row_states() -> None:
    raw = bytearray(3 * ROW_STATE_SIZE + 100)
    struct.pack_into("<IIii", raw, ROW_STATE_SIZE + 3072, 512, 0xABCD, 1, -7)
    assert counters_of(bytes(raw)) == [
        {"arrival": 0, "output": 0, "remaining_k": 0, "prefix": 0},
        {"arrival": 1, "output": -7, "remaining_k": 512, "prefix": 0xABCD},
        {"arrival": 0, "output": 0, "remaining_k": 0, "prefix": 0},
    ]
    assert counters_of(b"") == []


@pytest.mark.parametrize(
    ("launches", "layers", "text"), [({}, 1, "no launch to capture"), ({8: PLAN}, 0, "layers must be at least 1")]
)
def test_nonsense_is_refused_before_anything_is_started(launches: dict[int, object], layers: int, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        DeviceWorkload(None, Setup("f", 512, layers, 0, 0, launches))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        ("cuInit", "CUDA_ERROR_NO_DEVICE", NoDeviceError),
        ("cuInit", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", NoDriverError),
        ("cuModuleLoadData", "CUDA_ERROR_NO_BINARY_FOR_GPU", KernelNotFoundError),
        ("cuModuleGetFunction", "CUDA_ERROR_NOT_FOUND", KernelNotFoundError),
        ("cuEventQuery", "CUDA_ERROR_LAUNCH_FAILED", CudaCallError),
        ("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", CudaCallError),
    ],
)
def test_every_status_is_a_typed_error(call: str, code: str, kind: type[Exception]) -> None:
    error = _typed(call, code)
    assert type(error) is kind
    assert call in str(error)
    assert code in str(error)


def test_only_faults_lose_the_context() -> None:
    assert CudaCallError("cuEventQuery", "CUDA_ERROR_ILLEGAL_ADDRESS").sticky
    assert not CudaCallError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY").sticky


def test_importing_needs_no_driver_and_no_bindings() -> None:
    """In a process of its own, so that nothing that this one imported counts."""
    modules = ["driver", "device", "device_child", "op_child", "channel"]
    code = "import sys; " + "; ".join(f"import dsv4_repro.kernels.{name}" for name in modules) + "; print('cuda' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": package_path()}, check=True
    )
    assert done.stdout.strip() == "False"


def test_the_driver_of_this_machine_answers_or_is_missing() -> None:
    try:
        count = Driver().init()
    except (NoDriverError, NoDeviceError) as error:
        count, remedy = 0, error.help_text
        if "--on cpu" not in remedy and "pip install" not in remedy:
            pytest.fail(f"no remedy in {remedy!r}")
    else:
        assert count >= 1
