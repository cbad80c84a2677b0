"""The plugin in processes of its own, on model runners written here with the shapes of the table (never vLLM's code)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.repro.recorder import read_ring

AGENT = Path(__file__).resolve().parents[2] / "repro" / "agent" / "src"

TORCH = """
class cuda:
    is_available = staticmethod(lambda: False)
    is_current_stream_capturing = staticmethod(lambda: True)
class _C:
    @staticmethod
    def persistent_topk(logits, lengths, output, workspace, k, max_seq_len): return "ran"
class ops: pass
ops._C = _C()
"""
V1 = """
from enum import Enum
from types import SimpleNamespace as N
class Mode(Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
class Lengths:
    device = N(type="cpu")
    def __init__(self, values): self.values = values
    def tolist(self): return self.values
class AsyncGPUModelRunnerOutput:
    def get_output(self): return "tokens"
class GPUModelRunner:
    device = N(index=0)
    parallel_config = N(rank=2)
    def execute_model(self, scheduler_output, intermediate_tensors=None):
        if scheduler_output.total_num_scheduled_tokens == 13: raise RuntimeError("vLLM's own")
        if scheduler_output.total_num_scheduled_tokens == 0: return "empty"
        self._determine_batch_execution_and_padding(num_tokens=6, num_reqs=3)
        from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder as B
        lengths = N(data_ptr=lambda: 1)
        given = dict(decode_lens_cpu=Lengths([2, 2, 2, 0]), use_native=True, next_n=2, max_decode_len=2)
        B()._prepare_decode_tensors(seq_lens=lengths, **given)
        return None
    def _determine_batch_execution_and_padding(self, num_tokens, num_reqs):
        return Mode.FULL, N(num_tokens=8, num_reqs=4), False, None, None
    def sample_tokens(self, grammar_output): return AsyncGPUModelRunnerOutput()
    def capture_model(self): return 7
"""
V2 = """
from types import SimpleNamespace as N
from vllm.v1.worker.gpu_model_runner import Mode
from vllm.v1.worker.gpu.async_utils import AsyncOutput
def dispatch_cg_and_sync_dp(manager, num_reqs, num_tokens, need_eager=False):
    return N(cg_mode=Mode.PIECEWISE, num_tokens=16, num_reqs=None), None
class GPUModelRunner:
    device = N(index=1)
    def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False):
        dispatch_cg_and_sync_dp(None, 5, 11)
        return None
    def sample_tokens(self, grammar_output): return AsyncOutput()
    def capture_model(self, *, profile_only=False): return 7
"""
INDEXER = """
class DeepseekV32IndexerMetadataBuilder:
    def _prepare_decode_tensors(self, seq_lens, decode_lens_cpu, use_native, next_n, max_decode_len):
        return (seq_lens, None)
"""
FILES = {
    "torch/__init__.py": TORCH,
    "vllm/__init__.py": "",
    "vllm/v1/__init__.py": "",
    "vllm/v1/worker/__init__.py": "",
    "vllm/v1/worker/gpu/__init__.py": "",
    "vllm/v1/worker/gpu_model_runner.py": V1,
    "vllm/v1/worker/gpu/model_runner.py": V2,
    "vllm/v1/worker/gpu/async_utils.py": "class AsyncOutput:\n    def get_output(self): return 'tokens'\n",
    "vllm/v1/attention/__init__.py": "",
    "vllm/v1/attention/backends/__init__.py": "",
    "vllm/v1/attention/backends/mla/__init__.py": "",
    "vllm/v1/attention/backends/mla/indexer.py": INDEXER,
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/layers/__init__.py": "",
    "vllm/model_executor/layers/sparse_attn_indexer.py": "",
}
BEGIN = (
    "import sys, dsv4_repro_agent; from types import SimpleNamespace as N\n"
    "dsv4_repro_agent.register(); dsv4_repro_agent.register()\n"
)
DRIVE = """
from vllm.v1.worker.{module} import GPUModelRunner
runner = GPUModelRunner()
assert runner.execute_model(N(total_num_scheduled_tokens=6)) is None
output = runner.sample_tokens(None)
assert output.get_output() == "tokens"
assert runner.capture_model() == 7
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def play(tree: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {
        "PATH": os.environ["PATH"], "PYTHONPATH": f"{tree / 'site'}:{AGENT}", "DSV4_REPRO_AGENT_DIR": str(tree / "agent"),
        "PYTHONDONTWRITEBYTECODE": "1", **environment,
    }  # fmt: skip
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60, check=False)


