"""Run directories from strangers: bounded, no way out, typed errors, and what is there is returned."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from dsv4_repro.errors import RunStoreError
from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.repro.run_records import EvidenceEntry, RunRecord
from dsv4_repro.repro.runread import RunView, is_run_directory, open_run, read_json_file, read_timeline


def _run(tmp_path: Path, **more: Any) -> Path:
    document = {"schema": "dsv4-repro/run/1", "scenario": "drain", "ground": "cpu", **more}
    (tmp_path / "run.json").write_text(json.dumps(document))
    return tmp_path


def test_unknown_keys_of_a_newer_release_are_kept(tmp_path: Path) -> None:
    view = open_run(_run(tmp_path, schema="dsv4-repro/run/2", colour="green"))
    assert (view.run.model_extra or {})["colour"] == "green"


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    view = open_run(_run(tmp_path))
    assert [item.what for item in view.missing] == ["diagnosis.json", "evidence/index.json"]
    assert view.diagnosis is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[]",
        "null",
        '{"schema": "x/1", "scenario": "d", "ground": "g"}',
        '{"scenario": 3}',
        "[" * 100_000,
        "9" * 5000,
    ],
)
def test_a_run_record_that_is_none_is_a_typed_error_naming_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunStoreError, match=r"run\.json"):
        open_run(tmp_path)


def test_not_a_directory(tmp_path: Path) -> None:
    with pytest.raises(RunStoreError):
        open_run(tmp_path / "nothing")
    assert not is_run_directory(tmp_path)
    assert is_run_directory(_run(tmp_path))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b'{"scenario": "\xff"}')
    with pytest.raises(RunStoreError, match="byte 14"):
        open_run(tmp_path)


def test_a_document_beyond_the_limit_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(RunStoreError, match="larger than"):
        read_json_file(path, limit=1000)


def test_a_pipe_in_place_of_a_document_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(RunStoreError, match="not a regular file"):
        open_run(tmp_path)


def test_a_link_in_place_of_a_document_is_not_followed(tmp_path: Path) -> None:
    real = _run(tmp_path) / "run.json"
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.json").symlink_to(real)
    with pytest.raises(RunStoreError):
        open_run(other)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../secret", "evidence/../../secret", "a\\..\\b", "", ".", "link", "gone", "folder"]
)
def test_an_artefact_never_leads_out(tmp_path: Path, path: str) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (tmp_path / "secret").write_text("x")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "folder").mkdir()
    view = RunView(root, RunRecord(scenario="d", ground="cpu"), None, ())
    with pytest.raises(RunStoreError):
        view.artefact(EvidenceEntry(id="E1", kind="k", path=path, sha256="", size=0))


def test_an_artefact_inside_is_found(tmp_path: Path) -> None:
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "a").write_text("x")
    view = RunView(tmp_path, RunRecord(scenario="d", ground="cpu"), None, ())
    assert view.artefact(EvidenceEntry(id="E1", kind="k", path="evidence/a", sha256="", size=1)).read_text() == "x"


def test_timeline_half_lines_and_garbage_are_named_and_the_rest_read(tmp_path: Path) -> None:
    long = b'{"kind": "' + b"x" * (3 << 20) + b'"}\n'
    (tmp_path / "timeline.jsonl").write_bytes(
        b'{"kind": "a"}\n' + b"\xff\xfe\n" + b"[1]\n" + long + b'{"nokind": 1}\n' + b'{"kind": "b"}\n' + b'{"kind": "half'
    )
    lines = list(read_timeline(tmp_path))
    assert [line["kind"] for line in lines if isinstance(line, dict)] == ["a", "b"]
    assert [item.what.split()[-1] for item in lines if isinstance(item, Unread)] == ["2", "3", "4", "5", "7"]


def test_a_timeline_that_never_ends_is_cut(tmp_path: Path) -> None:
    (tmp_path / "timeline.jsonl").write_bytes(b'{"kind": "a"}\n' * 50)
    lines = list(read_timeline(tmp_path, limit=10))
    assert len(lines) == 11
    assert isinstance(lines[-1], Unread)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(run=_JSON, diagnosis=_JSON, index=_JSON)
def test_any_json_gives_a_view_or_a_typed_error(tmp_path: Path, run: Any, diagnosis: Any, index: Any) -> None:
    (tmp_path / "evidence").mkdir(exist_ok=True)
    base = {"schema": "dsv4-repro/run/1", "scenario": "drain", "ground": "cpu"}
    merged = {**base, **run} if isinstance(run, dict) else base
    (tmp_path / "run.json").write_text(json.dumps(merged))
    (tmp_path / "diagnosis.json").write_text(json.dumps(diagnosis))
    (tmp_path / "evidence" / "index.json").write_text(json.dumps({"entries": index}))
    try:
        view = open_run(tmp_path)
    except RunStoreError as error:
        event("typed error")
        named = str(error)
    else:
        event("view")
        named = f"run.json of {view.run.scenario}"
    assert "run.json" in named


def test_a_path_that_is_not_there_is_said_to_be_missing_and_not_to_be_another_thing(tmp_path: Path) -> None:
    with pytest.raises(RunStoreError, match="there is no such run directory"):
        open_run(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunStoreError, match="not a run directory"):
        open_run(tmp_path / "file")
