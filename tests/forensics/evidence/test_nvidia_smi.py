"""Readings of GPUs in every form nvidia-smi writes."""

from __future__ import annotations

from dsv4_repro.forensics.evidence.facts import GpuSample
from dsv4_repro.forensics.evidence.gather import read_text


def gpus(text: str) -> list[GpuSample]:
    return read_text("smi.txt", text).gpus


def test_csv_with_header_any_order_of_columns() -> None:
    (a, b) = gpus(
        "power.draw [W], timestamp, utilization.memory [%], index, utilization.gpu [%], power.limit [W]\n"
        "318.44 W, 2026/11/28 09:12:40.101, 41 %, 0, 100 %, 600.00 W\n"
        "[N/A], 2026/11/28 09:12:40.101, [N/A], 1, 96 %, [N/A]\n"
    )
    assert (a.index, a.util, a.memory_util, a.power, a.power_limit) == (0, 100.0, 41.0, 318.44, 600.0)
    assert (b.index, b.util, b.memory_util, b.power) == (1, 96.0, None, None)
    assert a.at is not None


def test_csv_without_units_needs_its_header() -> None:
    (a,) = gpus(
        "timestamp, index, utilization.gpu [%], utilization.memory [%], power.draw [W]\n2027/02/11 23:50:05.000, 3, 100, 38, "
        "548.10\n"
    )
    assert (a.index, a.util, a.memory_util, a.power) == (3, 100.0, 38.0, 548.1)


def test_csv_without_header_is_told_by_units() -> None:
    a, b = gpus(
        "2026/11/28 11:47:20.117, P1, 100 %, 19 %, 2640 MHz, 14001 MHz, 561.20 W, 71\n2026/11/28 23:30:00.000, 1, P0, 0 %, 0 %, "
        "1980 MHz, 76.40 W, 32"
    )
    assert (a.index, a.pstate, a.util, a.memory_util, a.sm_clock, a.power, a.temperature) == (
        None,
        "P1",
        100.0,
        19.0,
        2640.0,
        561.2,
        71.0,
    )
    assert (b.index, b.util, b.memory_util, b.power) == (1, 0.0, 0.0, 76.4)


def test_the_table() -> None:
    (a,) = gpus(
        "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0 |\n"
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n"
        "|   2  NVIDIA H200                    On  |   00000000:86:00.0 Off |                    0 |\n"
        "| N/A   41C    P0            123W /  700W |  120301MiB / 143771MiB |    100%      Default |\n"
    )
    assert (a.index, a.util, a.power, a.power_limit, a.memory_used, a.pstate) == (2, 100.0, 123.0, 700.0, 120301.0, "P0")


def test_the_long_query() -> None:
    a, b = gpus(
        "==============NVSMI LOG==============\nTimestamp : Tue Jun  1 08:03:10 2027\nAttached GPUs : 2\n"
        "GPU 00000000:01:00.0\n    Performance State                     : P1\n    Utilization\n        GPU          : 96 %\n    "
        "    Memory       : 0 %\n"
        "    GPU Power Readings\n        Average Power Draw   : 103.40 W\n        Current Power Limit  : 575.00 W\n"
        "GPU 00000000:02:00.0\n    Utilization\n        GPU          : N/A\n        Memory       : N/A\n"
    )
    assert (a.index, a.util, a.memory_util, a.power, a.power_limit) == (0, 96.0, 0.0, 103.4, 575.0)
    assert (b.index, b.util) == (1, None)


def test_dmon() -> None:
    a, b = gpus(
        "# gpu    pwr  gtemp  mtemp     sm    mem\n# Idx      W      C      C      %      %\n    0    548     71      -    100   "
        "  38\n    1    121     52      -    100      0\n"
    )
    assert (a.index, a.power, a.util, a.memory_util) == (0, 548.0, 100.0, 38.0)
    assert (b.index, b.memory_util) == (1, 0.0)


def test_lost() -> None:
    (a,) = gpus("Unable to determine the device handle for GPU0000:86:00.0: GPU is lost.  Reboot the system to recover this GPU\n")
    assert a.lost


def test_prose_with_percents_is_no_reading() -> None:
    assert gpus("INFO 11-28 09:12:41 [x.py:1] used 5 %, 3 % free, 12 W of power\n") == []
