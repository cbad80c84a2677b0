"""The records of the requests: written as it happens, read back with doubt, compared up to where they agree."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import RunStoreError
from dsv4_repro.repro.serving.request_records import RecordWriter, RequestRecord, compare_outputs, read_requests


def written(tmp_path: Path, *lines: dict[str, Any], tail: bytes = b"") -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines) + tail)
    return path


SENT = {"event": "sent", "id": "a", "wave": "w", "at": 1.0, "prompt_sha256": "p", "max_tokens": 4}
TOKENS = {"event": "tokens", "id": "a", "at": [2.0, 3.0], "n": [1, 3], "ids": [[7], [8, 9]]}
END = {"event": "end", "id": "a", "at": 4.0, "kind": "completed", "finish_reason": "length"}


def test_a_request_is_read_back(tmp_path: Path) -> None:
    accepted = {"event": "accepted", "id": "a", "at": 1.5}
    path = written(tmp_path, {"event": "load"}, SENT, accepted, TOKENS, {"event": "steer"}, END, {"event": "unheard-of"})
    (record,) = read_requests(path).values()
    assert record == RequestRecord(
        id="a", wave="w", prompt_sha256="p", max_tokens=4, sent_at=1.0, accepted_at=1.5, ended_at=4.0, kind="completed",
        finish_reason="length", arrivals=((2.0, 1), (3.0, 3)), token_ids=(7, 8, 9),
    )  # fmt: skip
    assert (record.tokens, record.first_token_at) == (3, 2.0)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_crash_leaves_all_but_the_last_line(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path, SENT, TOKENS, tail=(json.dumps(END).encode() + b"\n")[:-cut])
    (record,) = read_requests(path).values()
    assert (record.kind, record.tokens) == ("", 3)


@pytest.mark.parametrize(
    "line",
    [
        [],
        {"event": "tokens", "id": "nobody", "at": [], "n": []},
        {"event": "end", "id": "a"},
        {"event": "tokens", "id": "a", "at": [1.0], "n": [1, 2]},
        {"event": "tokens", "id": "a", "at": ["x"], "n": [1], "ids": [[1]]},
        {"event": "tokens", "id": "a", "at": [1.0], "n": [1], "ids": 5},
        {"event": "sent", "id": "a"},
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: Any) -> None:
    path = written(tmp_path, SENT, line, END)
    with pytest.raises(RunStoreError, match=r"requests\.jsonl: line 2"):
        read_requests(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(RunStoreError, match="cannot be read"):
        read_requests(tmp_path / "none")
    with pytest.raises(RunStoreError):
        read_requests(tmp_path)
    endless = tmp_path / "endless"
    endless.write_bytes(b"{" * (5 << 20))
    with pytest.raises(RunStoreError, match="larger"):
        read_requests(endless)
    with pytest.raises(RunStoreError, match="larger"):
        read_requests(written(tmp_path, SENT, TOKENS), max_bytes=150)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "requests.jsonl")
    with pytest.raises(RunStoreError):
        read_requests(link)


def test_the_writer_appends_is_private_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "requests.jsonl"
    writer = RecordWriter(path, max_bytes=200)
    writer.write("sent", id="a", wave="w", at=1.0, prompt_sha256="p", max_tokens=4)
    for count in range(1, 100):
        writer.write("tokens", bounded=True, id="a", at=[1.0], n=[count], ids=[[count]])
    writer.write("end", id="a", at=2.0, kind="completed")
    writer.close()
    writer.close()
    writer.write("late")
    kinds = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert kinds[0] == "sent"
    assert kinds.count("truncated") == 1
    assert kinds[-1] == "end"
    assert path.stat().st_size < 600
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_requests(path)["a"].kind == "completed"


def test_a_full_disk_is_said_and_stops_nothing(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "requests.jsonl")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._fd)
    os.close(full)
    writer.write("sent", id="a")
    writer.write("sent", id="b")
    assert "full" in writer.error
    writer.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunStoreError):
        RecordWriter(tmp_path / "file" / "requests.jsonl")


def record(name: str, ids: tuple[int, ...] | None = (1, 2, 3), **changes: Any) -> RequestRecord:
    made = RequestRecord(
        id=name, wave="w", prompt_sha256="p", max_tokens=4, sent_at=0.0, kind="completed", token_ids=ids,
        arrivals=((1.0, len(ids or (1, 2, 3))),),
    )  # fmt: skip
    return replace(made, **changes)


def test_outputs_are_compared_up_to_where_they_agree() -> None:
    one = {
        "same": record("same"),
        "cut": record("cut"),
        "other": record("other"),
        "first": record("first"),
        "alone": record("alone"),
        "prompt": record("prompt"),
        "none": record("none", None, arrivals=()),
        "text": record("text", None, texts={1: "a", 2: "b", 3: "c"}),
        "text-cut": record("text-cut", None, texts={1: "a", 3: "c"}),
        "text-other": record("text-other", None, texts={1: "a", 2: "b"}),
        "apart": record("apart", None, texts={1: "a"}),
    }
    two = {
        "same": record("same"),
        "cut": record("cut", (1, 2)),
        "other": record("other", (1, 9, 3)),
        "first": record("first", (0, 2, 3)),
        "prompt": record("prompt", prompt_sha256="q"),
        "none": record("none"),
        "text": record("text", None, texts={3: "c"}),
        "text-cut": record("text-cut", None, texts={1: "a"}, arrivals=((1.0, 1),)),
        "text-other": record("text-other", None, texts={1: "a", 2: "x"}),
        "apart": record("apart", None, texts={2: "b"}),
    }
    found = compare_outputs(one, two)
    assert found.equal == ("same", "text")
    assert found.agree == {"cut": 2, "text-cut": 1}
    assert found.differ == {"other": 1, "first": 0, "text-other": 1}
    assert set(found.unknown) == {"alone", "prompt", "none", "apart"}
    assert found.same is False
    assert found.compared_tokens == 5
    said = "\n".join(found.lines())
    assert "2 requests have the same output, whole" in said
    assert "2 agree as far as both go: 1 to 2 tokens" in said
    assert "first differs after 0 tokens" in said


def test_nothing_compared_is_neither_same_nor_different() -> None:
    found = compare_outputs({"a": record("a")}, {})
    assert found.same is None
    assert compare_outputs({}, {}).lines() == ["no requests to compare"]
    assert compare_outputs({"a": record("a")}, {"a": record("a")}).same is True
