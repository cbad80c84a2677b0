"""autopsy --freeze on a stand-in server with a stand-in debugger: who is stopped, for how long, and that it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dsv4_repro.forensics.collect.proc import process_state
from dsv4_repro.forensics.collect.process_table import read_process_table
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.autopsy import moving_now
from dsv4_repro.repro.serving.ranks import find_server


@pytest.fixture
def server(standin: ModuleType, tmp_path: Path) -> Iterator[Any]:
    """A stand-in whose command line is that of ``vllm serve``; (API pid, engine pid, worker pid)."""
    run: Any = sys.modules.get("standin.run") or __import__("standin.run", fromlist=["run"])
    port = run.free_port()
    log = (tmp_path / "server.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "/nonexistent", "--port", str(port), "--host", "127.0.0.1"],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(run.SITE), "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "120"},
    )  # fmt: skip
    try:
        until = time.monotonic() + 30
        while True:
            assert process.poll() is None
            table = read_process_table()
            below = table.below(process.pid)
            engine = next((pid for pid in below if "EngineCore" in table.entries[pid].title), None)
            worker = next((pid for pid in below if "Worker" in table.entries[pid].title), None)
            if engine is not None and worker is not None:
                break
            assert time.monotonic() < until
            time.sleep(0.1)
        yield process.pid, engine, worker
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        log.close()


def _debugger(folder: Path, monkeypatch: pytest.MonkeyPatch, engine: int, status: int = 0) -> Path:
    """A cuda-gdb that notes the engine's state while it is "attached"."""
    tool = folder / "cuda-gdb"
    seen = folder / "engine-states"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version*) echo "NVIDIA (R) cuda-gdb 13.0"; exit 0;; esac\n'
        f'case "$*" in *" -p "*) cut -d" " -f3 /proc/{engine}/stat >> {seen};; esac\n'
        f"exit {status}\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("DSV4_REPRO_CUDA_GDB", str(tool))
    return seen


def test_the_engine_is_stopped_while_the_worker_is_read_and_goes_on(
    server: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api, engine, worker = server
    seen = _debugger(tmp_path, monkeypatch, engine)
    main(["autopsy", str(worker), "--attach", "--freeze", "--json", "--out", str(tmp_path / "run")])
    captured = capsys.readouterr()
    assert seen.read_text().split() == ["T"]
    assert process_state(engine) in ("S", "R")
    document = json.loads(captured.out)
    assert document["freeze"]["engine"] == engine
    assert document["freeze"]["thawed"] is True
    assert "its deadline runs on meanwhile" in captured.err
    assert "120 s" in captured.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "timeline.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines if line["kind"] == "capture"] == ["freeze", "thaw"]
    assert process_state(api) is not None


def test_it_needs_consent(server: tuple[int, int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, engine, worker = server
    assert main(["autopsy", str(worker), "--freeze", "--out", str(tmp_path / "run")]) == 2
    assert "was not touched" in capsys.readouterr().err
    assert process_state(engine) in ("S", "R")
    assert main(["autopsy", str(tmp_path), "--freeze"]) == 2


def test_an_engine_that_computes_itself_is_not_stopped(
    server: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, engine, worker = server
    seen = _debugger(tmp_path, monkeypatch, engine)
    assert main(["autopsy", str(engine), "--attach", "--freeze", "--out", str(tmp_path / "run")]) == 2
    assert f"dsv4-repro autopsy {worker} --attach --freeze" in capsys.readouterr().err
    assert main(["autopsy", str(engine), "--attach", "--freeze", "--yes", "--out", str(tmp_path / "run")]) == 2
    assert "cannot be stopped and read at once" in capsys.readouterr().err
    assert not seen.exists()
    assert process_state(engine) in ("S", "R")


def test_a_debugger_that_fails_does_not_keep_it_stopped(
    server: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine, worker = server
    _debugger(tmp_path, monkeypatch, engine, status=1)
    assert main(["autopsy", str(worker), "--attach", "--freeze", "--out", str(tmp_path / "run")]) == 5
    assert process_state(engine) in ("S", "R")


def test_no_debugger_is_attached_to_a_server_that_moves(
    server: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api, engine, worker = server
    seen = _debugger(tmp_path, monkeypatch, engine)
    base_url = find_server(worker).base_url
    assert base_url is not None
    assert moving_now(base_url, seconds=0.2) == ""
    assert main(["autopsy", str(api), "--attach", "--out", str(tmp_path / "run")]) == 2
    assert f"dsv4-repro autopsy {worker} --attach" in capsys.readouterr().err
    url = f"{base_url}/v1/completions"
    body = json.dumps({"model": "/nonexistent", "prompt": "x " * 50, "max_tokens": 8000, "ignore_eos": True}).encode()
    asked = urllib.request.Request(url, body, {"content-type": "application/json"})

    def ask() -> None:
        while process_state(engine) in ("S", "R"):  # refused until it serves; ends with the server
            with contextlib.suppress(OSError):
                urllib.request.urlopen(asked, timeout=60).read()
            time.sleep(0.1)

    threading.Thread(target=ask, daemon=True).start()
    until = time.monotonic() + 20
    while not moving_now(base_url, seconds=0.3):
        assert time.monotonic() < until
    assert main(["autopsy", str(worker), "--attach", "--out", str(tmp_path / "run")]) == 2
    assert "was not touched: its server moves (generation_tokens" in capsys.readouterr().err
    assert not seen.exists()
    assert not (tmp_path / "run").exists()
    main(["autopsy", str(worker), "--attach", "--yes", "--out", str(tmp_path / "run")])
    assert seen.exists()
