"""A soak of the server watchdog and of ``watch``: does it cry wolf in a week, does it find each hang, does it grow.

Three parts, all over test doubles (tests/standin), so figures of the watching program alone, never of a GPU or of vLLM:

``python benchmarks/watch_soak.py played --days 7`` plays a life of that many days, a look a second, through the pure watchdog:
service, idle hours, restarts, and every harmless trouble that was reported (long prefill, JIT, capture, profiler, silences that end
by themselves, metrics gone or slow, nobody looking …); then wedges, each found how long after the last progress.

``python benchmarks/watch_soak.py live --minutes 10`` runs the real ``dsv4-repro watch`` over a stand-in server under load, with as
many restarts (21) and log rotations (168) as a week may bring in that many minutes, and a network error or a harmless trouble all
the time; samples the watching process's memory, file handles, threads and CPU once a second; ends with a wedge that must be handed
over exactly once.

``python benchmarks/watch_soak.py memory --hangs 10`` runs the real ``dsv4-repro watch`` over a stand-in server with agent rings:
resident memory at the start, after 60 s of watching, after one hang and after so many; CPU of the watch alone, and of the processes
that captured. With ``--webhook`` each hang is also posted to a receiver on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from standin import played  # type: ignore[import-not-found]  # noqa: E402
from standin.run import stand_in, stop_clients  # type: ignore[import-not-found]  # noqa: E402

from dsv4_repro.repro.serving.server_watchdog import ServerWatchdog  # noqa: E402

SOURCES: dict[str, dict[str, Any]] = {
    "recorder, cards, HTTP, log": {"recorder": True, "nvml": True},
    "the same, two ranks": {"recorder": True, "nvml": True, "ranks": 2},
    "no recorder": {"recorder": False, "nvml": True},
    "no recorder, two ranks": {"recorder": False, "nvml": True, "ranks": 2},
    "recorder, no cards": {"recorder": True, "nvml": False},
    "HTTP and log alone": {"recorder": False, "nvml": False},
}


def resident() -> float:
    """MiB of this process now."""
    return float(psutil.Process().memory_info().rss) / (1 << 20)


def play_week(days: float, seed: int) -> None:
    """Alarms by source set."""
    print(f"{'sources':30} {'looks':>8} {'alarms':>7} {'suspect':>8} {'CPU s':>6} {'MiB before/after':>17}")
    for name, sources in SOURCES.items():
        watchdog, looks = ServerWatchdog(), 0
        states, alarms = Counter[str](), Counter[str]()
        before = 0.0
        cpu = time.process_time()
        alarmed = False
        for look in played.play(played.week(days * 86400, seed), seed=seed, **sources):
            state = watchdog.observe(look.snapshot).state
            looks += 1
            states[state] += 1
            false = state == "hung" or (state in ("crashed", "exited") and look.scene.alive)
            if false and not alarmed:
                alarms[f"{state} in {look.scene.name}"] += 1
            alarmed = false
            if looks == 5000:
                before = resident()
        seconds = time.process_time() - cpu
        figures = f"{looks:8} {sum(alarms.values()):7} {states['suspect']:8} {seconds:6.1f} {before:8.1f}/{resident():.1f}"
        print(f"{name:30} {figures}")
        for what, number in alarms.items():
            print(f"    {number} x {what}")


def play_hangs(number: int) -> None:
    """Seconds from the last progress to the verdict, looks four times a second."""
    print(f"\n{'hang':24} {'sources':30} {'found':>9} {'min':>5} {'median':>7} {'max':>5} s")
    for hang, (scene, limit) in played.HANGS.items():
        for name, sources in SOURCES.items():
            delays = []
            called = Counter[str]()
            for seed in range(number):
                watchdog = ServerWatchdog()
                rand = random.Random(seed)
                life = [played.Scene("serving", rand.uniform(20, 90), step_s=rand.choice([0.02, 0.05, 0.15])), scene]
                state = ""
                for look in played.play(life, seed=seed, every=0.25, **sources):
                    state = watchdog.observe(look.snapshot).state
                    if state == "hung":
                        delays.append(look.snapshot.at - look.moved)
                        break
                called[state] += 1
            if delays:
                figures = f"{min(delays):5.1f} {statistics.median(delays):7.1f} {max(delays):5.1f}"
            else:
                figures = "never: " + ", ".join(f"{state} x {times}" for state, times in called.items())
            expected = "" if limit is not None else " (nothing on the device shows it)"
            print(f"{hang:24} {name:30} {len(delays):4}/{number:<4} {figures}{expected}")


class Sampler:
    """Memory, handles, threads and CPU of a process, once a second."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.rows: list[tuple[float, int, int, float]] = []

    def look(self) -> None:
        with self._process.oneshot():
            cpu = self._process.cpu_times()
            self.rows.append(
                (
                    self._process.memory_info().rss / (1 << 20),
                    self._process.num_fds(),
                    self._process.num_threads(),
                    cpu.user + cpu.system,
                )
            )

    def words(self, seconds: float) -> str:
        size = max(len(self.rows) // 10, 1)
        parts = []
        for place, name in enumerate(("MiB", "handles", "threads")):
            values = [row[place] for row in self.rows]
            tenths = [statistics.median(values[start : start + size]) for start in range(0, size * 10, size) if values[start:]]
            parts.append(f"{name}: median of each tenth {' '.join(f'{value:.0f}' for value in tenths)}, most {max(values):.0f}")
        share = (self.rows[-1][3] - self.rows[0][3]) / seconds
        return "\n".join([*parts, f"CPU: {100 * share:.2f} % of a core"])


def _metric(url: str, name: str) -> dict[str, float]:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/metrics", timeout=2) as answer:
        lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)}
    return {}


