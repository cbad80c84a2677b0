"""/proc, ps, top, and processes that are gone."""

from __future__ import annotations

import pytest

from dsv4_repro.forensics.evidence.gather import read_text


def test_io_status_and_wchan_take_the_pid_from_the_heading() -> None:
    case = read_text(
        "x",
        "=== /proc/512/io, two samples ===\nrchar: 5\nwchar: 1\nrchar: 9\n=== /proc/512/status "
        "===\nName:\tVLLM::Worker\nState:\tD (disk sleep)\nwchan: nfs_wait\n",
    )
    assert [(s.pid, s.rchar) for s in case.procs if s.rchar is not None] == [(512, 5), (512, 9)]
    state = next(s for s in case.procs if s.state)
    assert (state.pid, state.name, state.state) == (512, "VLLM::Worker", "D")
    assert [s.wchan for s in case.procs if s.wchan] == ["nfs_wait"]


def test_file_names_carry_the_pid_too() -> None:
    (sample,) = read_text("proc/512/wchan", "folio_wait_bit_common").procs
    assert sample.wchan == "folio_wait_bit_common"


def test_stat_and_kernel_stack() -> None:
    case = read_text(
        "x",
        "77 (VLLM::EngineCor) R 1 77 77 0 -1 4194304 1 2 3 4 9000 100 5 6 20 0 30 0\n[<0>] uvm_spin_loop+0x20/0x80 "
        "[nvidia_uvm]\n[<0>] do_exit+0x1\n",
    )
    first = next(s for s in case.procs if s.ticks is not None)
    assert (first.pid, first.state, first.ticks) == (77, "R", 9100)
    assert next(s for s in case.procs if s.kernel_stack).kernel_stack == ("uvm_spin_loop", "do_exit")


def test_ps_and_top() -> None:
    case = read_text(
        "x",
        "USER         PID %CPU %MEM    VSZ   RSS TTY      STAT START   TIME COMMAND\n"
        "root          97 99.0  4.8 811111 61111 ?        Rl   10:00  61:02 VLLM::EngineCore\n"
        "root         101  0.0  0.0      0     0 ?        Z    10:00   0:02 [VLLM::Worker_TP] <defunct>\n"
        "root         120 88.0  0.1   9000   900 ?        R    10:00   0:02 /usr/local/cuda/nvvm/bin/cicc --c++17 x.cu\n",
    )
    engine, dead, compiler = case.procs
    assert (engine.pid, engine.cpu, engine.state, engine.table) == (97, 99.0, "R", True)
    assert dead.state == "Z"
    assert compiler.name.startswith("/usr/local/cuda")


@pytest.mark.parametrize(
    "line",
    [
        "ls: cannot access '/proc/44120': No such file or directory",
        "kill: (44120) - No such process",
        "cat: can't open '/proc/44120/status': No such file or directory",
        "process 44120 is gone",
        "pid 44120 is not running",
    ],
)
def test_gone(line: str) -> None:
    (sample,) = read_text("x", line).procs
    assert (sample.pid, sample.gone) == (44120, True)
