"""``stand_in(**switches)``: the stand-in server as a context, with a free port, ended by its process group whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["ENTRY", "SITE", "StandIn", "free_port", "stand_in"]

#: ``python ENTRY serve MODEL …`` starts one; ``PYTHONPATH=SITE`` makes ``python -m vllm.entrypoints.cli.main`` one.
ENTRY = Path(__file__).resolve().parent
SITE = ENTRY / "site"
MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 1})


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class StandIn:
    """One stand-in server: where it is, and what a test does to it. ``log``: its log; ``group``: its process group."""

    def __init__(self, folder: Path, switches: Mapping[str, Any], *, port: int, environment: Mapping[str, str]) -> None:
        self.folder, self.port = folder, port
        self.switches = dict(switches)
        self.environment = dict(environment)
        self.model = "tiny-dsv32"
        self.base_url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        self.agent_folder = Path(str(self.switches["agent"])) if self.switches.get("agent") else None
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def group(self) -> int:
        return self.pid

    def start(self) -> None:
        """Start it (again); its log goes on in the same file."""
        switches = {"log": self.log, **self.switches}
        words = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in switches.items()]
        argv = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "/nonexistent/model",
            "--served-model-name", self.model, "--host", "127.0.0.1", "--port", str(self.port),
            "--speculative-config", MTP, "--standin", *words,
        ]  # fmt: skip
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                env={**os.environ, "PYTHONPATH": f"{SITE}:{os.environ.get('PYTHONPATH', '')}", **self.environment},
            )  # fmt: skip

    def wait_serving(self, seconds: float = 30.0) -> None:
        """Until ``/v1/models`` answers. Raises AssertionError with the log's end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError):
                self.get("/v1/models", timeout=1.0)
                return
            time.sleep(0.02)
        raise AssertionError(f"the stand-in does not serve: {self.text()[-2000:]}")

    def get(self, path: str, *, timeout: float = 5.0) -> bytes:
        """Body of a GET. Raises OSError (urllib's errors are)."""
        with urllib.request.urlopen(self.base_url + path, timeout=timeout) as answer:
            return bytes(answer.read())

    def post(self, path: str, document: Any, *, timeout: float = 30.0) -> Any:
        """Answer of a POST, as a document."""
        request = urllib.request.Request(
            self.base_url + path, data=json.dumps(document).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read())

    def state(self) -> dict[str, Any]:
        """What the double itself knows; ``device``: idle, busy, wedged."""
        found: dict[str, Any] = json.loads(self.get("/standin/state"))
        return found

    def set(self, **switches: Any) -> None:
        """Change switches while it runs (troubles begin at once unless ``after`` is given too)."""
        self.post("/standin/set", switches)

    def release(self) -> None:
        """The wedge or stall of now lifts."""
        self.post("/standin/act", {"kind": "release"})

    def kill_worker(self, rank: int = 0) -> None:
        """SIGKILL for a worker."""
        os.kill(self.workers()[rank], signal.SIGKILL)

    def workers(self) -> dict[int, int]:
        """rank -> pid."""
        return {int(rank): int(pid) for rank, pid in self.state()["workers"].items()}

    def engine(self) -> int:
        """pid of the engine child."""
        return int(self.state()["engine"])

    def pids(self) -> list[int]:
        """Every process of the group that runs (one that is dead and not yet reaped by init does not)."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    state, _, group = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
                    if int(group) == self.group and state not in "ZX":
                        found.append(int(entry.name))
        return sorted(found)

    def text(self) -> str:
        """Its log."""
        with contextlib.suppress(OSError):
            return self.log.read_text(encoding="utf-8", errors="replace")
        return ""

    def rotate(self) -> Path:
        """Rename the log; the server goes on in a new file of the old name."""
        number = len(list(self.folder.glob("server.log.*")))
        return self.log.rename(self.log.with_name(f"server.log.{number + 1}"))

    def truncate(self) -> None:
        """What logrotate's copytruncate does. (After ``rotate`` there may be no new file yet.)"""
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self.log, 0)

    def wait_for(self, what: str, seconds: float = 10.0) -> None:
        """Until the log has these words."""
        end = time.monotonic() + seconds
        while what not in self.text():
            assert time.monotonic() < end, f"no {what!r} in the log: {self.text()[-2000:]}"
            time.sleep(0.02)

    def wait_state(self, seconds: float = 10.0, **wanted: Any) -> dict[str, Any]:
        """Until the state has these values."""
        end = time.monotonic() + seconds
        while True:
            state = self.state()
            if all(state.get(name) == value for name, value in wanted.items()):
                return state
            assert time.monotonic() < end, f"the state is {state}, not {wanted}"
            time.sleep(0.02)

    def restart(self, **switches: Any) -> None:
        """End it and start it on the same port, with other switches if given."""
        self.end()
        self.switches |= switches
        self.start()
        self.wait_serving()

    def end(self) -> int | None:
        """SIGKILL to the group; nothing of it is left. Returns the API process's status."""
        if self.process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        status = self.process.wait(10)
        end = time.monotonic() + 5
        while self.pids() and time.monotonic() < end:
            time.sleep(0.01)
        return status

    def drain(self, *, lengths: tuple[int, ...] = (30, 200, 200, 200), prompt: int = 64) -> list[subprocess.Popen[bytes]]:
        """Streams with these output lengths, begun together, in a child whose status is the number that failed.

        The caller ends it: ``stop_clients``.
        """
        if not lengths:
            return []
        start = [sys.executable, str(ENTRY / "client.py"), self.base_url, self.model, str(prompt), *map(str, lengths)]
        return [subprocess.Popen(start, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)]


def stop_clients(clients: list[subprocess.Popen[bytes]]) -> None:
    """End the streams of ``drain``."""
    for client in clients:
        client.kill()
    for client in clients:
        client.wait()


@contextlib.contextmanager
def stand_in(
    *,
    folder: Path | None = None,
    port: int = 0,
    wait: bool = True,
    environment: Mapping[str, str] | None = None,
    **switches: Any,
) -> Iterator[StandIn]:
    """A stand-in server. ``agent=True`` puts the agent's folder into ``folder``; other switches are those of ``Settings``."""
    with contextlib.ExitStack() as stack:
        place = folder or Path(stack.enter_context(TemporaryDirectory(prefix="standin-")))
        if switches.get("agent") is True:
            switches["agent"] = place / "agent"
        elif not switches.get("agent"):
            switches.pop("agent", None)
        named = {"DSV4_REPRO_AGENT": "1", "DSV4_REPRO_AGENT_DIR": str(switches["agent"])} if switches.get("agent") else {}
        server = StandIn(place, switches, port=port or free_port(), environment={**named, **(environment or {})})
        stack.callback(server.end)
        server.start()
        if wait:
            server.wait_serving()
        yield server