def ran(tree: Path, code: str, **environment: str) -> None:
    done = play(tree, code, **environment)
    assert done.returncode == 0, done.stderr


def status(tree: Path) -> dict[str, Any]:
    (path,) = (tree / "agent").glob("status-*.json")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def ring(tree: Path) -> Any:
    (path,) = (tree / "agent").glob("ring-*.bin")
    return read_ring(path)


def test_unarmed_it_does_nothing_at_all(tree: Path) -> None:
    code = BEGIN + DRIVE.format(module="gpu_model_runner") + (
        "assert not [name for name in sys.modules if name.startswith('dsv4_repro_agent.') and not name.endswith('.settings')]\n"
        "assert not hasattr(GPUModelRunner.execute_model, '__wrapped__')\n"
        "import threading; assert threading.active_count() == 1\n"
    )  # fmt: skip
    ran(tree, code)
    assert not (tree / "agent").exists()


@pytest.mark.parametrize("name", ["DSV4_REPRO_AGENT", "VLLM_DSV4_REPRO_AGENT"])
def test_a_step_of_the_first_runner(tree: Path, name: str) -> None:
    """Ray copies only some prefixes to its workers: the other name works as well."""
    ran(tree, BEGIN + DRIVE.format(module="gpu_model_runner"), **{name: "1"})
    contents = ring(tree)
    (step,) = contents.steps
    assert (contents.header.rank, contents.header.device) == (2, 0)
    assert (step.runner, step.graph_mode, step.native, step.next_n) == ("v1", "full", True, 2)
    assert (step.requests, step.tokens, step.padded_requests, step.padded_tokens) == (3, 6, 4, 8)
    assert (step.decode_min, step.decode_max, step.decode_slots, step.decode_zero) == (0, 2, 4, 1)
    assert None not in (step.begin_ns, step.launch_ns, step.wait_ns, step.output_ns)
    assert step.begin_ns <= step.launch_ns <= step.wait_ns <= step.output_ns
    assert step.record_ns is None


def test_a_step_of_the_second_runner(tree: Path) -> None:
    code = (
        BEGIN + DRIVE.format(module="gpu.model_runner") + "runner.execute_model(N(total_num_scheduled_tokens=4), dummy_run=True)\n"
    )
    ran(tree, code, DSV4_REPRO_AGENT="1")
    (step,) = ring(tree).steps
    assert (step.runner, step.graph_mode) == ("v2", "piecewise")
    assert (step.requests, step.tokens, step.padded_requests, step.padded_tokens) == (5, 11, 5, 16)
    assert step.decode_min is None
    assert step.output_ns is not None


def test_what_vllm_raises_goes_through_and_empty_steps_are_none(tree: Path) -> None:
    code = BEGIN + DRIVE.format(module="gpu_model_runner") + (
        "assert runner.execute_model(N(total_num_scheduled_tokens=0)) == 'empty'\n"
        "try: runner.execute_model(N(total_num_scheduled_tokens=13))\n"
        "except RuntimeError as error: assert str(error) == \"vLLM's own\"\n"
        "else: raise SystemExit('swallowed')\n"
    )  # fmt: skip
    ran(tree, code, DSV4_REPRO_AGENT="1")
    first, second = ring(tree).steps
    assert first.launch_ns is not None
    assert second.launch_ns is None


