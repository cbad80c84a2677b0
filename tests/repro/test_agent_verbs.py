"""agent install, agent show, agent ask."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import venv
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import DeadlineError, EvidenceError, OurFaultError, UnavailableError, UsageError
from dsv4_repro.repro import agent_show
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.agent_ask import ask_row_states, row_state_lines, the_one_alive
from dsv4_repro.repro.agent_install import AGENT_SOURCES, Installed, agent_wheel, install_into_folder, install_with_python
from dsv4_repro.repro.agent_show import agent_lines, read_agents

SHOW_POINTS = (
    "from importlib.metadata import entry_points; print([one.load() for one in entry_points(group='vllm.general_plugins')])"
)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A fresh environment with pip."""
    try:
        venv.create(tmp_path / "venv", with_pip=True, symlinks=True)
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"no environment with pip can be made here: {error}")
    return tmp_path / "venv" / "bin" / "python"


def test_the_wheel_holds_every_module_and_is_the_same_each_time() -> None:
    name, raw = agent_wheel()
    assert (name, raw) == agent_wheel()
    with zipfile.ZipFile(BytesIO(raw)) as archive:
        names = set(archive.namelist())
        assert {f"dsv4_repro_agent/{path.name}" for path in (AGENT_SOURCES / "src" / "dsv4_repro_agent").glob("*.py")} <= names
        record = archive.read(next(one for one in names if one.endswith("RECORD"))).decode()
        assert {line.split(",")[0] for line in record.splitlines()} == names
        points = archive.read(next(one for one in names if one.endswith("entry_points.txt"))).decode()
        assert points == "[vllm.general_plugins]\ndsv4_repro_agent = dsv4_repro_agent:register\n"
        assert b"Requires-Dist" not in archive.read(next(one for one in names if one.endswith("METADATA")))


def test_missing_sources_are_a_fault_of_ours(tmp_path: Path) -> None:
    with pytest.raises(OurFaultError):
        agent_wheel(tmp_path)


def test_a_folder_for_pythonpath(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    for _ in range(2):
        done = install_into_folder(folder)
    stale = folder / "dsv4_repro_agent" / "gone.py"
    stale.write_text("")
    install_into_folder(folder)
    assert not stale.exists()
    assert any(f"PYTHONPATH={folder}" in line for line in done.lines())
    assert any("vLLM 0.23.0 with H200 cards only" in line for line in done.lines())
    shown = subprocess.run(
        [sys.executable, "-S", "-c", SHOW_POINTS], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True
    )
    assert shown.stdout.count("function register") == 1


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "dsv4_repro_agent").mkdir()
    (tmp_path / "dsv4_repro_agent" / "mine.py").write_text("")
    with pytest.raises(UsageError, match="is no agent"):
        install_into_folder(tmp_path)
    assert (tmp_path / "dsv4_repro_agent" / "mine.py").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot install"):
        install_into_folder(tmp_path / "file")


