"""Doctor's judgements over made-up machines, and over this one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.doctor import Check, checks, doctor_lines, report
from dsv4_repro.repro.leftovers import Leftover
from dsv4_repro.repro.machine import Disk, Gpu, Machine, Tool, probe_machine

GIB = 1 << 30


def _machine(**more: Any) -> Machine:
    values: dict[str, Any] = {
        "system": "Linux x86_64", "kernel": "6.8", "wsl": False, "python": "3.12.1", "uid": 1000, "driver": "580.159.04",
        "cuda_driver": "13.0", "libcuda": True, "gpus": (Gpu(0, "NVIDIA H200", 90, 150 * GIB, ()),),
        "packages": {"nvidia-cuda-nvrtc": "13.0", "vllm": "0.27.1", "torch": "2.13.0"},
        "tools": {name: Tool(name, f"/usr/bin/{name}", f"{name} 13.0") for name in ("nvdisasm", "cuobjdump", "cuda-gdb", "py-spy")},
        "ptrace_scope": 0, "capabilities": frozenset(), "no_new_privs": False, "seccomp": 0, "dmesg": True, "dmesg_why": "",
        "hidepid": None, "container": None, "read_only_root": False, "cpus": 16.0, "memory_bytes": 64 * GIB, "pids_limit": None,
        "core_pipe": True, "disks": (Disk("runs", "/home/u/runs", 100 * GIB, True),),
    }  # fmt: skip
    return Machine(**{**values, **more})


def _check(machine: Machine, name: str) -> Check:
    return next(check for check in checks(machine) if check.id == name)


def test_a_machine_that_has_everything() -> None:
    assert {check.state for check in checks(_machine())} == {"yes"}


def test_a_machine_that_has_nothing_says_what_to_do_about_each() -> None:
    bare = _machine(
        driver=None, cuda_driver=None, gpus=None, libcuda=False, packages={}, ptrace_scope=3, dmesg=False, dmesg_why="denied",
        tools={name: Tool(name, None, None, "not found") for name in ("nvdisasm", "cuobjdump", "cuda-gdb", "py-spy")},
        container="docker", core_pipe=False, disks=(Disk("runs", "/r", None, False),), memory_bytes=GIB, pids_limit=20,
        read_only_root=True, hidepid="2", unread=(Unread("GPUs", "NVML: library not found"),),
    )  # fmt: skip
    for check in checks(bare):
        assert check.state != "yes"
        assert check.remedy, check.id
    assert _check(bare, "driver").found == "NVML: library not found"
    assert "--gpus all" in _check(bare, "driver").remedy


@pytest.mark.parametrize(
    ("facts", "name", "state"),
    [
        ({"ptrace_scope": 0}, "ptrace", "yes"),
        ({"ptrace_scope": 1}, "ptrace", "limited"),
        ({"ptrace_scope": 2}, "ptrace", "no"),
        ({"ptrace_scope": 3}, "ptrace", "no"),
        ({"ptrace_scope": 3, "capabilities": frozenset({"CAP_SYS_PTRACE"})}, "ptrace", "yes"),
        ({"ptrace_scope": None}, "ptrace", "yes"),
        ({"ptrace_scope": None, "container": "docker", "seccomp": 2}, "ptrace", "unknown"),
        ({"wsl": True}, "core-dump", "no"),
        ({"core_pipe": False}, "core-dump", "no"),
        ({"wsl": True}, "cuda-gdb", "limited"),
        ({"hidepid": "2"}, "proc", "limited"),
        ({"hidepid": "2", "uid": 0}, "proc", "yes"),
        ({"container": "kubernetes"}, "proc", "limited"),
        ({"gpus": ()}, "gpus", "no"),
        ({"gpus": (Gpu(0, "x", 90, 1, (77,)),)}, "gpu-0-free", "limited"),
        ({"gpus": (Gpu(0, "x", 90, 1, None),)}, "gpu-0-free", "unknown"),
        ({"gpus": (Gpu(0, "x", 90, 1, (), display=True),)}, "gpu-0-free", "limited"),
        ({"disks": (Disk("runs", "/r", 1 << 20, True),)}, "disk-runs", "limited"),
        ({"disks": (Disk("runs", "/r", None, True),)}, "disk-runs", "unknown"),
        ({"pids_limit": 20}, "limits", "limited"),
        ({"memory_bytes": None}, "limits", "yes"),
        ({"packages": {}}, "nvrtc", "no"),
    ],
)
def test_each_judgement(facts: dict[str, Any], name: str, state: str) -> None:
    check = _check(_machine(**facts), name)
    assert check.state == state
    assert check.remedy or state == "yes"


def test_a_tool_that_does_not_answer_is_limited_not_there() -> None:
    machine = _machine()
    machine = dataclasses.replace(machine, tools={**machine.tools, "nvdisasm": Tool("nvdisasm", "/x", None, "does not answer")})
    assert _check(machine, "nvdisasm").state == "limited"


def test_lines_fit_80_columns_and_name_leftovers() -> None:
    leftover = Leftover(4242, 1.0, "/runs/drain/x", "python -m child")
    lines = doctor_lines(report(_machine(driver=None, gpus=None), [leftover]))
    assert all(len(line) <= 80 for line in lines)
    assert any("4242" in line for line in lines)
    assert "End them: dsv4-repro doctor --clean" in lines
    cleaned = doctor_lines(report(_machine(), [leftover], {4242: "killed"}))
    assert any("killed" in line for line in cleaned)


def test_on_this_machine_every_fact_is_gathered_without_an_error(tmp_path: Path) -> None:
    machine = probe_machine(runs=tmp_path, cache=tmp_path / "cache", version=lambda argv: "tool 1.0")
    assert machine.system.startswith("Linux")
    assert machine.cpus > 0
    assert machine.packages["numpy"]
    assert machine.gpus is not None or machine.unread
    assert not (tmp_path / "cache").exists(), "looking changes nothing"


def test_the_verb_answers_in_json_and_always_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["schema"] == "dsv4-repro/doctor/1"
    assert {check["id"] for check in document["checks"]} >= {"driver", "ptrace", "nvdisasm", "dmesg", "disk-runs"}
    assert set(document["grounds"]) == {"gpu", "cpu", "server"}
    assert "talk to an NVIDIA driver" in captured.err
