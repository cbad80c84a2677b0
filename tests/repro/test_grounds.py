"""Which ground a run takes, and what is said where one cannot be had."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from dsv4_repro import errors
from dsv4_repro.errors import DeadlineError, NoDeviceError, NoDriverError, UnavailableError, UsageError
from dsv4_repro.repro import device_probe, grounds
from dsv4_repro.repro.grounds import GROUNDS, choose_ground, make_ground, require_ground
from dsv4_repro.repro.options import PlanFlags, RunFlags
from dsv4_repro.scenarios.drain import DrainPlan

EVERYTHING = {"gpu": "yes", "cpu": "yes", "server": "yes"}


@pytest.mark.parametrize(
    ("asked", "here", "given", "ground"),
    [
        (None, {}, {}, "gpu"),
        (None, {"gpu": "no NVIDIA driver"}, {}, "cpu"),
        (None, {}, {"model": "m"}, "server"),
        (None, {"server": "needs vLLM"}, {"model": "m"}, "gpu"),
        (None, {"server": "needs vLLM"}, {"url": "http://x"}, "server"),
        (None, {"server": "not in this release"}, {"url": "http://x"}, "gpu"),
        ("cpu", {}, {"model": "m"}, "cpu"),
        ("gpu", {"gpu": "no GPU"}, {}, "gpu"),
    ],
)
def test_the_default(
    asked: str | None, here: dict[str, str], given: dict[str, str], ground: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(grounds.MODEL_VARIABLE, raising=False)
    chosen, why = choose_ground(asked, {**EVERYTHING, **here}, model=given.get("model"), url=given.get("url"))
    assert chosen == ground
    assert why


def test_a_model_in_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(grounds.MODEL_VARIABLE, "/models/x")
    assert choose_ground(None, EVERYTHING)[0] == "server"


def test_the_reason_for_the_cpu_is_what_the_gpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(grounds.MODEL_VARIABLE, raising=False)
    assert choose_ground(None, {**EVERYTHING, "gpu": "every GPU is in use (--share)"})[1] == "gpu: every GPU is in use (--share)"


def test_unknown_grounds_are_refused_and_missing_ones_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="moon"):
        choose_ground("moon", EVERYTHING)
    with pytest.raises(UsageError):
        require_ground("moon")
    monkeypatch.setattr(grounds, "_installed", lambda _name: False)
    with pytest.raises(UnavailableError, match="no cpu ground"):
        make_ground("cpu")


@pytest.mark.parametrize("name", sorted(GROUNDS))
def test_every_ground_that_is_here_can_be_made_and_knows_its_name(name: str) -> None:
    if not grounds._installed(name):
        pytest.skip(f"this release has no {name} ground")
    ground = make_ground(name)
    assert ground.name == name
    for method in ("open", "run_step", "capture", "unwedge", "close"):
        assert callable(getattr(ground, method))


def test_plan_flags_are_the_fields_of_the_plan() -> None:
    assert set(PlanFlags.__dataclass_fields__) - {"plan"} == set(DrainPlan.model_fields) - {"seed", "top_k"}
    assert RunFlags().dump is True


H200 = {
    "name": "NVIDIA H200", "sm": 90, "sm_count": 132, "smem_per_sm": 233472, "smem_optin": 232448, "threads_per_sm": 2048,
    "driver_version": 13000,
}  # fmt: skip


def _answers(monkeypatch: pytest.MonkeyPatch, stdout: bytes, status: int = 0, stderr: bytes = b"") -> None:
    done = subprocess.CompletedProcess([], status, stdout, stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_a, **_k: done)


def test_the_drivers_answer_becomes_a_description(monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(monkeypatch, b"noise of a library\n" + json.dumps(H200).encode() + b"\n")
    device = device_probe.describe_gpu(0)
    assert (device.name, device.sm, device.num_sms, device.smem_optin) == ("NVIDIA H200", 90, 132, 232448)
    assert "driver" in device.source


@pytest.mark.parametrize(
    ("kind", "expected"), [("NoDriverError", NoDriverError), ("NoDeviceError", NoDeviceError), ("OSError", NoDeviceError)]
)
def test_the_drivers_error_keeps_its_type(monkeypatch: pytest.MonkeyPatch, kind: str, expected: type[errors.ReproError]) -> None:
    _answers(monkeypatch, json.dumps({"error": kind, "message": "no"}).encode())
    with pytest.raises(expected, match="no"):
        device_probe.describe_gpu(0)


@pytest.mark.parametrize("stdout", [b"", b"\n", b"crash", b"[1"])
def test_a_probe_that_dies_is_typed(monkeypatch: pytest.MonkeyPatch, stdout: bytes) -> None:
    _answers(monkeypatch, stdout, -11, b"Segmentation fault")
    with pytest.raises(NoDeviceError, match=r"status -11.*Segmentation fault"):
        device_probe.describe_gpu(1)


def test_a_driver_that_does_not_answer_is_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_arguments: Any, **_more: Any) -> Any:
        raise subprocess.TimeoutExpired("x", 1)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(DeadlineError, match="wedged"):
        device_probe.describe_gpu(0)


def test_on_this_machine_the_probe_answers_or_says_that_there_is_no_driver() -> None:
    try:
        device = device_probe.describe_gpu(0)
    except (NoDriverError, NoDeviceError) as error:
        pytest.skip(f"no GPU: {error}")
    assert device.num_sms > 0


def test_who_names_a_model_and_gets_another_ground_is_told_why() -> None:
    here = {"server": "needs vLLM and a GPU, or --url", "gpu": "no NVIDIA driver", "cpu": "yes"}
    assert choose_ground(None, here, model="dummy") == ("cpu", "server: needs vLLM and a GPU, or --url; gpu: no NVIDIA driver")
    assert choose_ground(None, {**here, "gpu": "yes"}, model="dummy")[1].startswith("server: needs vLLM")
    assert choose_ground(None, here) == ("cpu", "gpu: no NVIDIA driver")