#: What is put on the running server, for how many seconds: network errors and harmless troubles.
TROUBLES: tuple[tuple[dict[str, Any], float], ...] = (
    ({"metrics": "gone"}, 0.6),
    ({"metrics": "slow:1"}, 1.5),
    ({"metrics": "malformed"}, 0.6),
    ({"metrics": "partial"}, 0.6),
    ({"metrics": "hang"}, 2.5),
    ({"health": "gone"}, 0.6),
    ({"health": "hang"}, 2.5),
    ({"running_zero": True}, 1.5),
    ({"slow_ms": 900}, 3.0),
    ({"jit_s": 4}, 4.5),
    ({"jit_s": 4, "jit_log": False}, 4.5),
    ({"pause_s": 4}, 4.5),
    ({"log_silent": True}, 2.0),
)
HEALED = {
    "metrics": "", "health": "", "running_zero": False, "slow_ms": 0, "jit_s": 0, "jit_log": True, "pause_s": 0,
    "log_silent": False,
}  # fmt: skip


def live(minutes: float, seed: int) -> None:
    """The verb over a stand-in."""
    rand = random.Random(seed)
    seconds = minutes * 60
    with tempfile.TemporaryDirectory() as name, stand_in(step_ms=25, agent=True, stats_s=2) as server:
        folder = Path(name)
        fired = folder / "fired"
        port = server.port + 1 if server.port < 65000 else server.port - 1
        command = [
            sys.executable, "-m", "dsv4_repro.repro", "watch", "--url", server.base_url, "--listen", f"127.0.0.1:{port}",
            "--on-hang", f"echo x >> {fired}", "--out", str(folder / "runs"),
        ]  # fmt: skip
        with (folder / "watch.log").open("wb") as out:
            watch = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        sampler = Sampler(watch.pid)
        clients: list[subprocess.Popen[bytes]] = []
        done = Counter[str]()
        states = Counter[str]()
        began = time.monotonic()
        next_restart, next_rotation, next_error, next_sample = seconds / 22, seconds / 168, 1.0, 3.0
        healed_at: float | None = None
        try:
            while (passed := time.monotonic() - began) < seconds:
                assert watch.poll() is None, (folder / "watch.log").read_text()[-2000:]
                if not clients or clients[0].poll() is not None:
                    stop_clients(clients)
                    clients = server.drain(lengths=tuple(rand.randint(20, 400) for _ in range(rand.randint(1, 8))))
                    done["loads"] += 1
                if healed_at is not None and passed >= healed_at:
                    healed_at = None
                    server.set(**HEALED)
                if healed_at is None and passed >= next_error:
                    trouble, lasts = rand.choice(TROUBLES)
                    server.set(**trouble)
                    done["network errors" if {"metrics", "health"} & set(trouble) else "other troubles"] += 1
                    healed_at, next_error = passed + lasts, passed + lasts + rand.uniform(0.1, 0.6)
                if passed >= next_rotation:
                    next_rotation += seconds / 168
                    if rand.random() < 0.5 and server.log.exists():
                        server.rotate().unlink()
                    else:
                        server.truncate()
                    done["rotations"] += 1
                if passed >= next_restart:
                    next_restart += seconds / 22
                    stop_clients(clients)
                    clients = []
                    server.restart()
                    healed_at = None
                    done["restarts"] += 1
                if passed >= next_sample:
                    next_sample += 1.0
                    sampler.look()
                    for line, value in _metric(f"http://127.0.0.1:{port}", "dsv4_repro_watch_state{").items():
                        if value == 1:
                            states[line.partition('state="')[2].partition('"')[0]] += 1
                time.sleep(0.05)
            stop_clients(clients)
            clients = []
            alarms = len(fired.read_text().splitlines()) if fired.exists() else 0
            print(f"events in {minutes:g} minutes: {', '.join(f'{number} {what}' for what, number in sorted(done.items()))}")
            print(f"states seen, one look a second: {dict(states)}")
            print(f"false alarms: {alarms}")
            print(sampler.words(seconds))
            server.restart(wedge=3)
            clients = server.drain(lengths=(40, 400, 400, 400))
            server.wait_state(wedged=True, seconds=20)
            wedged = time.monotonic()
            while not fired.exists() or len(fired.read_text().splitlines()) <= alarms:
                assert time.monotonic() - wedged < 60, (folder / "watch.log").read_text()[-3000:]
                time.sleep(0.05)
            print(f"then a wedge: the command ran {time.monotonic() - wedged:.1f} s after it", end="")
            time.sleep(15)
            print(f", {len(fired.read_text().splitlines()) - alarms} time(s) in 15 s more; handles {sampler._process.num_fds()}")
            runs = sorted(path.name for path in (folder / "runs").rglob("diagnosis.json"))
            print(f"run directories with a diagnosis: {len(runs)}")
        finally:
            stop_clients(clients)
            watch.terminate()
            watch.wait(20)


