"""The reproducer for torch and vLLM's op, executed with a stand-in for torch: it hangs, reads, releases and exits as it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4_repro.repro.campaign.cells import Cell
from dsv4_repro.repro.campaign.launches import LaunchCase
from dsv4_repro.repro.campaign.minimise import Minimised
from dsv4_repro.repro.campaign.reproducer import write_reproducer

#: Enough of torch for the file: tensors are lists, the op waits (its event stays open) while a length is negative and no counter
#: holds the large count, as long as the environment does not say that the build is repaired.
TORCH = """
import os

int32 = uint8 = float32 = "dtype"
__version__ = "0"
STATE = {"words": None, "waiting": False}


class Tensor:
    def __init__(self, data, base=None, at=0):
        self.data, self.base, self.at = data, base, at

    def view(self, dtype):
        STATE["words"] = Tensor([0] * (len(self.data) // 4))
        return STATE["words"]

    def pin_memory(self):
        return self

    def __len__(self):
        return len(self.data)

    def __getitem__(self, key):
        if isinstance(key, slice):
            return Tensor(self.data[key], self, key.start or 0)
        return self.data[key]

    def copy_(self, source, non_blocking=False):
        self.data[:] = source.data[: len(self.data)]
        if self.base is not None:
            self.base.data[self.at : self.at + len(self.data)] = self.data
        if STATE["words"] is not None and max(STATE["words"].data) >= 1 << 30:
            STATE["waiting"] = False


def ones(shape, **_):
    return Tensor([])


def tensor(values, **_):
    return Tensor(list(values))


def full(shape, value, **_):
    return Tensor([])


def zeros(count, **_):
    return Tensor([0] * count)


def device(kind, number):
    return (kind, number)


class _Event:
    def __init__(self):
        self.after = False

    def record(self):
        self.after = CURRENT[-1] == "work"

    def query(self):
        return not (self.after and STATE["waiting"])


CURRENT = ["work"]


class _Stream:
    def __init__(self, priority=0):
        self.name = "side" if priority else "work"


class _On:
    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        CURRENT.append(self.stream.name)

    def __exit__(self, *_):
        CURRENT.pop()


class cuda:
    Event, Stream, stream = _Event, _Stream, _On

    @staticmethod
    def is_available():
        return os.environ.get("NO_GPU") is None

    @staticmethod
    def set_device(_):
        pass

    @staticmethod
    def synchronize():
        pass

    @staticmethod
    def get_device_name(_):
        return "a stand-in"


def _op(logits, lengths, output, workspace, k, max_seq_len):
    if min(lengths.data) < 0 and os.environ.get("REPAIRED") is None:
        STATE["waiting"] = True
        STATE["words"].data[3080 // 4] = 1


class ops:
    class _C:
        persistent_topk = staticmethod(_op)

    @staticmethod
    def load_library(path):
        if not os.path.exists(path):
            raise OSError(path)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (tmp_path / "vllm" / "_C.py").write_text("")
    launch = {
        "grid": 2,
        "groups": 1,
        "ctas_per_group": 2,
        "chunk_size": 4240,
        "dynamic_smem": 35968,
        "vec": 1,
        "device": "H200",
        "sm": 90,
    }
    done = Minimised("0" * 12, 5, Cell("run", kernel="vllm==0.27.1"), 0, LaunchCase((-1,), 8473), launch)
    text = write_reproducer(tmp_path / "reproducer.py", done).read_text()
    (tmp_path / "reproducer.py").write_text(
        text.replace("HANG_AFTER_S, RELEASE_WITHIN_S = 5.0, 5.0", "HANG_AFTER_S, RELEASE_WITHIN_S = 0.1, 1.0")
    )
    return tmp_path


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(folder / "reproducer.py"), *words], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
    )  # fmt: skip


def test_it_hangs_reads_its_counters_and_releases_itself(folder: Path) -> None:
    done = run(folder)
    assert done.returncode == 3, done.stderr
    assert "arrival counters [1] of 2" in done.stdout
    assert "released by writing the counter" in done.stdout


def test_it_completes_on_a_repaired_build(folder: Path) -> None:
    done = run(folder, REPAIRED="1")
    assert (done.returncode, "completed" in done.stdout) == (0, True)


def test_what_is_missing_is_said(folder: Path) -> None:
    assert run(folder, NO_GPU="1").returncode == 5
    (folder / "vllm" / "_C.py").unlink()
    assert run(folder).returncode == 5
    assert run(folder, "0", str(folder / "none.so")).returncode == 5
    (folder / "some.so").write_text("")
    assert run(folder, "0", str(folder / "some.so")).returncode == 3
