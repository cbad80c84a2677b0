"""NVML and GPM through a stand-in binding: values, and what is said when one cannot be read."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import NoDeviceError, NoDriverError, UnavailableError
from dsv4_repro.forensics.collect.gpm import METRICS, Gpm
from dsv4_repro.forensics.collect.nvml import Nvml, SampleThread
from dsv4_repro.repro.gpu_card import GpuCard


class FakeNvml:
    """The functions used, on one card. ``broken``: names that raise."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_GPM_METRICS_GET_VERSION = 1, 2, 1

    class NVMLError(Exception):
        pass

    def __init__(self, *broken: str, gpm: dict[int, tuple[int, float]] | None = None, processes: tuple[Any, ...] = ()) -> None:
        self.broken = broken
        self.gpm = gpm or {1: (0, 100.0), 2: (0, 0.758), 3: (0, 0.38), 10: (0, 0.0)}
        self.running = processes

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "broken"):

            def refuse(*_arguments: Any) -> Any:
                raise FakeNvml.NVMLError("Not Supported")

            return refuse
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index:
            raise self.NVMLError("Invalid Argument")
        return "card"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return "card"

    def nvmlDeviceGetIndex(self, card: str) -> int:
        return 0

    def nvmlDeviceGetName(self, card: str) -> bytes:
        return b"Fake GPU"

    def nvmlDeviceGetUUID(self, card: str) -> str:
        return "GPU-01020304"

    def nvmlDeviceGetPciInfo(self, card: str) -> Any:
        return SimpleNamespace(busId=b"00000000:06:00.0")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlSystemGetNVMLVersion(self) -> str:
        return "13.580"

    def nvmlDeviceGetCudaComputeCapability(self, card: str) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetMemoryInfo(self, card: str) -> Any:
        return SimpleNamespace(total=1 << 37, used=1 << 29)

    def nvmlDeviceGetMigMode(self, card: str) -> list[int]:
        return [0, 0]

    def nvmlDeviceGetUtilizationRates(self, card: str) -> Any:
        return SimpleNamespace(gpu=100, memory=0)

    def nvmlDeviceGetPowerUsage(self, card: str) -> int:
        return 123456

    def nvmlDeviceGetClockInfo(self, card: str, kind: int) -> int:
        return 1980 if kind == 1 else 3201

    def nvmlDeviceGetComputeRunningProcesses(self, card: str) -> list[Any]:
        return list(self.running)

    def nvmlGpmQueryDeviceSupport(self, card: str) -> Any:
        return SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self) -> object:
        return object()

    def nvmlGpmSampleGet(self, card: str, sample: object) -> object:
        return sample

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(98)])

    def nvmlGpmMetricsGet(self, question: Any) -> Any:
        for metric in question.metrics[: question.numMetrics]:
            metric.nvmlReturn, metric.value = self.gpm[metric.metricId]
        return question


def card(module: FakeNvml) -> Any:
    return Nvml(module).by_index(0)


def test_a_sample_holds_what_the_card_says() -> None:
    holder = SimpleNamespace(pid=816, usedGpuMemory=None)
    sample = card(FakeNvml(processes=(holder,))).sample(processes=True, clock=FakeClock(5.0))
    assert (sample.at, sample.utilisation, sample.memory_utilisation, sample.power_w) == (5.0, 100, 0, 123.456)
    assert (sample.sm_clock_mhz, sample.memory_clock_mhz, sample.memory_used, sample.unread) == (1980, 3201, 1 << 29, ())
    assert [(process.pid, process.memory) for process in sample.processes] == [(816, None)]
    assert sample.line() == "GPU 100 %, memory 0 %, 123 W, 1980 MHz"


@pytest.mark.parametrize(
    ("broken", "fields", "named"),
    [
        ("nvmlDeviceGetUtilizationRates", ("utilisation", "memory_utilisation"), "NVML utilisation"),
        ("nvmlDeviceGetPowerUsage", ("power_w",), "NVML power"),
        ("nvmlDeviceGetMemoryInfo", ("memory_used",), "NVML memory"),
        ("nvmlDeviceGetClockInfo", ("sm_clock_mhz", "memory_clock_mhz"), "NVML SM clock"),
        ("nvmlDeviceGetComputeRunningProcesses", ("processes",), "NVML compute processes"),
    ],
)
def test_what_cannot_be_read_is_none_and_named_never_zero_or_empty(broken: str, fields: tuple[str, ...], named: str) -> None:
    sample = card(FakeNvml(broken)).sample(processes=True)
    for field in fields:
        assert getattr(sample, field) is None
    assert named in [item.what for item in sample.unread]
    assert all(item.why and item.remedy for item in sample.unread)
    assert "0 W" not in sample.line()


