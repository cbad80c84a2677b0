"""The command and the environment of a server: the recipe, what the user puts over it, and the list of changes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import ServerError, UsageError
from dsv4_repro.repro.serving.recipe import DUMMY_PLAN, ServeOptions, build_launch, free_port, port_taken
from dsv4_repro.scenarios.drain import DrainPlan

ENVIRON = {"PATH": os.environ["PATH"], "PYTHONPATH": "/somewhere"}
TINY = DrainPlan(**dict(DUMMY_PLAN))


def _launch(tmp_path: Path, **more: Any) -> Any:
    settings = {"folder": tmp_path, "plan": DrainPlan(), "model": "/models/v4", "environ": ENVIRON, **more}
    return build_launch(ServeOptions(**settings))


def _value(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_the_recipe_of_the_published_case(tmp_path: Path) -> None:
    spec = _launch(tmp_path, tp=4)
    assert spec.argv[1:5] == ("-m", "vllm.entrypoints.cli.main", "serve", "/models/v4")
    for flag, value in (
        ("--tensor-parallel-size", "4"),
        ("--attention-backend", "FLASHINFER_MLA_SPARSE_DSV4"), ("--moe-backend", "flashinfer_cutlass"),
        ("--max-num-seqs", "16"), ("--max-num-batched-tokens", "8192"), ("--max-model-len", "65536"), ("--kv-cache-dtype", "fp8"),
        ("--block-size", "256"), ("--gpu-memory-utilization", "0.9"), ("--tokenizer-mode", "deepseek_v4"),
    ):  # fmt: skip
        assert _value(spec.argv, flag) == value
    assert json.loads(_value(spec.argv, "--speculative-config")) == {"method": "mtp", "num_speculative_tokens": 1}
    assert "--distributed-executor-backend" not in spec.argv
    assert spec.base_url == f"http://127.0.0.1:{spec.port}"
    assert spec.model == "/models/v4"


def test_the_dummy_model_is_written_and_started_with_its_own_flags(tmp_path: Path) -> None:
    spec = _launch(tmp_path, model="dummy", plan=TINY.replace(layers=21))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_hidden_layers"] == 21
    assert spec.argv[4] == str(tmp_path / "model")
    assert spec.model == "tiny-dsv32"
    assert json.loads(_value(spec.argv, "--compilation-config")) == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    for flag, value in (("--load-format", "dummy"), ("--distributed-executor-backend", "mp"), ("--gpu-memory-utilization", "0.2")):
        assert _value(spec.argv, flag) == value
    assert "--no-enable-prefix-caching" in spec.argv
    assert (spec.env["VLLM_USE_FLASHINFER_SAMPLER"], spec.env["HF_HUB_OFFLINE"]) == ("0", "1")


def test_what_stands_after_the_dashes_wins(tmp_path: Path) -> None:
    words = ("--gpu-memory-utilization=0.5", "--max-num-seqs", "8", "--enforce-eager", "--api-key", "secret")
    spec = _launch(tmp_path, flags=words)
    assert "--gpu-memory-utilization=0.5" in spec.argv
    assert "0.9" not in spec.argv
    assert spec.plan.max_num_seqs == 8
    assert not spec.facts.full_graphs
    assert spec.headers == {"Authorization": "Bearer secret"}
    assert "secret" in spec.argv
    assert "secret" not in " ".join(spec.shown)
    assert "secret" not in json.dumps([[one.what, one.value, one.why] for one in spec.changes])
    assert any(change.what == "--max-num-seqs" for change in spec.changes)


def test_capture_sizes_of_the_plan_go_to_the_engine_and_no_mtp_takes_no_draft(tmp_path: Path) -> None:
    spec = _launch(tmp_path, plan=DrainPlan(capture_sizes="4,8", mtp=0))
    assert json.loads(_value(spec.argv, "--compilation-config")) == {"cudagraph_capture_sizes": [4, 8]}
    assert "--speculative-config" not in spec.argv


def test_the_environment_prepares_evidence_and_lists_every_change(tmp_path: Path) -> None:
    environ = {**ENVIRON, "CUDA_LAUNCH_BLOCKING": "1", "VLLM_PLUGINS": "theirs", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "300"}
    spec = _launch(tmp_path, environ=environ, guard=True)
    env = spec.env
    assert env["CUDA_ENABLE_USER_TRIGGERED_COREDUMP"] == "1"
    assert env["CUDA_COREDUMP_PIPE"].startswith(str(tmp_path))
    assert "CUDA_LAUNCH_BLOCKING" not in env
    assert env["VLLM_PLUGINS"] == "theirs,dsv4_repro_agent"
    assert int(env["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]) == 1800
    assert (env["DSV4_REPRO_AGENT"], env["DSV4_REPRO_GUARD"], env["DSV4_REPRO_PTRACE"]) == ("1", "1", "1")
    assert "DSV4_REPRO_RESCUE" not in env
    changed = {change.what for change in spec.changes}
    before = set(environ.items())
    assert {name for name, value in env.items() if (name, value) not in before} <= changed
    assert "CUDA_LAUNCH_BLOCKING" in changed
    assert all(change.why for change in spec.changes)


def test_the_servers_python_finds_the_agent(tmp_path: Path) -> None:
    spec = _launch(tmp_path)
    code = "from importlib.metadata import entry_points as e; print([p.value for p in e(group='vllm.general_plugins')])"
    done = subprocess.run([sys.executable, "-c", code], env=dict(spec.env), capture_output=True, text=True, check=True)
    assert "dsv4_repro_agent:register" in done.stdout
    assert spec.env["PYTHONPATH"].endswith(":/somewhere")
    assert spec.agent_folder == tmp_path / "agent"


def test_one_card_gets_a_worker_process_and_that_is_listed(tmp_path: Path) -> None:
    spec = _launch(tmp_path)
    assert _value(spec.argv, "--distributed-executor-backend") == "mp"
    assert "--distributed-executor-backend" in {change.what for change in spec.changes}


def test_bare_changes_nothing_of_the_server_and_says_what_cannot_be_read(tmp_path: Path) -> None:
    spec = _launch(tmp_path, bare=True)
    assert "--distributed-executor-backend" not in spec.argv
    assert dict(spec.env) == {**ENVIRON, "SPT_NOENV": "1"}
    assert [change.what for change in spec.changes] == ["SPT_NOENV"]
    assert spec.agent_folder is None
    assert {item.what for item in spec.unread} >= {"GPU core dump", "flight recorder, row states from inside"}


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port_taken(port)
        with pytest.raises(ServerError, match=f"port {port} is taken") as error:
            _launch(tmp_path, port=port)
        assert f"--url http://127.0.0.1:{port}" in error.value.help_text
        with pytest.raises(ServerError, match=f"port {port} is taken"):
            _launch(tmp_path, flags=("--port", str(port)))
    assert not port_taken(free_port())


@pytest.mark.parametrize(("more", "piece"), [({"port": 70000}, "--port 70000"), ({"model": "-x"}, "--model")])
def test_nonsense_is_a_usage_error(tmp_path: Path, more: dict[str, Any], piece: str) -> None:
    with pytest.raises(UsageError, match=piece):
        _launch(tmp_path, **more)


def test_a_server_on_all_interfaces_is_reached_on_the_loopback(tmp_path: Path) -> None:
    assert _launch(tmp_path, flags=("--host", "0.0.0.0")).base_url.startswith("http://127.0.0.1:")
