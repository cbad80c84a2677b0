"""The operating system's log."""

from __future__ import annotations

import pytest

from dsv4_repro.forensics.evidence.gather import read_text


def test_xid_spellings() -> None:
    case = read_text(
        "dmesg",
        "[90211.113] NVRM: Xid (PCI:0000:c1:00): 31, pid=2200, name=VLLM::EngineCor, channel 0x0a. MMU Fault: x "
        "ACCESS_TYPE_VIRT_WRITE\n"
        "[90211.114] NVRM: Xid (PCI:0000:c1:00): 31, Ch 0000002c, intr 10000000. MMU Fault\n"
        "[90211.115] NVRM: Xid (0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "Nov 28 09:00:00 h kernel: nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 33\n",
    )
    xids = [e for e in case.kernel if e.kind == "xid"]
    assert [e.number for e in xids] == [31, 31, 79]
    assert (xids[0].pid, xids[0].name, xids[0].pci) == (2200, "VLLM::EngineCor", "0000:c1:00")
    assert xids[1].pid is None
    assert [e.kind for e in case.kernel if e.kind == "sxid"] == ["sxid"]
    assert case.kernel_log_seen


@pytest.mark.parametrize(
    "line",
    [
        "Out of memory: Killed process 712 (VLLM::Worker_TP) total-vm:9kB",
        "Memory cgroup out of memory: Killed process 712 (VLLM::Worker_TP) total-vm:9kB",
        "Out of memory: Kill process 712 (VLLM::Worker_TP) score 900 or sacrifice child",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task_memcg=/x,task=VLLM::Worker_TP,pid=712,uid=0",
    ],
)
def test_oom(line: str) -> None:
    (event,) = read_text("k", f"[ 12.0] {line}\n").kernel
    assert (event.kind, event.pid, event.name) == ("oom-kill", 712, "VLLM::Worker_TP")


def test_others() -> None:
    case = read_text(
        "k",
        "[1.0] INFO: task VLLM::Worker_TP:4101 blocked for more than 122 seconds.\n"
        "[2.0] VLLM::Worker_TP[88213]: segfault at 18 ip 00007f sp 00007f error 4 in libtorch.so\n"
        "[3.0] mlx5_core 0000:17:00.0: Link down\n"
        "[4.0] usb 1-1: new device\n",
    )
    assert [(e.kind, e.pid) for e in case.kernel] == [("hung-task", 4101), ("segfault", 88213), ("link", None)]


def test_a_refused_dmesg_is_not_a_clean_one() -> None:
    case = read_text("x", "=== dmesg ===\ndmesg: read kernel buffer failed: Operation not permitted\n")
    assert not case.kernel_log_seen
    assert [f.what for f in case.failures] == ["kernel log"]