def test_a_binding_older_than_a_call_counts_as_unread() -> None:
    module = FakeNvml()
    FakeNvml.nvmlDeviceGetUUID, kept = property(), FakeNvml.nvmlDeviceGetUUID  # type: ignore[assignment, method-assign]
    try:
        identity = card(module).identity()
    finally:
        FakeNvml.nvmlDeviceGetUUID = kept  # type: ignore[method-assign]
    assert identity.uuid is None
    assert identity.name == "Fake GPU"
    assert [item.remedy for item in identity.unread if "UUID" in item.what] == ["pip install -U nvidia-ml-py"]


def test_identity_and_mig() -> None:
    identity = card(FakeNvml()).identity()
    assert (identity.name, identity.sm, identity.driver, identity.mig) == ("Fake GPU", 90, "580.159.04", False)
    assert card(FakeNvml("nvmlDeviceGetMigMode")).identity().mig is False, "'not supported' is the answer no"


def test_no_library_no_card() -> None:
    with pytest.raises(NoDriverError, match="does not start"):
        Nvml(FakeNvml("nvmlInit"))
    with pytest.raises(NoDeviceError, match="index 3"):
        Nvml(FakeNvml()).by_index(3)
    with pytest.raises(NoDeviceError):
        Nvml(FakeNvml("nvmlDeviceGetCount")).count()


def test_the_real_binding_without_a_driver_says_so() -> None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        with pytest.raises(NoDriverError):
            Nvml()
    else:
        assert Nvml().count() >= 0


def test_gpm_between_two_looks() -> None:
    clock = FakeClock()
    gpm = Gpm(card(FakeNvml()), clock)
    clock.advance(0.05)
    assert gpm.look() is None, "too soon"
    clock.advance(0.1)
    sample = gpm.look()
    assert sample is not None
    assert sample.begin == 0.0
    assert sample.end == pytest.approx(0.15)
    assert (sample.graphics_util, sample.sm_util, sample.sm_occupancy, sample.dram_bw_util) == (100.0, 0.758, 0.38, 0.0)
    assert sample.line(132) == "SM_UTIL 0.76 % (about 1.0 of 132 SMs), SM_OCCUPANCY 0.38 %, DRAM 0.00 %, graphics 100 %"
    clock.advance(0.2)
    again = gpm.look()
    assert again is not None
    assert again.begin == pytest.approx(0.15)


def test_gpm_metrics_fail_one_by_one() -> None:
    clock = FakeClock()
    gpm = Gpm(card(FakeNvml(gpm={1: (0, 100.0), 2: (3, 0.0), 3: (0, float("nan")), 10: (0, 0.0)})), clock)
    clock.advance(1)
    sample = gpm.look()
    assert sample is not None
    assert (sample.sm_util, sample.sm_occupancy, sample.graphics_util) == (None, None, 100.0)
    assert [item.what for item in sample.unread] == ["GPM sm_util", "GPM sm_occupancy"]
    assert set(METRICS) == {"graphics_util", "sm_util", "sm_occupancy", "dram_bw_util"}


