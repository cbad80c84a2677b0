"""What may name a server, the same for every verb; and the hint where several fit, which names the verb that was asked.

The servers are stand-ins (a test double: nothing here is a result of vLLM or of a GPU).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dsv4_repro.clock import SYSTEM
from dsv4_repro.errors import SeveralServersError, UnavailableError, UsageError
from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.repro import watched_server
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.server_names import asked_by, http_address, server_name
from dsv4_repro.repro.serving import ranks
from dsv4_repro.repro.serving.records import ServerTarget

if TYPE_CHECKING:
    from dsv4_repro.tests.standin.run import StandIn

_Make = Callable[..., AbstractContextManager["StandIn"]]

GOOD = {
    "http://127.0.0.1:8000": "http://127.0.0.1:8000", "https://gpu7.example/v1": "https://gpu7.example/v1",
    "127.0.0.1:8000": "http://127.0.0.1:8000", "gpu7:8000/v1": "http://gpu7:8000/v1", "[::1]:8000": "http://[::1]:8000",
    "HTTP://gpu7:80": "HTTP://gpu7:80",
}  # fmt: skip
WRONG = [
    "", "foo", "localhost", "gpu7.example", "ftp://x", "file:///etc/passwd", "http://", "http:///v1", "http://h:99999", "h:99999",
    "h:0", ":8000", "8000:", "-1", "1.5", "h:80 ", "http://h\n:80", "http://[::1", "user:hunter2@host", "http:/h:80", "\u0661",
]  # fmt: skip


@pytest.mark.parametrize(("text", "address"), GOOD.items())
def test_an_address_is_taken_with_and_without_its_scheme(text: str, address: str) -> None:
    assert http_address(text) == server_name(text) == address


def test_a_pid_is_one_whatever_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("123").mkdir()
    Path("h:80").write_text("")
    assert server_name("123") == "123"
    with pytest.raises(UsageError, match="a file or a folder") as told:
        server_name("h:80")
    assert told.value.help_text == "dsv4-repro autopsy h:80"


@pytest.mark.parametrize("text", WRONG)
def test_every_other_word_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for rule in (http_address, server_name):
        with pytest.raises(UsageError, match="not an HTTP address") as told:
            rule(text)
        assert "hunter2" not in str(told.value)
        assert "http://127.0.0.1:8000" in told.value.help_text


@pytest.mark.parametrize("text", ["foo", "ftp://x", "http://h:99999"])
@pytest.mark.parametrize(
    "words",
    [
        ["watch", "--url"], ["watch", "--once", "--url"], ["why"], ["probe", "--max-stall", "9", "--url"], ["unwedge"],
        ["unwedge", "--url"], ["run", "drain", "--url"],
    ],
)  # fmt: skip
def test_every_verb_refuses_it_alike(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, text]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"{text}: not an HTTP address" in told
    assert "For example" in told
    assert list(tmp_path.iterdir()) == []


# --- several servers --------------------------------------------------------------------------------------------------------------


def test_the_hint_names_the_verb_and_one_that_can_be_pasted() -> None:
    with pytest.raises(SeveralServersError) as told, asked_by("doctor --pid"):
        raise SeveralServersError("two", [5, 6])
    assert told.value.help_text == "Name one, for example: dsv4-repro doctor --pid 5"
    assert SeveralServersError("two", [5, 6]).help_text == "Name one by its pid: 5, 6"


def test_several_servers_are_listed_and_one_is_to_be_named_to_the_verb_that_was_asked(
    stand_in: _Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_in() as first, stand_in() as second:
        above = str(os.getpid())
        out = ["--out", str(tmp_path / "runs")]
        for words, hint in (
            (["watch", *out], "watch --pid"), (["watch", "--once", *out], "watch --pid"),
            (["watch", "--pid", above, *out], "watch --pid"), (["unwedge"], "unwedge"),
            (["unwedge", above], "unwedge"), (["doctor", "--pid", above], "doctor --pid"),
            (["agent", "show", above], "agent show"), (["agent", "ask", above], "agent ask"),
            (["probe", "--max-stall", "9", "--pid", above], "probe --pid"),
            (["autopsy", above, "--attach", *out], "autopsy --attach"), (["why", above], "why"), (["why"], "why"),
        ):  # fmt: skip
            assert main(words) == 5, words
            captured = capsys.readouterr()
            told = " ".join((captured.out + captured.err).split())
            assert str(first.pid) in told, words
            assert str(second.pid) in told, words
            # Of all that are here: another test's stand-in may be the first.
            assert re.search(rf"dsv4-repro {hint} \d+", told), (words, told)
            assert "--url" in told or words[0] != "watch", told
        assert not (tmp_path / "runs" / "watch").exists()


@pytest.mark.parametrize("once", [True, False])
def test_a_watch_that_comes_to_see_several_later_says_so(
    once: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = 0

    def find(*_words: object, **_more: object) -> ServerTarget:
        nonlocal asked
        asked += 1
        if asked == 1:  # as the watch begins
            raise UnavailableError("no vLLM server is running here")
        raise SeveralServersError("2 servers are running: 5, 6", [5, 6])

    monkeypatch.setattr(ranks, "find_named", find)
    words = ["--once", "--timeout", "60"] if once else ["--timeout", "2", "--listen", "off"]
    assert main(["watch", *words, "--out", str(tmp_path)]) == (5 if once else 0)
    captured = capsys.readouterr()
    told = " ".join((captured.out + captured.err).split())
    assert "2 servers are running: 5, 6. Name one, for example: dsv4-repro watch --pid 5" in told


@pytest.mark.parametrize("more", [[], ["--once"], ["--url", "http://127.0.0.1:9"]])
def test_a_pid_that_is_none_is_refused_by_watch_at_once(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", "--pid", str(1 << 22), *more, "--out", str(tmp_path)]) == 5  # PID_MAX_LIMIT: never a pid
    assert f"no process {1 << 22}" in capsys.readouterr().err


def test_a_process_that_ends_after_the_watch_began_is_waited_for() -> None:
    child = subprocess.Popen(["sleep", "300"])
    try:
        watched_server.check_named(child.pid, None, SYSTEM)
        finder = watched_server.WatchFinder(child.pid, None, None, SYSTEM)
    finally:
        child.kill()
        child.wait()
    assert finder() is None
    assert finder.why == f"process {child.pid} is gone, and its URL was not known: where it comes back is not known"


# --- probe ------------------------------------------------------------------------------------------------------------------------


def test_a_probe_of_what_is_no_server_says_that_and_not_only_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doubt = Unread("the server", "process 7 (sh -c 'a: b') is not recognised as a vLLM server: its tree was taken as it is")
    target = ServerTarget(None, api_pid=7, engine_pids=(8,), unread=(doubt,))
    monkeypatch.setattr(ranks, "find_named", lambda *_, **__: target)
    assert main(["probe", "--max-stall", "9", "--pid", "7"]) == 5
    assert capsys.readouterr().out.startswith("unknown: process 7 (sh -c 'a: b') is not recognised as a vLLM server; no recorder")
    monkeypatch.setattr(ranks, "find_named", lambda *_, **__: ServerTarget(None, api_pid=7, engine_pids=(8,)))
    assert main(["probe", "--max-stall", "9", "--pid", "7"]) == 5
    assert capsys.readouterr().out.startswith("unknown: no recorder, and its URL is not known (--url)")