def test_a_forked_child_has_its_own_ring(tree: Path) -> None:
    """vLLM forks its workers from a process that has loaded the plugins, and does not load them again."""
    code = BEGIN + DRIVE.format(module="gpu_model_runner") + (
        "import os, threading\nchild = os.fork()\n"
        "if child == 0:\n"
        "    assert threading.active_count() == 1\n"
        "    assert runner.execute_model(N(total_num_scheduled_tokens=6)) is None\n"
        "    names = {one.name for one in threading.enumerate()}\n"
        "    assert {'dsv4-repro-agent_watch', 'dsv4-repro-agent_events'} <= names\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )  # fmt: skip
    ran(tree, code.replace("import sys,", "import warnings; warnings.simplefilter('ignore'); import sys,"), DSV4_REPRO_AGENT="1")
    rings = [read_ring(path) for path in (tree / "agent").glob("ring-*.bin")]
    assert len({one.header.pid for one in rings}) == 2
    assert [len(one.steps) for one in rings] == [1, 1]


def test_it_says_what_it_found_and_what_not(tree: Path) -> None:
    other = V1.replace("num_tokens, num_reqs):", "tokens, num_reqs):").replace("num_tokens=6, num_reqs=3", "tokens=6, num_reqs=3")
    (tree / "site/vllm/v1/worker/gpu_model_runner.py").write_text(other)
    code = BEGIN + DRIVE.format(module="gpu_model_runner") + "import time; time.sleep(0.5)\n"
    ran(tree, code, DSV4_REPRO_AGENT="1")
    features = status(tree)["features"]
    assert features["v1 batch"] == {
        "found": False,
        "why": "vllm.v1.worker.gpu_model_runner.GPUModelRunner._determine_batch_execution_and_padding has no parameter num_tokens",
    }
    assert features["v1 step"]["found"]
    assert features["guard"]["found"] is False
    assert "steps aside" in features["guard"]["why"]
    assert features["events"]["found"] is False
    (step,) = ring(tree).steps
    assert (step.padded_tokens, step.decode_zero) == (None, 1)


def test_modules_that_are_there_already_are_hooked_too(tree: Path) -> None:
    code = "import vllm.v1.worker.gpu_model_runner\n" + BEGIN + DRIVE.format(module="gpu_model_runner")
    ran(tree, code, DSV4_REPRO_AGENT="1")
    assert len(ring(tree).steps) == 1


def test_nothing_of_vllm_is_imported_by_the_agent(tree: Path) -> None:
    ran(
        tree, BEGIN + "assert not [name for name in sys.modules if name.split('.')[0] in ('vllm', 'torch')]\n", DSV4_REPRO_AGENT="1"
    )


def test_the_op_runs_unchanged_and_its_addresses_are_learnt(tree: Path) -> None:
    code = BEGIN + (
        "import vllm.model_executor.layers.sparse_attn_indexer, torch\n"
        "from dsv4_repro_agent import plugin\n"
        "def t(at, *shape): return N(data_ptr=lambda: at, shape=shape, numel=lambda: shape[0], element_size=lambda: 1)\n"
        "args = (t(1, 8, 16384), t(2, 8), None, t(3, 1 << 20), 512, 16384)\n"
        "assert torch.ops._C.persistent_topk(*args) == 'ran'\n"
        "assert torch.ops._C.persistent_topk.__name__ == 'persistent_topk'\n"
        "(launch,) = plugin._started.hooks.launches.values()\n"
        "assert (launch.workspace, launch.lengths, launch.rows, launch.width, launch.max_seq_len) == (3, 2, 8, 16384, 16384)\n"
        "assert torch.ops._C.persistent_topk(1, 2, 3, 4, 5, 6) == 'ran'\n"
        "assert plugin._started.said.features['row states']['why'].startswith('steps aside')\n"
    )
    ran(tree, code, DSV4_REPRO_AGENT="1")


def test_our_own_failures_never_reach_vllm(tree: Path) -> None:
    """Whatever of ours raises, at any place: vLLM's call ends as it would have, and it is said."""
    code = BEGIN + (
        "from dsv4_repro_agent import plugin\n"
        "def bad(*a, **k): raise ValueError('ours')\n"
        "setattr(plugin._started.recorder, '{name}', bad)\n"
    )  # fmt: skip
    for name in ("begin", "batch", "decode", "launched", "waiting", "returned", "poll"):
        rest = "import time; time.sleep(0.2)\n" if name == "poll" else ""
        done = play(tree, code.format(name=name) + DRIVE.format(module="gpu_model_runner") + rest, DSV4_REPRO_AGENT="1")
        assert done.returncode == 0, (name, done.stderr)
        assert "Traceback" not in done.stderr, name
        assert "ValueError: ours" in done.stderr, name


def test_an_import_goes_on_when_the_hooks_fail(tree: Path) -> None:
    code = (
        "import dsv4_repro_agent.hooks as h\nh.Hooks._install = lambda *a: 1 / 0\n"
        + BEGIN
        + DRIVE.format(module="gpu_model_runner")
    )
    done = play(tree, code, DSV4_REPRO_AGENT="1")
    assert done.returncode == 0, done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_the_guard_alone_records_nothing_and_leaves_the_op_alone(tree: Path) -> None:
    code = BEGIN + DRIVE.format(module="gpu_model_runner") + (
        "import threading, torch, vllm.model_executor.layers.sparse_attn_indexer\n"
        "assert [one.name for one in threading.enumerate() if 'dsv4' in one.name] == ['dsv4-repro-agent_watch']\n"
        "assert type(torch.ops._C.persistent_topk).__name__ == 'function'\n"
        "import time; time.sleep(0.5)\n"
    )  # fmt: skip
    ran(tree, code, DSV4_REPRO_GUARD="1")
    assert not list((tree / "agent").glob("ring-*"))
    assert status(tree)["features"]["decode lengths"]["found"]


def test_ptrace_alone_allows_debuggers_and_arms_nothing(tree: Path) -> None:
    code = BEGIN + (
        "import ctypes, dsv4_repro_agent.ptrace as p\n"
        "assert dsv4_repro_agent._allowed\n"
        "assert 'dsv4_repro_agent.plugin' not in sys.modules\n"
        "assert isinstance(p.allow(), bool)\n"
    )
    ran(tree, code, DSV4_REPRO_PTRACE="1")
    assert not (tree / "agent").exists()


def test_the_permission_is_given_again_in_a_forked_child(tree: Path) -> None:
    code = (
        "import os, sys\nimport dsv4_repro_agent.ptrace as p\ncalls = []\n"
        "p.allow = lambda: calls.append(os.getpid()) or True\n"
        "import dsv4_repro_agent\ndsv4_repro_agent.register(); dsv4_repro_agent.register()\n"
        "assert calls == [os.getpid()]\nchild = os.fork()\n"
        "if child == 0:\n    os._exit(0 if calls[-1] == os.getpid() else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    ran(tree, code, DSV4_REPRO_PTRACE="1")


def test_a_folder_of_another_kind_steps_aside(tree: Path) -> None:
    (tree / "agent").write_text("a file")
    done = play(tree, BEGIN + DRIVE.format(module="gpu_model_runner"), DSV4_REPRO_AGENT="1")
    assert done.returncode == 0, done.stderr
    assert "steps aside" in done.stderr


def test_a_full_disk_at_the_first_step_steps_aside(tree: Path) -> None:
    code = BEGIN + "import os; os.posix_fallocate = lambda *a: (_ for _ in ()).throw(OSError(28, 'No space left on device'))\n"
    done = play(tree, code + DRIVE.format(module="gpu_model_runner"), DSV4_REPRO_AGENT="1")
    assert done.returncode == 0, done.stderr
    assert "No space left" in done.stderr