@pytest.mark.parametrize("broken", ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet"])
def test_a_card_without_gpm_is_a_typed_answer(broken: str) -> None:
    with pytest.raises(UnavailableError, match="GPM"):
        Gpm(card(FakeNvml(broken)))


def test_gpm_that_fails_later_is_unread_and_does_not_raise() -> None:
    clock = FakeClock()
    module = FakeNvml()
    gpm = Gpm(card(module), clock)
    module.broken = ("nvmlGpmMetricsGet",)
    clock.advance(1)
    sample = gpm.look()
    assert sample is not None
    assert sample.sm_util is None
    assert sample.unread


def test_the_sampling_thread_keeps_the_latest_and_its_failure() -> None:
    looked = threading.Event()
    numbers = iter(range(1000))

    def look() -> int:
        number = next(numbers)
        if number == 3:
            looked.set()
            raise RuntimeError("driver gone")
        return number

    thread = SampleThread(look, period_s=0.001)
    thread.start()
    assert looked.wait(5)
    assert thread.stop()
    assert thread.latest == 2
    assert thread.failure == "RuntimeError: driver gone"


def test_a_look_that_never_returns_does_not_hold_the_caller() -> None:
    release = threading.Event()
    thread = SampleThread(lambda: release.wait(30), period_s=0.001)
    thread.start()
    assert not thread.stop(0.05)
    release.set()


class SlowGpm(FakeNvml):
    """GPM calls wait for ``go`` and count how many are inside at once."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.entered, self.inside, self.most = threading.Event(), threading.Event(), 0, 0
        self.slow = False

    def nvmlGpmSampleGet(self, card: str, sample: object) -> object:
        self.inside += 1
        self.most = max(self.most, self.inside)
        if self.slow:
            self.entered.set()
            assert self.go.wait(10.0)
        self.inside -= 1
        return sample


def test_no_two_threads_are_in_the_same_samples_of_gpm() -> None:
    """NVML writes into them: two at once ended the process."""
    clock, module = FakeClock(), SlowGpm()
    gpm = Gpm(card(module), clock)
    module.slow = True
    clock.sleep(1.0)
    thread = threading.Thread(target=gpm.look)
    thread.start()
    assert module.entered.wait(10.0)
    assert gpm.look() is None
    module.go.set()
    thread.join(10.0)
    assert module.most == 1
    clock.sleep(1.0)
    assert gpm.look() is not None


def test_no_two_objects_are_in_a_call_of_gpm_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second child, for a core dump, is opened and looked at while the first one's card still is: two objects, one driver."""
    monkeypatch.setattr("dsv4_repro.forensics.collect.gpm._OPEN_WAIT_S", 0.05)
    clock, module = FakeClock(), SlowGpm()
    first, second = Gpm(card(module), clock), Gpm(card(module), clock)
    module.slow = True
    clock.sleep(1.0)
    thread = threading.Thread(target=first.look)
    thread.start()
    assert module.entered.wait(10.0)
    assert second.look() is None
    with pytest.raises(UnavailableError, match="another thread"):
        Gpm(card(module), clock)
    module.go.set()
    thread.join(10.0)
    assert module.most == 1
    clock.sleep(1.0)
    assert second.look() is not None
    assert Gpm(card(module), clock).look() is None


def test_what_gpm_lacks_leaves_it_open_to_others() -> None:
    class OldBinding(FakeNvml):
        @property
        def nvmlGpmSampleGet(self) -> Any:
            raise AttributeError("old binding")

    clock = FakeClock()
    for _ in range(2):
        with pytest.raises(UnavailableError, match="the binding lacks it"):
            Gpm(card(OldBinding()), clock)
    assert Gpm(card(FakeNvml()), clock).look() is None


def test_a_look_at_a_card_that_never_returns_is_said_at_the_end() -> None:
    module, release, inside = FakeNvml(), threading.Event(), threading.Event()
    held = GpuCard(lambda: Nvml(module))
    held.look("GPU-01020304", 1, share=True)
    assert held.device is not None

    def stuck(*_arguments: Any, **_more: Any) -> Any:
        inside.set()
        assert release.wait(30)

    held.device.sample = stuck  # type: ignore[method-assign]
    held.start_sampling()
    assert inside.wait(10)
    assert "has not come back" in held.stop_sampling()
    assert held.stop_sampling() == ""
    release.set()


def test_a_card_is_looked_at_by_one_thread_however_often_it_is_opened() -> None:
    """By its object; a second child has another one."""
    module = FakeNvml()
    held = GpuCard(lambda: Nvml(module))
    held.look("GPU-01020304", 1, share=True)
    try:
        for _ in range(3):
            held.start_sampling()
            running = [thread for thread in threading.enumerate() if thread.name == "dsv4-repro-sampler" and thread.is_alive()]
            assert len(running) == 1
    finally:
        held.stop_sampling()
    assert not [thread for thread in threading.enumerate() if thread.name == "dsv4-repro-sampler"]