@contextlib.contextmanager
def receiver() -> Iterator[tuple[str, list[int]]]:
    """A URL that takes messages, and how long each of them was."""
    sizes: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sizes.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", sizes
    finally:
        server.shutdown()
        server.server_close()


def _row(what: str, process: psutil.Process) -> None:
    with process.oneshot():
        cpu, status = process.cpu_times(), Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
        peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        mib = process.memory_info().rss / (1 << 20)
        print(
            f"{what:24} {mib:6.1f} {peak:6.1f} {process.num_fds():8} {process.num_threads():8} {cpu.user + cpu.system:8.2f} "
            f"{cpu.children_user + cpu.children_system:10.2f}",
            flush=True,
        )


def memory(hangs: int, quiet_s: float, webhook: bool) -> None:
    """The verb's memory over its first hangs."""
    with tempfile.TemporaryDirectory() as name, stand_in(step_ms=25, agent=True, wedge=3) as server, receiver() as (url, sizes):
        folder = Path(name)
        fired = folder / "fired"
        command = [
            sys.executable, "-m", "dsv4_repro.repro", "watch", "--url", server.base_url, "--listen", "127.0.0.1:0",
            "--on-hang", f"echo x >> {fired}", "--out", str(folder / "runs"), *(["--webhook", url] if webhook else []),
        ]  # fmt: skip
        with (folder / "watch.log").open("wb") as out:
            watch = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        process = psutil.Process(watch.pid)
        clients: list[subprocess.Popen[bytes]] = []
        print(f"{'when':24} {'MiB':>6} {'peak':>6} {'handles':>8} {'threads':>8} {'CPU s':>8} {'children s':>10}")
        try:
            while "watching: " not in (folder / "watch.log").read_text():
                assert watch.poll() is None, (folder / "watch.log").read_text()[-2000:]
                time.sleep(0.1)
            _row("at the start", process)
            clients = server.drain(lengths=(100000,) * 8)
            time.sleep(2.0)
            before, at = process.cpu_times(), time.monotonic()
            time.sleep(quiet_s)
            after, took = process.cpu_times(), time.monotonic() - at
            _row(f"after {quiet_s:g} s", process)
            print(f"CPU while the server serves: {100 * (after.user + after.system - before.user - before.system) / took:.2f} %")
            for number in range(1, hangs + 1):
                stop_clients(clients)
                server.restart()
                clients = server.drain(lengths=(40, 400, 400, 400))
                until = time.monotonic() + 120
                while not fired.exists() or len(fired.read_text().splitlines()) < number:
                    assert watch.poll() is None, (folder / "watch.log").read_text()[-3000:]
                    assert time.monotonic() < until, (folder / "watch.log").read_text()[-3000:]
                    time.sleep(0.1)
                time.sleep(3.0)
                if number in (1, 2, 5, 10, 20, 50, 100) or number == hangs:
                    _row(f"after {number} hang(s)", process)
            before, at = process.cpu_times(), time.monotonic()
            time.sleep(20.0)
            after, took = process.cpu_times(), time.monotonic() - at
            print(f"CPU while the server hangs: {100 * (after.user + after.system - before.user - before.system) / took:.2f} %")
            runs = len(list((folder / "runs").rglob("diagnosis.json")))
            print(f"run directories with a diagnosis: {runs}; messages: {len(sizes)}")
        finally:
            stop_clients(clients)
            watch.terminate()
            watch.wait(20)


def main() -> int:
    """Print the figures and where they come from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["played", "live", "memory"])
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--hangs", type=int, default=None, help="50 lives of each hang, or 10 hangs of memory")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds of watching before the first hang")
    parser.add_argument("--webhook", action="store_true")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    revision = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    facts = {"python": platform.python_version(), "cpus": os.cpu_count(), "commit": revision, "seed": flags.seed}
    print(f"{time.strftime('%Y-%m-%d %H:%M')} {json.dumps(facts)}")
    if flags.part == "played":
        play_week(flags.days, flags.seed)
        play_hangs(flags.hangs or 50)
    elif flags.part == "memory":
        memory(flags.hangs or 10, flags.quiet, flags.webhook)
    else:
        live(flags.minutes, flags.seed)
    print(f"peak memory of this program: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
