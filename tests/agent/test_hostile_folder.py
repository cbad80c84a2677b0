"""What lies in the agent's folder that is not the agent's: it costs the server nothing, and the rescue neither."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dsv4_repro_agent import control
from dsv4_repro_agent.control import Agent
from dsv4_repro_agent.said import Said, write_json
from dsv4_repro_agent.settings import from_environment


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    settings = from_environment({"DSV4_REPRO_AGENT": "1", "DSV4_REPRO_AGENT_DIR": str(tmp_path)})
    nothing: Any = SimpleNamespace(clamped=0, averted=0)
    return Agent(settings, Said(), nothing, nothing, nothing, vllm="0.23.0")


@pytest.mark.parametrize("name", ["control.json", "ask"])
@pytest.mark.parametrize("kind", ["a directory", "a pipe", "a link to a device"])
def test_what_is_no_file_leaves_no_descriptor_open(agent: Agent, name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / (name if name == "control.json" else f"ask-{agent.name}.json")
    if kind == "a directory":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        found = None
        try:
            found = agent._read_changed(path, "_control")
        except OSError:
            assert kind == "a link to a device"
        assert found is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_costs_one_answer_and_not_the_side_stream(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path, _document: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(control, "write_json", full)
        agent._answer(("a" * 16, False), {"launches": []})
    assert agent.said.features["answers"] == {"found": False, "why": "could not be written: No space left on device"}
    agent._answer(("b" * 16, False), {"launches": []})
    assert agent.said.features["answers"]["found"] is True
    assert (agent.settings.folder / f"answer-{agent.name}.json").exists()


def test_what_a_killed_process_of_our_pid_left_does_not_stop_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    monkeypatch.setattr("threading.get_ident", lambda: 7)
    (tmp_path / f".status.json.{os.getpid()}.7.tmp").write_text("half")
    write_json(path, {"a": 1})
    assert path.read_text() == '{"a": 1}'
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert [one.name for one in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("name", ["control.json", "ask"])
def test_a_file_that_cannot_be_read_stops_neither_the_status_nor_the_other_file(agent: Agent, name: str, tmp_path: Path) -> None:
    control_file, ask = tmp_path / "control.json", tmp_path / f"ask-{agent.name}.json"
    bad, good = (control_file, ask) if name == "control.json" else (ask, control_file)
    bad.symlink_to(tmp_path / "elsewhere")
    good.write_text('{"id": "one", "guard": true}')
    armed: list[bool] = []
    agent.guard = SimpleNamespace(clamped=0, active=False, arm=lambda wanted, _why: armed.append(wanted))
    agent.recorder = SimpleNamespace(averted=0, armed=True, broken=False, ring=None)
    agent._files(1.0)
    assert agent.said.features["control"]["found"] is False
    assert bad.name in agent.said.features["control"]["why"]
    assert (agent._ask == ("one", False)) if good is ask else (armed == [True])
    assert (tmp_path / f"status-{agent.name}.json").exists()


def test_a_file_that_was_read_while_it_was_still_empty_is_read_again(agent: Agent, tmp_path: Path) -> None:
    """A shell empties a file and then writes it: both may have the same time."""
    path = tmp_path / "control.json"
    path.write_text("")
    at = path.stat().st_mtime_ns
    assert agent._read_changed(path, "_control") is None
    with path.open("r+") as stream:
        stream.write('{"guard": true}')
    os.utime(path, ns=(at, at))
    assert agent._read_changed(path, "_control") == {"guard": True}
    assert agent._read_changed(path, "_control") is None
