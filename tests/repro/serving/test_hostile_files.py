"""Folders and files that somebody else made: directories, pipes and odd names in the place of an agent's files."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import EvidenceError, ReproError
from dsv4_repro.repro.agent_ask import ask_release, ask_row_states
from dsv4_repro.repro.agent_show import read_agents, read_document
from dsv4_repro.repro.recorder import read_newest, read_ring
from dsv4_repro.repro.runstore import file_sha256
from dsv4_repro.repro.serving.agent_counters import agent_counters
from dsv4_repro.repro.serving.live_build import read_arguments
from dsv4_repro.repro.serving.liveness import read_state
from dsv4_repro.repro.serving.load_plan import read_load_plan
from dsv4_repro.repro.serving.load_sources import ring_reader
from dsv4_repro.repro.serving.log_history import read_log_tail
from dsv4_repro.repro.serving.ranks import find_server, find_servers
from dsv4_repro.repro.serving.recorded_ranks import recorded_ranks
from dsv4_repro.repro.serving.request_records import read_requests
from dsv4_repro.repro.serving.signals import LogReader
from dsv4_repro.repro.unpack import head_of

READERS: dict[str, Callable[[Path], Any]] = {
    "read_document": read_document,
    "read_log_tail": read_log_tail,
    "read_state": read_state,
    "file_sha256": file_sha256,
    "read_newest": read_newest,
    "read_ring": read_ring,
    "read_load_plan": read_load_plan,
    "read_requests": read_requests,
    "head_of": head_of,
    "cmdline": lambda path: read_arguments(1, path.parent),
}


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", ["a directory", "a pipe", "/dev/zero"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_typed_and_leaves_no_descriptor_open(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "1" / "cmdline" if name == "cmdline" else tmp_path / "given"
    path.parent.mkdir(exist_ok=True)
    if kind == "a directory":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    before = _fds()
    for _ in range(5):
        found = None
        with suppress(ReproError, OSError):
            found = READERS[name](path)
        assert found is None
    assert _fds() <= before


def test_files_whose_names_look_like_numbers_cost_nobody_else(tmp_path: Path) -> None:
    odd = ("ring-\xb2-3.bin", "ring-1-\xb2.bin", "status-\xb2-1.json", "ring--.bin", f"ring-{'9' * 60}-1.bin", "ring-1-1-1.bin")
    for name in odd:
        (tmp_path / name).write_bytes(b"x")
    assert recorded_ranks(tmp_path) == ()
    assert agent_counters(tmp_path, {1, 2}) is None
    assert list(ring_reader(tmp_path)()) == []
    shown = read_agents(tmp_path).ranks
    assert [rank.pid for rank in shown] == [1 << 62]
    assert shown[0].unread


def _process(root: Path, pid: int, parent: int, argv: list[str], environment: dict[str, str]) -> None:
    base = root / str(pid)
    (base / "fd").mkdir(parents=True)
    fields = ["S", str(parent), *["0"] * 17, "77", *["0"] * 30]
    (base / "stat").write_text(f"{pid} (x) y) {' '.join(fields)}\n")
    (base / "cmdline").write_bytes(b"\0".join(word.encode() for word in argv) + b"\0")
    (base / "environ").write_bytes(b"\0".join(f"{name}={value}".encode() for name, value in environment.items()))


@pytest.mark.parametrize(
    ("argv", "environment"),
    [
        (["vllm", "serve", "m", "--port", "\xb2"], {}),
        (["vllm", "serve", "m", "--port", "9" * 5000], {}),
        (["vllm", "serve", "m\n\x1b[2J", "--host", "\x1b]0;x\x07"], {"RANK": "\xb2"}),
        (["vllm", "serve", "m"], {"DSV4_REPRO_AGENT_DIR": "/" + "a" * 5000, "DSV4_REPRO_AGENT": "1"}),
        (["vllm", "serve", "/" + "b" * 5000], {"TMPDIR": "/" + "c" * 300, "RANK": "9" * 5000}),
        (["VLLM::APIServer_0\nVLLM::Worker_TP0"], {}),
    ],
)
def test_processes_that_call_themselves_odd_things_are_found_and_cost_no_traceback(
    argv: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    _process(tmp_path, 1, 0, ["init"], {})
    _process(tmp_path, 70, 1, argv, environment)
    _process(tmp_path, 71, 70, ["ray::RayWorkerWrapper"], environment)
    found = find_servers(root=tmp_path)
    assert [target.api_pid for target in found] == [70]
    assert find_server(70, root=tmp_path).api_pid == 70


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_another_users_server_is_found_although_its_root_may_not_be_entered(tmp_path: Path) -> None:
    _process(tmp_path, 70, 0, ["vllm", "serve", "m"], {"DSV4_REPRO_AGENT_DIR": "/agents", "DSV4_REPRO_AGENT": "1"})
    (tmp_path / "70" / "root").mkdir(mode=0o700)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        assert find_server(70, root=tmp_path).api_pid == 70
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_another_users_process_does_not_pose_as_a_worker(tmp_path: Path) -> None:
    _process(tmp_path, 70, 1, ["vllm", "serve", "m"], {})
    _process(tmp_path, 71, 1, ["ray::RayWorkerWrapper.execute_method"], {})
    _process(tmp_path, 72, 1, ["ray::RayWorkerWrapper.execute_method"], {})
    _process(tmp_path, 73, 1, ["VLLM::Worker_TP1"], {})
    os.chown(tmp_path / "72", 65534, 65534)
    found = find_server(70, root=tmp_path)
    assert [rank.pid for rank in found.ranks] == [71]
    assert any("1 processes of another user" in item.why for item in found.unread)


@pytest.mark.parametrize("stalled", ["NaN", "Infinity", "-Infinity", "-1", '"x"', "null", "1e999"])
@pytest.mark.parametrize("kind", ["launches", "released"])
def test_an_answer_of_an_agent_with_no_number_in_it_is_typed(tmp_path: Path, stalled: str, kind: str) -> None:
    rest = '"launches": []' if kind == "launches" else '"released": 3'
    stop = threading.Event()

    def answer() -> None:
        asked = tmp_path / "ask-7-7.json"
        while not asked.exists() and not stop.wait(0.01):
            pass
        token = json.loads(asked.read_text())["id"]
        (tmp_path / "answer").write_text(f'{{"id": "{token}", "stalled_s": {stalled}, {rest}}}')
        (tmp_path / "answer").rename(tmp_path / "answer-7-7.json")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        ask: Callable[[], object] = {
            "launches": lambda: ask_row_states(tmp_path, "7-7", timeout=5.0),
            "released": lambda: ask_release(tmp_path, "7-7", guard=False, timeout=5.0),
        }[kind]
        with pytest.raises(EvidenceError, match="stalled_s"):
            ask()
    finally:
        stop.set()
        thread.join()


def test_a_stats_line_of_endless_digits_is_a_number(tmp_path: Path) -> None:
    digits = "9" * 400
    path = tmp_path / "log"
    path.write_text(
        f"Avg prompt throughput: {digits}.0 tokens/s, Avg generation throughput: {digits}.5 tokens/s, Running: {digits} reqs\n"
    )
    found = LogReader(path).look()
    assert found.stats_tokens_per_s is not None
    assert math.isfinite(found.stats_tokens_per_s)