def test_an_environment_with_pip(environment: Path, tmp_path: Path) -> None:
    done = install_with_python(environment, tmp_path)
    assert done.way == "pip"
    assert done.vllm is None
    assert "no vLLM" in done.notes[0]
    shown = subprocess.run([str(environment), "-c", SHOW_POINTS], capture_output=True, text=True, check=True)
    assert "function register" in shown.stdout
    install_with_python(environment, tmp_path)
    subprocess.run([str(environment), "-m", "pip", "uninstall", "-y", "-q", "dsv4-repro-agent"], check=True, capture_output=True)
    shown = subprocess.run([str(environment), "-c", SHOW_POINTS], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def fake_python(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def answer(**changes: Any) -> str:
    return json.dumps({"python": [3, 12, 1], "pip": True, "vllm": "0.27.1", "agent": None, "entry_points": [], **changes})


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        ("exit 3", UsageError, "exit status 3"),
        ("echo nonsense", UsageError, "no Python interpreter"),
        (f"echo '{answer(pip=False)}'", UnavailableError, "has no pip"),
        (f"echo '{answer(python=[3, 9, 0])}'", UnavailableError, "needs 3.10"),
        (
            f"[ \"$1\" = -m ] && {{ echo externally managed >&2; exit 1; }}; echo '{answer()}'",
            UnavailableError,
            "externally managed",
        ),
        (f"echo '{answer()}'", Exception, "it is not there"),
    ],
)
def test_what_can_be_wrong_with_an_interpreter(tmp_path: Path, body: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        install_with_python(fake_python(tmp_path / "python", body), tmp_path)


def test_no_interpreter(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot be asked"):
        install_with_python(tmp_path / "absent", tmp_path)


def test_the_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["agent", "install"]) == 2
    assert main(["agent", "install", "--into", str(tmp_path / "a"), "--python", "b"]) == 2
    assert main(["agent", "install", "--into", str(tmp_path / "a"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["installed"]["way"] == "folder"
    assert main(["agent", "show", str(tmp_path / "absent")]) == 5
    assert main(["agent", "show", str(tmp_path)]) == 5
    monkeypatch.setenv("DSV4_REPRO_AGENT_DIR", str(tmp_path / "x"))
    assert agent_show.default_folder() == tmp_path / "x"


def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(AGENT_SOURCES / "src"))
    from dsv4_repro_agent.ring import Ring

    ring = Ring(folder, slots=16, rank=0, device=0, vllm="0.23.0", agent="0.1.0")
    step = ring.begin(1)
    step.requests, step.padded_requests, step.tokens, step.padded_tokens, step.decode_zero = 3, 4, 6, 8, 1
    step.launch_ns = step.record_ns = step.begin_ns
    ring.write(step)
    return ring


def test_show_says_what_did_not_end_and_what_is_armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = recorded(tmp_path, monkeypatch)
    key = ring.path.stem.removeprefix("ring-")
    status = {"armed": {"recorder": True, "guard": False}, "features": {"guard": {"found": True, "why": "ready, not armed"}}}
    (tmp_path / f"status-{key}.json").write_text(json.dumps(status))
    document = read_agents(tmp_path)
    (rank,) = document.ranks
    assert (rank.pid, rank.alive, rank.unfinished, document.outcome) == (os.getpid(), True, (1,), "clean")
    text = "\n".join(agent_lines(document))
    for part in ("3 requests padded to 4", "not seen to end: steps 1", "armed: recorder", "+ guard: ready, not armed"):
        assert part in text


@pytest.mark.parametrize("content", ["{", "[]", '"x"', "[" * 100_000, '{"armed": 3, "features": [1]}', '{"features": {"a": 1}}'])
def test_show_survives_any_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    ring = recorded(tmp_path, monkeypatch)
    (tmp_path / f"status-{ring.path.stem.removeprefix('ring-')}.json").write_text(content)
    (tmp_path / "ring-notanumber.bin").write_text("")
    (tmp_path / "ring-1-2.bin").write_text("too short")
    document = read_agents(tmp_path)
    assert document.outcome == "inconclusive"
    assert any("could not read" in line for line in agent_lines(document))
    assert len(document.ranks) == 2


def test_who_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = recorded(tmp_path, monkeypatch)
    name = ring.path.stem.removeprefix("ring-")
    (tmp_path / "ring-1-2.bin").write_bytes(ring.path.read_bytes())
    assert the_one_alive(tmp_path, None) == name
    with pytest.raises(UnavailableError, match="no running worker"):
        the_one_alive(tmp_path, 1)
    (tmp_path / f"ring-{os.getpid()}-0.bin").write_bytes(ring.path.read_bytes())
    with pytest.raises(UnavailableError, match="2 workers"):
        the_one_alive(tmp_path, None)


class Answering(FakeClock):
    """Writes an answer when it is slept on."""

    def __init__(self, folder: Path, more: dict[str, Any] | None) -> None:
        super().__init__()
        self.folder, self.more = folder, more

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.more is not None:
            asked = json.loads((self.folder / "ask-1-2.json").read_text())
            (self.folder / "answer-1-2.json").write_text(json.dumps({"id": asked["id"], **self.more}))


LAUNCH = {
    "workspace": "0x10", "lengths_address": "0x20", "rows": 2, "width": 3, "top_k": 512, "max_seq_len": 3,
    "arrival_counters": [1, 0], "lengths": [-1, 0], "read_ns": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        (None, DeadlineError, "did not answer within 2 s"),
        ({"error": "blocked"}, UnavailableError, "the agent says: blocked"),
        ({}, EvidenceError, "launches"),
        ({"launches": 3, "stalled_s": 0}, EvidenceError, "launches"),
        ({"launches": [{**LAUNCH, "workspace": "rm"}], "stalled_s": 0}, EvidenceError, "workspace"),
        ({"launches": [{**LAUNCH, "lengths": ["x"]}], "stalled_s": 0}, EvidenceError, "lengths"),
        ({"launches": [{**LAUNCH, "rows": 1 << 70}], "stalled_s": 0}, EvidenceError, "rows"),
    ],
)
def test_every_answer_but_a_right_one_is_an_error(tmp_path: Path, more: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ask_row_states(tmp_path, "1-2", clock=Answering(tmp_path, more))


def test_a_right_answer(tmp_path: Path) -> None:
    states = ask_row_states(tmp_path, "1-2", clock=Answering(tmp_path, {"launches": [LAUNCH], "stalled_s": 1.5}))
    assert states.launches[0].lengths == [-1, 0]
    assert row_state_lines(states)[0] == "oldest step under way: 1.50 s"


def test_an_empty_folder_is_not_none_found(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="holds no agent's files"):
        read_agents(tmp_path)


def test_a_folder_with_a_space_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    lines = Installed("folder", f"{tmp_path}/of the agent", "0.1.0", None, ()).lines()
    commands = [line for line in lines if "vllm serve" in line]
    assert len(commands) == 3
    assert all(shlex.split(line.partition("DSV4_")[0])[0] == f"PYTHONPATH={tmp_path}/of the agent" for line in commands)
