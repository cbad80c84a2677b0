"""The observer: sources that are stuck, slow or failing block nothing, and a stand-in server that wedges is seen in time."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.clock import SYSTEM
from dsv4_repro.errors import RunStoreError
from dsv4_repro.repro.serving.observer import Observer, Periods
from dsv4_repro.repro.serving.records import Assessment, LoadSample, Rank, ServerTarget, Snapshot
from dsv4_repro.repro.serving.timed_source import Source

Start = Callable[..., AbstractContextManager[Any]]


def wait_for(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.02)
    return what()


def source(look: Callable[[], Any], **more: Any) -> Source:
    given: dict[str, Any] = {"period_s": 0.01, "stale_s": 0.2, "retry_s": 0.05, "clock": SYSTEM, **more}
    return Source("it", lambda: look, **given)


def test_a_source_that_answers() -> None:
    one = source(lambda: 7)
    one.start()
    assert wait_for(lambda: one.latest() == (7, None))
    one.stop()
    assert one.join(2)


def test_a_source_that_is_stuck_is_blind_with_its_age_and_the_look_goes_on() -> None:
    gate = threading.Event()
    one = source(lambda: gate.wait(20))
    one.start()
    time.sleep(0.3)
    value, blind = one.latest()
    assert value is None
    assert blind is not None
    assert "is stuck, the others go on" in blind.why
    gate.set()
    one.stop()
    assert one.join(2)


def test_a_source_that_fails_says_why_and_is_tried_again() -> None:
    calls: list[int] = []

    def make() -> Callable[[], int]:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("no such card")
        return lambda: 1

    one = Source("it", make, period_s=0.01, stale_s=1.0, retry_s=0.05, clock=SYSTEM)
    one.start()
    assert wait_for(lambda: "no such card" in str(one.latest()[1]))
    assert wait_for(lambda: one.latest() == (1, None))
    one.stop()
    assert one.join(2)


def test_an_observer_of_nothing_is_starting_and_names_what_it_lacks() -> None:
    observer = Observer(ServerTarget(None), cards=False, periods=Periods(judge=0.02))
    observer.start()
    assert wait_for(lambda: observer.latest() is not None)
    latest = observer.latest()
    assert latest is not None
    assert latest[1].state == "starting"
    assert observer.stop()


def test_a_server_that_starts_beside_one_that_hangs_is_not_called_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both belong to one user and share the agent's folder; the one that starts has no worker yet."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "repro" / "agent" / "src"))
    from dsv4_repro_agent.ring import Ring

    neighbour = Ring(tmp_path, slots=64, rank=0, device=0, vllm="x", agent="1")
    step = neighbour.begin(1)
    step.graph_mode, step.launch_ns, step.record_ns = 2, time.monotonic_ns() - 60 * 10**9, time.monotonic_ns() - 60 * 10**9
    neighbour.write(step)
    neighbour.beat()
    with subprocess.Popen(["sleep", "60"]) as starts:
        target = ServerTarget(None, api_pid=starts.pid, tree={starts.pid: "api"}, agent_folder=tmp_path)
        observer = Observer(target, cards=False, periods=Periods(judge=0.02))
        observer.start()
        try:
            for _ in range(20):
                time.sleep(0.1)
                neighbour.beat()
            latest = observer.latest()
        finally:
            assert observer.stop()
            starts.kill()
    assert latest is not None
    assert latest[1].state == "starting"
    assert latest[0].progress == ()


def test_a_timeline_that_cannot_be_written_does_not_blind_it() -> None:
    def emit(kind: str, **fields: Any) -> None:
        raise RunStoreError("disk full")

    observer = Observer(ServerTarget(None), cards=False, emit=emit, periods=Periods(judge=0.02, sample=0.02))
    observer.start()
    assert wait_for(lambda: observer.failures > 3)
    first = observer.latest()
    assert wait_for(lambda: observer.latest() is not first)
    assert observer.stop()


def test_a_load_that_fails_is_blind() -> None:
    class Bad:
        def sample(self) -> LoadSample:
            raise RuntimeError("loop is closed")

    observer = Observer(ServerTarget(None), load=Bad(), cards=False)
    assert any("loop is closed" in blind.why for blind in observer.snapshot().blind)


# -- with the stand-in ---------------------------------------------------------------------------------------------------------


def target_of(server: Any) -> ServerTarget:
    pids = server.pids()
    roles = {int(pid): role for pid, role in _roles(server, pids).items()}
    return ServerTarget(
        base_url=server.base_url,
        model=server.model,
        api_pid=server.pid,
        engine_pids=tuple(pid for pid, role in roles.items() if role == "engine"),
        ranks=tuple(Rank(pid, None, 0) for pid, role in roles.items() if role == "worker"),
        tree=roles,
        log_path=server.log,
        agent_folder=server.agent_folder,
    )


def _roles(server: Any, pids: Any) -> dict[int, str]:
    found: dict[int, str] = {}
    for pid in pids:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        if pid == server.pid:
            found[pid] = "api"
        elif "EngineCore" in title or pid == server.engine():
            found[pid] = "engine"
        elif "Worker" in title or "--worker" in title:
            found[pid] = "worker"
    return found


def drive(server: Any, count: int = 4, tokens: int = 4000) -> list[threading.Thread]:
    """Completions in the background, whose ends nobody waits for."""
    import json
    import urllib.request

    def one(number: int) -> None:
        body = {"model": server.model, "prompt": [1, 2, 3], "max_tokens": tokens if number else 40, "ignore_eos": True}
        request = urllib.request.Request(
            server.base_url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
        except OSError:
            pass

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


class Lines:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, **fields: Any) -> None:
        self.lines.append((kind, fields))

    def states(self) -> list[str]:
        return [fields["state"] for kind, fields in self.lines if kind == "state"]


def test_a_wedged_stand_in_is_hung_within_five_seconds_of_its_last_progress(stand_in: Start, tmp_path: Path) -> None:
    with stand_in(wedge=3, agent=tmp_path) as server:
        lines, changes = Lines(), []

        def note(snapshot: Snapshot, assessment: Assessment) -> None:
            changes.append((snapshot, assessment))

        observer = Observer(target_of(server), emit=lines, cards=False, on_change=note)
        observer.start()
        assert wait_for(lambda: (observer.latest() or (0, Assessment("starting", 0, 0)))[1].state == "healthy")
        drive(server)
        assert wait_for(lambda: lines.states()[-1:] == ["hung"], 30), lines.states()
        hung = next(one for _, one in changes if one.state == "hung")
        assert hung.at - hung.since <= 5.0
        assert hung.live_requests == 3
        assert any(blind.signal == "NVML" for blind in hung.blind)
        # One release frees one launch: the next step hangs again.
        server.release()
        time.sleep(2.0)
        assert lines.states()[-1:] == ["hung"]
        server.set(wedge="")
        server.release()
        assert wait_for(lambda: lines.states()[-1:] == ["healthy"], 20), lines.states()
        assert observer.stop()
        samples = [fields for kind, fields in lines.lines if kind == "sample"]
        assert samples[-1]["generation_tokens"] > 0
        assert 0.8 <= len(samples) / max(1.0, hung.at - changes[0][1].at) <= 12


def test_without_recorder_and_card_a_wedge_stays_suspect(stand_in: Start) -> None:
    with stand_in(wedge=3) as server:
        lines = Lines()
        observer = Observer(target_of(server), emit=lines, cards=False)
        observer.start()
        drive(server)
        assert wait_for(lambda: lines.states()[-1:] == ["suspect"], 30), lines.states()
        time.sleep(4)
        latest = observer.latest()
        assert latest is not None
        assert latest[1].state == "suspect"
        assert {"flight recorder", "NVML"} <= {blind.signal for blind in latest[1].blind}
        assert observer.stop()


@pytest.mark.parametrize("trouble", ["slow:9", "malformed", "gone", "partial"])
def test_metrics_in_trouble_blind_one_source_and_no_other(stand_in: Start, tmp_path: Path, trouble: str) -> None:
    with stand_in(agent=tmp_path) as server:
        observer = Observer(target_of(server), cards=False)
        observer.start()
        assert wait_for(lambda: (observer.latest() or (0, Assessment("starting", 0, 0)))[1].state == "healthy")
        drive(server, count=2, tokens=12_000)

        def begun() -> int:
            latest = observer.latest()
            return latest[0].progress[0].begun if latest is not None and latest[0].progress else 0

        assert wait_for(lambda: begun() > 0)
        server.set(metrics=trouble)

        def told() -> bool:
            latest = observer.latest()
            return latest is not None and any(blind.signal in ("/metrics", "metrics") for blind in latest[1].blind)

        assert wait_for(told, 15)
        before = begun()
        assert wait_for(lambda: begun() > before > 0)
        latest = observer.latest()
        assert latest is not None
        assert latest[1].state != "hung"
        assert observer.stop(5.0)
