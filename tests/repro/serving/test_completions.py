"""The client against every trouble: each is an outcome by kind, in time, and nothing is raised."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from dsv4_repro.clock import SYSTEM
from dsv4_repro.repro.serving.completion_stream import scrub, shown_url
from dsv4_repro.repro.serving.completions import FillerRequests, complete_once, token_prompt

from .completions_server import CompletionsServer, serving

SECRET = "Bearer sk-0123456789"


def test_a_completion() -> None:
    with serving(CompletionsServer()) as server:
        outcome = complete_once(server.url + "/", "m", prompt_tokens=8, max_tokens=6, timeout_s=5)
    assert outcome.completed
    assert not outcome.fault
    assert (outcome.tokens, outcome.counted, outcome.finish_reason, outcome.status) == (6, "usage", "length", 200)
    assert outcome.token_ids is not None
    assert len(outcome.token_ids) == 6
    assert outcome.accepted_at is not None
    assert outcome.first_token_at is not None
    assert outcome.sent_at <= outcome.accepted_at <= outcome.first_token_at <= outcome.ended_at
    sent = server.seen_headers[0]
    assert sent["accept-encoding"] == "identity"
    assert sent["x-request-id"].startswith("dsv4-repro-canary-")


def test_the_same_prompt_gives_the_same_answer_and_another_another() -> None:
    with serving(CompletionsServer()) as server:
        one, again, other = (complete_once(server.url, "m", timeout_s=5, seed=seed) for seed in (1, 1, 2))
    assert one.token_ids == again.token_ids != other.token_ids
    assert one.text_sha256 == again.text_sha256 != other.text_sha256


@pytest.mark.parametrize(
    ("trouble", "kind", "tokens"),
    [
        ("429", "too-many-requests", 0),
        ("503", "unavailable", 0),
        ("500", "server-error", 0),
        ("404", "http-status", 0),
        ("reset", "reset", 4),
        ("cut", "reset", 4),
        ("stall", "slow", 4),
        ("slow-headers", "slow", 0),
        ("garbage", "malformed", 0),
        ("not-json", "malformed", 0),
        ("endless-line", "overrun", 0),
        ("error-event", "server-error", 1),
        ("abort", "server-error", 1),
        ("gzip", "malformed", 0),
        ("too-many-tokens", "malformed", 0),
        ("backwards", "malformed", 2),
    ],
)
def test_every_trouble_is_a_client_fault_of_its_kind(trouble: str, kind: str, tokens: int) -> None:
    with serving(CompletionsServer(trouble=trouble, acceptance=0.0)) as server:
        began = SYSTEM.monotonic()
        outcome = complete_once(server.url, "m", max_tokens=8, timeout_s=1.0, headers={"Authorization": SECRET})
        took = SYSTEM.monotonic() - began
    assert (outcome.kind, outcome.tokens) == (kind, tokens), outcome.detail
    assert outcome.fault
    assert not outcome.completed
    assert took < 3.0
    assert "sk-" not in outcome.detail


def test_an_endless_response_ends_by_size_or_by_time() -> None:
    with serving(CompletionsServer(trouble="endless")) as server:
        outcome = complete_once(server.url, "m", timeout_s=1.0)
    assert outcome.kind in ("overrun", "slow")
    assert outcome.took_s < 3.0


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        outcome = complete_once(f"http://127.0.0.1:{free.getsockname()[1]}", "m", timeout_s=2)
    assert outcome.kind == "refused"


def test_a_port_that_accepts_and_says_nothing() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        outcome = complete_once(f"http://127.0.0.1:{mute.getsockname()[1]}", "m", timeout_s=0.5)
    assert (outcome.kind, outcome.accepted_at) == ("slow", None)


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://[::1", "http://127.0.0.1:99999", "not a url", "file:///etc"])
def test_what_is_no_url(url: str) -> None:
    assert complete_once(url, "m", timeout_s=1).kind == "unreachable"


def test_from_a_thread_with_a_running_loop() -> None:
    async def main(url: str) -> str:
        return complete_once(url, "m", timeout_s=5).kind

    with serving(CompletionsServer()) as server:
        assert asyncio.run(main(server.url)) == "completed"


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    with serving(CompletionsServer(trouble="stall")) as server:
        for _ in range(3):
            complete_once(server.url, "m", timeout_s=0.2)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_fillers_wait_in_a_wedged_server_and_end_on_leaving() -> None:
    with serving(CompletionsServer(wedge_at=2)) as server:
        with FillerRequests(server.url, "m", 2) as fillers:
            assert fillers.wait_accepted(5)
            assert (fillers.count, fillers.accepted, fillers.open) == (2, 2, 2)
            began = SYSTEM.monotonic()
        assert SYSTEM.monotonic() - began < 2.0
        assert {outcome.kind for outcome in fillers.outcomes} == {"cancelled"}
        assert fillers.faults == {}
        assert fillers.open == 0
        for _ in range(100):
            if server.disconnects == 2:
                break
            SYSTEM.sleep(0.02)
        assert server.disconnects == 2, "the server must see its clients gone"


def test_fillers_that_are_refused_say_so_at_once() -> None:
    with FillerRequests("http://127.0.0.1:1", "m", 3) as fillers:
        began = SYSTEM.monotonic()
        assert not fillers.wait_accepted(30)
        assert SYSTEM.monotonic() - began < 5.0
        assert fillers.faults == {"refused": 3}


def test_fillers_that_complete() -> None:
    with serving(CompletionsServer()) as server, FillerRequests(server.url, "m", 2, max_tokens=8) as fillers:
        for _ in range(200):
            if len(fillers.outcomes) == 2:
                break
            SYSTEM.sleep(0.02)
        assert fillers.tokens == 16
        assert all(outcome.completed for outcome in fillers.outcomes)


def test_no_fillers_and_too_many() -> None:
    with FillerRequests("http://127.0.0.1:1", "m", 0) as none:
        assert none.wait_accepted(1)
    with pytest.raises(ValueError, match="fillers"):
        FillerRequests("http://127.0.0.1:1", "m", 1 << 20)


def test_prompts_are_the_same_for_ever() -> None:
    assert token_prompt(4, 0) == (3393, 3056, 1740, 1109)
    assert token_prompt(4, 0, (5, 6)) == (5, 5, 5, 5)


def test_what_is_shown_has_no_secrets() -> None:
    assert shown_url("http://user:pass@host:80/v/?key=1#x") == "http://host:80/v"
    assert shown_url("http://[::1]:8000/") == "http://[::1]:8000"
    assert scrub("bad key sk-0123456789\n\x1b[2J", {"Authorization": SECRET}) == "bad key [redacted]  [2J"
