"""The engine child of the stand-in: starts workers, goes through a start's phases, then steps; waits for its workers as vLLM does.

Speaks JSON lines: with the API process over stdin and stdout, with each worker over pipes. One thread; what waits is ``select``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .process import Log, SimClock, set_title
from .scheduler import Batch, Scheduler
from .settings import PHASES, Settings

__all__ = ["main"]

VERSION = "0.23.0"
SHM = (
    "No available shared memory broadcast block found in {seconds:.0f} seconds. This typically happens when some processes are "
    "hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization)."
)


class DeadError(Exception):
    """The engine is at its end; ``args[0]`` is what it says."""


class Pipe:
    """Lines from a descriptor that is also waited for."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.open = True
        self._rest = b""

    def fileno(self) -> int:
        return self.fd

    def read(self) -> list[dict[str, Any]]:
        """What is there now; ``open`` turns false at the end."""
        try:
            raw = os.read(self.fd, 1 << 16)
        except OSError:
            raw = b""
        if not raw:
            self.open = False
            return []
        *lines, self._rest = (self._rest + raw).split(b"\n")
        return [json.loads(line) for line in lines if line]


class Engine:
    """The busy loop and its children."""

    def __init__(self, settings: Settings, model: str) -> None:
        self.settings, self.model = settings, model
        self.clock = SimClock(settings.speed)
        self.log = Log("EngineCore", settings.log)
        self.worker_log = Log("Worker" if settings.tp == 1 else "Worker_TP0", settings.log)
        self.log.silent = self.worker_log.silent = settings.log_silent
        self.api = Pipe(0)
        self.scheduler = Scheduler(settings)
        self.workers: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Pipe] = []
        self.done: set[int] = set()
        self.up = 0
        self.release_asked = False
        self.jitted = self.paused = False
        self.wedged_since: float | None = None

    # -- talk ----------------------------------------------------------------------------------------------------------------

    def tell(self, **message: Any) -> None:
        """To the API process."""
        try:
            os.write(1, (json.dumps(message) + "\n").encode())
        except OSError:
            raise SystemExit(0) from None

    def order(self, message: dict[str, Any], ranks: list[int] | None = None) -> None:
        """To the workers."""
        raw = (json.dumps(message) + "\n").encode()
        for rank, worker in enumerate(self.workers):
            if (ranks is None or rank in ranks) and worker.stdin is not None:
                try:
                    os.write(worker.stdin.fileno(), raw)
                except OSError:
                    continue

    def heed(self, message: dict[str, Any]) -> None:
        """A message of the API process."""
        kind = message["kind"]
        if kind == "add":
            self.scheduler.add(message)
        elif kind == "abort":
            self.scheduler.abort(message["id"])
        elif kind == "release":
            self.release_asked = True
            self.order({"kind": "release"})
        elif kind == "kill":
            self._kill_worker(message["rank"])
        elif kind == "set":
            values = dict(message["values"])
            if "after" not in values and set(values) - {"metrics", "health", "access_log"}:
                values["after"] = 0  # at once
            self.settings = self.scheduler.settings = self.settings.changed(values)
            self.log.silent = self.worker_log.silent = self.settings.log_silent
            self.jitted = self.jitted and "jit_s" not in values
            self.paused = self.paused and "pause_s" not in values
            self.order({"kind": "set", "values": values})

    def listen(self, seconds: float | None) -> None:
        """Wait that long (real seconds) for anything, and heed it. Raises DeadError if a worker is gone."""
        readable, _, _ = select.select([self.api, *self.pipes], [], [], seconds)
        for pipe in readable:
            for message in pipe.read():
                if pipe is self.api:
                    self.heed(message)
                elif message["kind"] == "up":
                    self.up += 1
                else:
                    self.done.add(message["number"])
            if not pipe.open and pipe is self.api:
                raise SystemExit(0)
            if not pipe.open:
                rank = self.pipes.index(pipe)
                self.log.error(
                    "multiproc_executor.py:284", f"Worker proc VllmWorker-{rank} died unexpectedly, shutting down executor."
                )
                raise DeadError("RuntimeError: Executor failed.")

    def _kill_worker(self, rank: int) -> None:
        worker = self.workers[rank]
        if self.settings.kernel_log:
            with open(self.settings.kernel_log, "a", encoding="utf-8") as stream:
                stream.write(
                    f"[{time.monotonic():12.6f}] Memory cgroup out of memory: Killed process {worker.pid} (VLLM::Worker) "
                    f"total-vm:91234567kB, anon-rss:61234567kB, file-rss:0kB, shmem-rss:0kB, UID:0 oom_score_adj:0\n"
                )
        worker.kill()

    # -- start ---------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """All phases up to the point where the API process may serve."""
        settings = self.settings
        self.log.info("core.py:113", f"Initializing a V1 LLM engine (v{VERSION}) with config: {self._config()}")
        for name in PHASES:
            self.tell(kind="phase", name=name)
            if settings.stop_in == name:
                while True:
                    self.listen(None)
            if settings.die_in == name:
                self._die_starting(name)
            if name == "config":
                self._spawn()
            if name != "api":
                getattr(self, f"_phase_{name}", self._quiet)(getattr(settings, f"{name}_s"))
        took = settings.profile_s + settings.capture_s + settings.compile_s
        self.log.info("core.py:314", f"init engine (profile, create kv cache, warmup model) took {took:.2f} s")
        self.tell(kind="ready")

    def _config(self) -> str:
        settings = self.settings
        speculative = f"SpeculativeConfig(method='mtp', num_spec_tokens={settings.mtp})" if settings.mtp else "None"
        mode = "NONE" if settings.eager else "FULL_DECODE_ONLY"
        return (
            f"model={self.model!r}, speculative_config={speculative}, dtype=torch.bfloat16, max_seq_len={settings.max_model_len}, "
            f"tensor_parallel_size={settings.tp}, pipeline_parallel_size=1, data_parallel_size=1, enforce_eager={settings.eager}, "
            f"compilation_config={{'mode': 0, 'cudagraph_mode': <CUDAGraphMode.{mode}: (2, 0)>, "
            f"'cudagraph_capture_sizes': {settings.sizes}}}, standin=True"
        )

    def _spawn(self) -> None:
        document = json.dumps(self.settings.document())
        for rank in range(self.settings.tp):
            worker = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve().parent), "--worker", str(rank), document],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert worker.stdout is not None
            self.workers.append(worker)
            self.pipes.append(Pipe(worker.stdout.fileno()))
            self.tell(kind="worker", rank=rank, pid=worker.pid)
        self.worker_log.pid = self.workers[0].pid
        while self.up < self.settings.tp:
            self.listen(None)

    def _wait(self, seconds: float) -> None:
        """A pause in which a worker's death is seen; the line that every long start prints once or more."""
        end, line = self.clock.now() + seconds, self.clock.now() + self.settings.shm_s
        while (left := end - self.clock.now()) > 0:
            self.listen(self.clock.real(min(left, max(line - self.clock.now(), 0.001))))
            if self.clock.now() >= line:
                self.log.info("shm_broadcast.py:681", SHM.format(seconds=self.settings.shm_s))
                line += self.settings.shm_s

    def _quiet(self, seconds: float) -> None:
        self._wait(seconds)

    def _phase_download(self, seconds: float) -> None:
        if seconds:
            for done in range(5):
                self.log.plain(f"Fetching 4 files: {25 * done:3d}%|{'#' * 2 * done:<8}| {done}/4 [00:{done:02d}<00:01,  1.0it/s]")
                self._wait(seconds / 5)

    def _phase_load(self, seconds: float) -> None:
        self.worker_log.info("gpu_model_runner.py:5092", f"Starting to load model {self.model}...")
        for done in range(5):
            self.worker_log.plain(
                f"Loading safetensors checkpoint shards: {25 * done:3d}% Completed | {done}/4 [00:{done:02d}<00:01,  1.00s/it]"
            )
            self._wait(seconds / 5)
        self.worker_log.info("default_loader.py:397", f"Loading weights took {seconds:.2f} seconds")
        self.worker_log.info("gpu_model_runner.py:5187", f"Model loading took 0.17 GiB memory and {seconds:.6f} seconds")

    def _phase_compile(self, seconds: float) -> None:
        if not seconds:
            return
        self.worker_log.info("backends.py:1089", "Using cache directory: /nonexistent/standin for vLLM's torch.compile")
        self.worker_log.info("backends.py:1148", f"Dynamo bytecode transform time: {seconds / 4:.2f} s")
        self._wait(seconds)
        self.worker_log.info("monitor.py:48", f"torch.compile took {seconds:.2f} s in total")

    def _phase_profile(self, seconds: float) -> None:
        self._wait(seconds)
        tokens, longest = self.settings.kv_blocks * 64, self.settings.max_model_len
        self.worker_log.info("gpu_worker.py:480", "Available KV cache memory: 1.00 GiB")
        self.log.info("kv_cache_utils.py:1744", f"GPU KV cache size: {tokens:,} tokens")
        self.log.info(
            "kv_cache_utils.py:1745",
            f"Maximum concurrency for {longest:,} tokens per request: {tokens / longest:.2f}x",
        )

    def _phase_capture(self, seconds: float) -> None:
        if self.settings.eager:
            return
        sizes = self.settings.sizes
        for done in range(len(sizes) + 1):
            self.worker_log.plain(
                f"Capturing CUDA graphs (decode, FULL): {100 * done // len(sizes):3d}%|{'#' * done:<{len(sizes)}}| "
                f"{done}/{len(sizes)} [00:00<00:00,  9.00it/s]"
            )
            self._wait(seconds / (len(sizes) + 1))
        self.worker_log.info("gpu_model_runner.py:6585", f"Graph capturing finished in {seconds:.0f} secs, took 0.05 GiB")

    def _die_starting(self, phase: str) -> None:
        log = self.worker_log if phase in ("load", "compile", "profile", "capture") else self.log
        if log is self.worker_log:
            log.error("multiproc_executor.py:888", "WorkerProc failed to start.")
        log.error(
            "core.py:1195", f"EngineCore failed to start.\nTraceback (most recent call last):\nRuntimeError: stand-in: {phase}"
        )
        raise SystemExit(1)

    # -- serve ---------------------------------------------------------------------------------------------------------------

    def run_busy_loop(self) -> None:
        """Step for ever."""
        told: dict[str, Any] = {}
        while True:
            settings = self.settings
            over = self.scheduler.steps >= settings.after
            if over and settings.kill_engine:
                os.kill(os.getpid(), signal.SIGKILL)
            if over and settings.livelock and (self.scheduler.running or self.scheduler.waiting):
                self._livelock()
            if self.scheduler.running or self.scheduler.waiting:
                self.listen(0)
            batch = self.scheduler.schedule()
            if batch is None:
                stats = self.scheduler.stats()
                if stats != told:
                    told = stats
                    self.tell(kind="stats", **stats)
                self.listen(self.clock.real(1.0) if self.scheduler.waiting else None)
                continue
            told = {}
            if over and settings.kill_worker:
                self.settings = self.scheduler.settings = settings.changed({"kill_worker": False})
                self._kill_worker(settings.tp - 1)
            self.step_with_batch_queue(batch)

    def _livelock(self) -> None:
        end = time.monotonic() + 0.05
        while self.settings.livelock:
            while time.monotonic() < end:
                sum(range(1000))
            self.listen(0.05)  # half a core is enough of it
            end = time.monotonic() + 0.05

    def step_with_batch_queue(self, batch: Batch) -> None:
        """One step: out to the workers, wait, results to the API process."""
        settings = self.settings
        over = batch.number > settings.after
        seconds = settings.step_ms / 1e3 + batch.prefill * settings.prefill_us / 1e6
        if over and settings.slow_ms:
            seconds = settings.slow_ms / 1e3
        if over and settings.long_prefill_s and batch.longest >= 1000:
            seconds = settings.long_prefill_s
        self._control()
        wedged = self.scheduler.wedges(batch)
        order: dict[str, Any] = {
            "kind": "step", "number": batch.number, "step_s": seconds, "mode": batch.mode, "live": batch.live, "rows": batch.rows,
            "padded_rows": batch.padded_rows, "padded_requests": batch.padded_requests, "decode": batch.decode,
            "contexts": batch.contexts, "wedged": wedged, "recover_s": settings.recover_s, "device": "wedged" if wedged else "busy",
        }  # fmt: skip
        if over and settings.jit_s and not self.jitted:
            self.jitted = True
            order |= {"compile_s": settings.jit_s, "device": "idle"}
        if over and settings.pause_s and not self.paused:
            self.paused = True
            self.worker_log.info("api_router.py:23", "Starting profiler...")
            order |= {"host_s": settings.pause_s, "device": "idle"}
        if over and settings.ipc:
            order |= {"lost": True, "device": "idle"}
        ranks = None
        if over and settings.desync and settings.tp > 1:
            # The last rank went on alone; the others wait for it inside a collective.
            self.order({**order, "wedged": True, "device": "wedged"}, [settings.tp - 1])
            order["wedged"] = wedged = True
            order["device"] = "wedged"
        self.tell(
            kind="step", number=batch.number, device=order["device"], wedged=wedged or bool(order.get("lost")), live=batch.live
        )
        self.order(order, ranks)
        if wedged and not settings.desync:
            # Asynchronous scheduling: the next step is in flight behind it.
            self.order({**order, "number": -1, "wedged": False, "lost": True, "step_s": 0.001, "compile_s": 0, "host_s": 0})
        self.get_response(batch, lost=bool(order.get("lost")))
        if wedged and settings.rescue:
            # The first release arms the guard.
            self.heed({"kind": "set", "values": {"guard": True}})
        self.tell(kind="out", **self.scheduler.finish(batch))

    def _control(self) -> None:
        """The agent's control file switches the guard."""
        if not self.settings.agent:
            return
        try:
            guard = json.loads((Path(self.settings.agent) / "control.json").read_text(encoding="utf-8")).get("guard")
        except (OSError, ValueError):
            return
        if isinstance(guard, bool) and guard != self.settings.guard:
            self.settings = self.scheduler.settings = self.settings.changed({"guard": guard})

    def get_response(self, batch: Batch, *, lost: bool) -> None:
        """Wait for rank 0. Its deadline runs on while this process is stopped; an answer that is there is taken first."""
        settings = self.settings
        begun = self.clock.now()
        line = begun + settings.shm_s
        self.release_asked = False
        while batch.number not in self.done:
            now = self.clock.now()
            if lost and ((settings.recover_s and now - begun >= settings.recover_s) or self.release_asked):
                return
            left = min(line, begun + self.settings.deadline_s) - now
            if lost:
                left = min(left, 0.1 * settings.speed)
            self.listen(self.clock.real(max(left, 0.001)))
            now = self.clock.now()
            if batch.number in self.done:
                break
            if now >= line:
                self.log.info("shm_broadcast.py:681", SHM.format(seconds=settings.shm_s))
                line += settings.shm_s
            if now - begun >= self.settings.deadline_s:
                raise DeadError("TimeoutError: RPC call to sample_tokens timed out.")
        self.done.discard(batch.number)

    def dump(self, why: str) -> None:
        """What vLLM writes when a step fails, and what follows."""
        scheduler = self.scheduler
        tokens = {request.name: 1 + self.settings.mtp for request in scheduler.running}
        stats = scheduler.stats()
        self.log.error("dump_input.py:72", f"Dumping input data for V1 LLM engine (v{VERSION}) with config: {self._config()}, ")
        drafts = {name: [-1] * self.settings.mtp for name in tokens} if self.settings.mtp else {}
        self.log.error(
            "dump_input.py:79",
            "Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[], scheduled_cached_reqs="
            f"CachedRequestData(req_ids={list(tokens)}, resumed_req_ids=set(), new_token_ids=[], "
            f"new_block_ids={[None] * len(tokens)}, "
            f"num_computed_tokens={[request.context for request in scheduler.running]}, "
            f"num_output_tokens={[request.generated for request in scheduler.running]}), num_scheduled_tokens={tokens}, "
            f"total_num_scheduled_tokens={sum(tokens.values())}, scheduled_spec_decode_tokens={drafts}, "
            "scheduled_encoder_inputs={}, num_common_prefix_blocks=[0], finished_req_ids=[], free_encoder_mm_hashes=[])",
        )
        self.log.error(
            "dump_input.py:81",
            f"Dumping scheduler stats: SchedulerStats(num_running_reqs={stats['running']}, num_waiting_reqs={stats['waiting']}, "
            f"num_skipped_waiting_reqs=0, step_counter=0, current_wave=0, kv_cache_usage={stats['kv']}, "
            f"num_preemptions={stats['preemptions']})",
        )
        self.log.error(
            "core.py:1197", f"EngineCore encountered a fatal error.\nTraceback (most recent call last):\n  stand-in, no file\n{why}"
        )
        self.tell(kind="dead", why=why)


def main(arguments: list[str]) -> int:
    """``engine SETTINGS MODEL``: until the API process is gone or the engine dies."""
    settings = Settings().changed(json.loads(arguments[0]))
    set_title("VLLM::EngineCore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    engine = Engine(settings, arguments[1])
    try:
        engine.start()
        engine.run_busy_loop()
    except DeadError as dead:
        engine.dump(str(dead))
        return 1
    finally:
        for worker in engine.workers:
            worker.kill()
            worker.wait()
    return 0
