"""Does a CUDA process survive cuda-gdb attaching to it? Own small programs in five states, a new process for each attach.

    PYTHONPATH=PARENT python benchmarks/attach_survival.py --out DIR [--each 24] [--parallel 8] [--budget-s 220] [--gpu 0]

States: ``hung`` (a kernel waits for ever), ``busy`` (1 ms kernels without a gap), ``recovered`` (hung for a second, released by
itself, idle for 0 to 0.3 s), ``capturing`` (captures, instantiates and launches graphs without a break), ``exiting`` (the process
is on its way out).

Survived means: 2 s after the detach the process lives, goes on as before (``hung``: still hung), and ends in its own time with
the right result. Of ``exiting``: it ended with status 0, and in time. Of ``hung`` the end is not asked for: after an attach the
process's own side stream writes nothing any more, so it cannot free itself; whether it could is counted as ``freed_itself``.
Written after every attach, so that a second start with the same ``--out`` goes on; each attach and child has its own deadline.
``--dry`` runs children without a GPU and a debugger that only stops and continues them: for the script itself, nothing of it is a
measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
STATES = ("hung", "busy", "recovered", "capturing", "exiting")
SOURCE = b"""
extern "C" __global__ void spin(volatile int *flag, int *out) { while (*flag == 0) { } out[0] = 12345; }
extern "C" __global__ void work(int *out, long long ticks) {
    long long begin = clock64();
    while (clock64() - begin < ticks) { }
    atomicAdd(out, 1);
}
"""
READY_S, DEBUGGER_S, END_S = 40.0, 40.0, 15.0


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:7.2f}] {text}", flush=True)


# -- the child ---------------------------------------------------------------------------------------------------------------------


def report(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


class Orders:
    """Lines of standard input, looked at without waiting."""

    def __init__(self) -> None:
        self._rest = b""

    def got(self, word: str) -> bool:
        while select.select([0], [], [], 0)[0]:
            raw = os.read(0, 4096)
            if not raw:
                os._exit(9)
            self._rest += raw
        return word.encode() in self._rest


def child_dry(state: str) -> None:
    orders = Orders()
    report("ready")
    beat = 0
    while not orders.got("finish"):
        if state == "exiting" and orders.got("exit"):
            break
        if state != "hung":
            beat += 1
            report(f"beat {beat}")
        time.sleep(0.05)
    report("result ok")


def child(state: str, cubin: Path) -> None:
    """Beats are finished pieces of GPU work. "finish" on standard input ends it; "exit" starts the way out."""
    from dsv4_repro.kernels.driver import Driver

    driver = Driver()
    driver.init()
    driver.open(0)
    code = cubin.read_bytes()
    spin, work = driver.load(code, "spin"), driver.load(code, "work")
    stream, side = driver.stream(), driver.stream(highest_priority=True)
    flag, out, count = driver.alloc(16), driver.alloc(16), driver.alloc(16)
    pinned = driver.pinned(64)
    done = driver.event()
    for address in (flag, out, count):
        driver.fill(address, 0, 4, stream)
    wait = [flag.to_bytes(8, "little"), out.to_bytes(8, "little")]
    piece = [count.to_bytes(8, "little"), (1_500_000).to_bytes(8, "little")]
    orders = Orders()
    launched = beats = 0

    def finish(event: Any) -> None:
        end = time.monotonic() + 10.0
        while not driver.finished(event):
            if time.monotonic() > end:
                report("error: the work did not end")
                os._exit(3)
            time.sleep(0.0005)

    def result(address: int, expected: int) -> None:
        driver.copy_out(pinned.address, address, 4, stream)
        driver.record(done, stream)
        finish(done)
        # Each of the 32 lanes adds one a launch.
        report("result ok" if pinned.i32(0) == expected else f"result wrong: {pinned.i32(0)} for {expected}")

    def batch(number: int) -> None:
        nonlocal launched, beats
        for _ in range(number):
            driver.launch(work, 1, 32, 0, piece, stream)
        launched += number
        driver.record(done, stream)
        finish(done)
        beats += 1
        report(f"beat {beats}")

    # Side stream and event are used once before they are needed.
    driver.fill(count, 0, 4, side)
    driver.record(done, side)
    finish(done)
    if state in ("hung", "recovered"):
        driver.launch(spin, 1, 32, 0, wait, stream)
        driver.record(done, stream)
        time.sleep(0.3)
        if driver.finished(done):
            report("error: the kernel did not wait")
            os._exit(3)
        if state == "hung":
            report("ready")
            while not orders.got("finish"):
                time.sleep(0.02)
                if driver.finished(done):
                    report("error: the kernel ended by itself")
                    os._exit(3)
        else:
            time.sleep(0.7)
        driver.fill(flag, 1, 1, side)
        finish(done)
        if state == "recovered":
            report("ready")
            # Idle, with a piece of work now and then, as a server that waits for requests.
            while not orders.got("finish"):
                time.sleep(0.3)
                batch(1)
        result(out, 12345)
        return
    if state == "capturing":
        first = True
        while first or not orders.got("finish"):
            driver.begin_capture(stream)
            for _ in range(20):
                driver.launch(work, 1, 32, 0, [piece[0], (1000).to_bytes(8, "little")], stream)
                time.sleep(0.002)
            graph = driver.instantiate(driver.end_capture(stream))
            driver.replay(graph, stream)
            launched += 20
            driver.record(done, stream)
            finish(done)
            beats += 1
            report(f"beat {beats}")
            if first:
                report("ready")
                first = False
        result(count, 32 * launched)
        return
    batch(4)
    report("ready")
    while not orders.got("finish"):
        if state == "exiting" and orders.got("exit"):
            break
        batch(4)
    result(count, 32 * launched)


# -- the parent --------------------------------------------------------------------------------------------------------------------


class Child:
    """A child and what it has said."""

    def __init__(self, argv: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.lines: list[str] = []
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, env=environment, start_new_session=True
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            self.lines.append(raw.decode(errors="replace").strip())

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(word.encode() + b"\n")
            self.process.stdin.flush()

    def said(self, word: str) -> bool:
        return any(line.startswith(word) for line in list(self.lines))

    @property
    def beats(self) -> int:
        return sum(1 for line in list(self.lines) if line.startswith("beat"))

    def wait_for(self, word: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.said(word) and self.process.poll() is None:
            time.sleep(0.01)
        return self.said(word)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


def state_letter(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"


def attach(args: argparse.Namespace, pid: int, environment: dict[str, str], log: Path) -> dict[str, Any]:
    """Attach, list kernels, detach. Waited for; a debugger that does not end is told so and left until its target is ended."""
    if args.dry:
        argv = ["bash", "-c", f"kill -STOP {pid}; sleep 0.1; kill -CONT {pid}; echo Detaching"]
    else:
        argv = [str(args.cuda_gdb), "-q", "-batch", "-iex", "set auto-solib-add off", "-iex", "set pagination off"]
        argv += ["-iex", "set auto-load python-scripts off", "-p", str(pid), "-ex", "info cuda kernels", "-ex", "detach"]
    began = time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    facts: dict[str, Any] = {"process": process}
    try:
        facts["status"] = process.wait(DEBUGGER_S)
    except subprocess.TimeoutExpired:
        facts["status"] = None
    facts["seconds"] = time.monotonic() - began
    text = log.read_bytes().decode(errors="replace")
    facts["attached"] = args.dry or ("Could not attach" not in text and "ptrace" not in text.lower())
    facts["kernels"] = "No CUDA kernels" not in text
    facts["tail"] = text[-600:]
    return facts


def trial(args: argparse.Namespace, state: str, number: int) -> dict[str, Any]:
    """One process, one attach."""
    name = f"{state}-{number}"
    folder = args.out / "trials" / name
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    (folder / "home").mkdir(exist_ok=True)
    # The debugger and its target meet in TMPDIR; a pair of its own lets several work at once.
    environment = {
        **os.environ, "TMPDIR": str(folder / "tmp"), "HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": str(args.gpu),
        "DEBUGINFOD_URLS": "",
    }  # fmt: skip
    own = [sys.executable, str(Path(__file__).resolve()), "--child", state, *(["--dry"] if args.dry else [])]
    one = Child([*own, "--cubin", str(args.out / "patients.cubin")], environment, folder / "stderr.txt")
    row: dict[str, Any] = {"state": state, "number": number, "survived": None, "why": ""}
    debugger: Any = None
    try:
        if not one.wait_for("ready", READY_S):
            row["why"] = f"the child did not get ready: {one.lines[-2:]}"
            return row
        chance = random.Random(f"{state} {number}")
        row["delay_s"] = round(chance.uniform(0.0, 0.3 if state == "recovered" else 0.1), 4)
        if state == "exiting":
            # The debugger needs some time until it attaches: told beforehand, the process would be gone by then.
            row["delay_s"] = round(chance.uniform(0.0, 0.7), 4)
            threading.Timer(row["delay_s"], one.tell, ("exit",)).start()
        else:
            time.sleep(row["delay_s"])
        for_debugger = {key: value for key, value in environment.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        seen = attach(args, one.process.pid, for_debugger, folder / "cuda_gdb.txt")
        debugger = seen.pop("process")
        row["debugger"] = seen
        row.update(judge(one, state))
    finally:
        one.end()
        if debugger is not None and debugger.poll() is None:
            row["why"] += "; the debugger had not ended" if row["why"] else "the debugger had not ended"
            debugger.kill()
            debugger.wait(10)
    return row


def judge(one: Child, state: str) -> dict[str, Any]:
    """After the detach: does it go on, and does it end right."""
    if state == "exiting":
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(END_S)
        status = one.process.poll()
        right = status == 0 and one.said("result ok")
        return {"survived": right, "why": "" if right else f"status {status}, said {one.lines[-2:]}"}
    before = one.beats
    time.sleep(2.0)
    status = one.process.poll()
    if status is not None:
        return {"survived": False, "why": f"it had ended with status {status} 2 s after the detach; said {one.lines[-2:]}"}
    if state_letter(one.process.pid) in ("T", "t"):
        return {"survived": False, "why": "it stayed stopped"}
    if one.said("error"):
        return {"survived": False, "why": next(line for line in one.lines if line.startswith("error"))}
    if state != "hung" and one.beats == before:
        return {"survived": False, "why": "it did no more work in 2 s"}
    one.tell("finish")
    with contextlib.suppress(subprocess.TimeoutExpired):
        one.process.wait(END_S)
    status = one.process.poll()
    right = status == 0 and one.said("result ok")
    if state == "hung":
        return {"survived": True, "why": "", "freed_itself": right}
    return {"survived": right, "why": "" if right else f"ended with status {status}, said {one.lines[-2:]}"}


def bounds(survived: int, trials: int, z: float = 1.959964) -> dict[str, Any]:
    """Share that survived with Wilson's 95 % interval; where all did, the rule of three for the share that does not."""
    if not trials:
        return {"trials": 0}
    share = survived / trials
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    found = {"trials": trials, "survived": survived, "wilson_95": [max(middle - half, 0.0), min(middle + half, 1.0)]}
    if survived == trials:
        # Exact for no failure: 1 - 0.05 ** (1 / n), about 3 / n.
        found["at_most_lost_95"] = 1.0 - 0.05 ** (1.0 / trials)
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By state. A trial whose attach did not happen, or that never got ready, says nothing about survival: counted apart."""
    result = {}
    for state in STATES:
        own = [row for row in rows if row["state"] == state]
        judged = [row for row in own if row["survived"] is not None and (row.get("debugger") or {}).get("attached")]
        times = sorted(row["debugger"]["seconds"] for row in judged)
        result[state] = {
            **bounds(sum(bool(row["survived"]) for row in judged), len(judged)), "not_judged": len(own) - len(judged),
            **({"freed_itself": sum(bool(row.get("freed_itself")) for row in judged)} if state == "hung" else {}),
            "debugger_s_median": times[len(times) // 2] if times else None, "why_lost": [
                row["why"] for row in judged if not row["survived"]
            ][:20],
        }  # fmt: skip
    return result


def markdown(document: dict[str, Any]) -> str:
    lines = [
        "# Attaching cuda-gdb: does the target survive?", "", f"{document['machine']}", "",
        "| state | attached | survived | 95 % (Wilson) | lost at most (95 %) | not attached or not judged | debugger, s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for state, row in document["summary"].items():
        if not row["trials"]:
            lines.append(f"| {state} | 0 | - | - | - | {row['not_judged']} | - |")
            continue
        low, high = row["wilson_95"]
        most = f"{100 * row['at_most_lost_95']:.0f} %" if "at_most_lost_95" in row else "-"
        lines.append(
            f"| {state} | {row['trials']} | {row['survived']} | {100 * low:.0f} to {100 * high:.0f} % | {most} | "
            f"{row['not_judged']} | {row['debugger_s_median']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def prepare(args: argparse.Namespace) -> dict[str, Any]:
    """The cubin for this card; what the machine is."""
    machine = {"python": sys.version.split()[0], "kernel": platform.release(), "cpus": os.cpu_count(), "dry": args.dry}
    if args.dry:
        (args.out / "patients.cubin").write_bytes(b"")
        return machine
    from dsv4_repro.forensics.collect.cuda_gdb import find_cuda_gdb
    from dsv4_repro.kernels import build

    args.cuda_gdb = args.cuda_gdb or find_cuda_gdb()
    script = "; ".join((
        "import json", "from dsv4_repro.kernels.driver import Driver", "d = Driver()", "d.init()",
        "print(json.dumps(d.describe(0).document()))",
    ))  # fmt: skip
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(args.gpu)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"no usable GPU: {done.stderr[-800:]}")
    device = json.loads(done.stdout.splitlines()[-1])
    made = build._compile(SOURCE, "attach_patients.cu", device["sm"], (), (f"--gpu-architecture=sm_{device['sm']}",))
    (args.out / "patients.cubin").write_bytes(made.cubin)
    version = subprocess.run([str(args.cuda_gdb), "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    return {
        **machine, "device": device["name"], "sm": device["sm"], "driver": device["driver_version"],
        "cuda_gdb": [line for line in version.splitlines() if line][:2],
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--each", type=int, default=24)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--budget-s", type=float, default=220.0)
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--cuda-gdb", type=Path, default=None)
    parser.add_argument("--states", default=",".join(STATES))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--child", default="")
    parser.add_argument("--cubin", type=Path, default=None)
    args = parser.parse_args(words)
    if args.child:
        if args.dry:
            child_dry(args.child)
        else:
            child(args.child, args.cubin)
        return 0
    if args.out is None:
        parser.error("--out is needed")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "attach_survival.json"
    document: dict[str, Any] = {"schema": "dsv4-repro/benchmark-attach-survival/1", "machine": prepare(args), "rows": []}
    with contextlib.suppress(OSError, ValueError, KeyError):
        document["rows"] = json.loads(path.read_text())["rows"]
    lock = threading.Lock()
    end = STARTED + args.budget_s

    def keep(row: dict[str, Any] | None) -> None:
        with lock:
            if row is not None:
                document["rows"].append(row)
            document["summary"] = summary(document["rows"])
            partial = path.with_suffix(".part")
            partial.write_text(json.dumps(document, indent=1, default=str))
            partial.replace(path)

    alone = threading.Lock()
    refused: list[str] = []

    def work(state: str, number: int) -> None:
        # Where attaches fail because several debuggers are at work, one at a time goes on.
        with alone if len(refused) >= 4 else contextlib.nullcontext():
            work_now(state, number)

    def work_now(state: str, number: int) -> None:
        # A trial takes some seven seconds; one that would not fit is left for the next start.
        if time.monotonic() + 12.0 > end:
            return
        try:
            row = trial(args, state, number)
        except Exception as error:  # one trial's failure is not the others'
            row = {"state": state, "number": number, "survived": None, "why": f"{type(error).__name__}: {error}"}
        if state != "exiting" and row.get("debugger") and not row["debugger"].get("attached"):
            refused.append(row["debugger"].get("tail", "")[-200:])
        say(f"{state} {number}: survived {row['survived']} {row['why']}")
        keep(row)

    had = {(row["state"], row["number"]) for row in document["rows"]}
    asked = [state for state in args.states.split(",") if state in STATES]
    todo = [(state, number) for number in range(args.each) for state in asked if (state, number) not in had]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ThreadPoolExecutor(args.parallel) as pool:
            for state, number in todo:
                pool.submit(work, state, number)
    except KeyboardInterrupt:
        say("interrupted")
    keep(None)
    (args.out / "attach_survival.md").write_text(markdown(document))
    say(json.dumps(document["summary"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
