"""A server's life on a clock that runs as fast as wanted: what a look each second would have seen, for the pure watchdog.

No process and no device: a test double, never a result. A life is a row of ``Scene``s; each says what moves, what the cards show
and how long it lasts, with durations as reported from the field (long prefill, JIT, silences that ended by themselves, …).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dsv4_repro.repro.serving.records import (
    DeviceSample,
    EngineSample,
    LogSample,
    ProcessSample,
    RankProgress,
    Snapshot,
)

__all__ = ["HANGS", "HARMLESS", "Look", "Scene", "play", "week"]

BUSY_W = 500.0
#: What a card shows: utilisation, memory utilisation, power.
CARDS: dict[str, tuple[int, int, float]] = {
    "idle": (0, 0, 90.0), "busy": (97, 35, 480.0), "spin": (100, 0, 130.0), "slow": (100, 20, 470.0), "prefill": (100, 12, 600.0),
}  # fmt: skip


@dataclass(frozen=True)
class Scene:
    """``moves``: decode steps of ``step_s`` end. Else one step stands: ``launched`` on the device (mode ``mode``), or not yet.

    ``hang``: this one is a hang that the watchdog has to find. ``device``/``peer``: cards of rank 0 and of the others.
    """

    name: str
    seconds: float
    running: int = 8
    waiting: int = 0
    moves: bool = True
    step_s: float = 0.04
    launched: bool = True
    mode: str = "full"
    device: str = "busy"
    peer: str = ""
    hang: bool = False
    serving: bool = True
    alive: bool = True
    phase: str = ""
    work: str = ""
    compiler: bool = False
    stopped: bool = False
    preempts: bool = False
    scrape: str = ""
    health: int | None = 200
    log_error: str = ""
    looked: bool = True
    anew: bool = False
    stats: bool = True
    running_shown: int | None = None


@dataclass(frozen=True)
class Look:
    """A snapshot with the scene that it is of, and when anything last moved before it."""

    snapshot: Snapshot
    scene: Scene
    moved: float


def _between(low: float, high: float) -> tuple[float, float]:
    return low, high


#: Trouble that is no hang, as scenes with a range of seconds. Sources: the facts' hang reports (vllm#34399, #40988, qwen38#107 …)
#: and the server's own ways; a card that spins while the host of a peer works; a look that was not taken.
HARMLESS: tuple[tuple[Scene, tuple[float, float]], ...] = (
    (Scene("slow steps", 0, step_s=1.8, device="slow"), _between(20, 120)),
    (Scene("very slow steps", 0, step_s=6.0, device="slow", mode="none"), _between(30, 120)),
    (Scene("long prefill", 0, moves=False, mode="none", device="prefill"), _between(5, 45)),
    (Scene("JIT with its line", 0, moves=False, launched=False, device="idle", work="jit"), _between(2, 110)),
    (Scene("JIT with a compiler below", 0, moves=False, launched=False, device="idle", compiler=True), _between(2, 300)),
    (Scene("JIT inside the worker, unsaid", 0, moves=False, launched=False, device="idle"), _between(1, 60)),
    (
        Scene("JIT on one rank, peers wait", 0, moves=False, launched=False, device="idle", peer="spin", compiler=True),
        _between(2, 90),
    ),
    (Scene("profiler starts", 0, moves=False, launched=False, device="idle", work="profiler"), _between(2, 60)),
    (Scene("graph capture", 0, moves=False, launched=False, device="busy", work="capture-progress"), _between(2, 60)),
    (Scene("silence that ends by itself", 0, moves=False, device="slow", mode="none"), _between(3, 40)),
    (Scene("preemption, with tokens", 0, preempts=True), _between(10, 60)),
    (Scene("clients left", 0, running=0, device="idle"), _between(5, 60)),
    (Scene("metrics gone", 0, scrape="connection refused", health=None), _between(2, 60)),
    (Scene("metrics slow", 0, scrape="timed out after 2 s"), _between(2, 120)),
    (Scene("log not readable", 0, log_error="permission denied"), _between(5, 60)),
    (Scene("stats lines off", 0, stats=False), _between(60, 300)),
    (Scene("frozen by a person", 0, moves=False, device="idle", stopped=True), _between(2, 30)),
    (Scene("nobody looked", 0, looked=False), _between(4, 900)),
)  # fmt: skip

#: Hangs, each with (seconds within which it must be called hung, None: never, because nothing on the device shows it).
HANGS: dict[str, tuple[Scene, float | None]] = {
    "wedge": (Scene("wedge", 60, running=3, moves=False, device="spin", hang=True), 5.0),
    "wedge, gauge says 0": (Scene("wedge", 60, running=3, running_shown=0, moves=False, device="spin", hang=True), 5.0),
    "wedge, log gone": (Scene("wedge", 60, running=3, moves=False, device="spin", hang=True, log_error="gone"), 5.0),
    "wedge, metrics gone": (Scene("wedge", 60, running=3, moves=False, device="spin", hang=True, scrape="timed out"), 5.0),
    "admission stall": (Scene("admission", 90, running=0, waiting=6, moves=False, launched=False, device="idle"), None),
    "queue stall": (Scene("queue", 90, moves=False, launched=False, device="idle"), None),
    "livelock of the engine": (Scene("livelock", 90, moves=False, launched=False, device="idle"), None),
}  # fmt: skip


class _Life:
    """What has been counted so far."""

    def __init__(self, seed: int, ranks: int, recorder: bool, nvml: bool) -> None:
        self.random = random.Random(seed)
        self.ranks, self.recorder, self.nvml = ranks, recorder, nvml
        self.now = 1000.0
        self.moved = 1000.0
        self.steps = 0
        self.tokens = self.prompt = self.preemptions = 0.0
        self.pid = 4000
        self.step_end = 1000.0
        self.stats_at = 1000.0
        self.line_at = 1000.0
        self.cpu = 0.0
        self.healthy: dict[str, float] = {"full": 0.04}
        self.stuck_since = 1000.0
        self.begun = 0
        self.stood = ""

    def anew(self) -> None:
        self.tokens = self.prompt = self.preemptions = 0.0
        self.steps = self.begun = 0
        self.pid += 10
        self.healthy = {}

    def tick(self, scene: Scene, seconds: float, *, first: bool) -> None:
        """Let time pass in a scene."""
        self.now += seconds
        self.cpu += seconds * (1.0 if scene.compiler or (scene.alive and not scene.stopped) else 0.0)
        if scene.phase and self.random.random() < 0.3:
            self.line_at = self.now
        if not scene.serving or not scene.alive or scene.running == 0:
            return
        if not scene.moves:
            if first:
                self.begun += 1
                self.stuck_since = self.now - seconds * self.random.random()
                self.moved = self.stuck_since
                self.stood = scene.mode if scene.launched else ""
            return
        if self.stood:
            # The recorder knows now how long a step of that mode may take.
            self.healthy[self.stood] = max(self.healthy.get(self.stood, 0.0), self.now - seconds - self.stuck_since)
            self.stood = ""
        if first:
            self.step_end = self.now - min(scene.step_s, seconds)
        ended = int((self.now - self.step_end) / scene.step_s)
        if ended:
            self.steps += ended
            self.begun = max(self.begun, self.steps) + (1 if self.begun < self.steps + 1 else 0)
            self.step_end += ended * scene.step_s
            self.moved = self.step_end
            self.tokens += ended * scene.running * 1.5
            self.prompt += ended * 3.0
            self.healthy[scene.mode] = max(scene.step_s, self.healthy.get(scene.mode, 0.0) * 0.999)
        if scene.preempts:
            self.preemptions += seconds * 2
        if scene.stats and self.now - self.stats_at >= 10.0:
            self.stats_at = self.line_at = self.now

    def look(self, scene: Scene) -> Snapshot:
        """What a look shows now."""
        engine, log = self._engine(scene), self._log(scene)
        processes = tuple(self._processes(scene))
        return Snapshot(
            self.now, engine, log, tuple(self._rings(scene)), tuple(self._cards(scene)) if self.nvml else (), processes
        )  # fmt: skip

    def _engine(self, scene: Scene) -> EngineSample:
        if scene.scrape or not scene.alive or not scene.serving:
            return EngineSample(self.now, error=scene.scrape or "connection refused", health=scene.health if scene.scrape else None)
        shown = scene.running if scene.running_shown is None else scene.running_shown
        return EngineSample(
            self.now, 0.004, scene.health, shown, scene.waiting, self.tokens, self.prompt, float(self.steps), self.preemptions, 0.0,
            kv_usage=0.2 + 0.0001 * (self.steps % 1000),
        )  # fmt: skip

    def _log(self, scene: Scene) -> LogSample:
        if scene.log_error:
            return LogSample(self.now, error=scene.log_error)
        events = {"serving": 1} if scene.serving else {}
        return LogSample(
            self.now, self.now - self.line_at, self.now - self.stats_at if self.steps else None, scene.running, events, scene.phase,
            stats_tokens_per_s=100.0, work=scene.work, work_age_s=1.0 if scene.work else None,
        )  # fmt: skip

    def _rings(self, scene: Scene) -> Iterator[RankProgress]:
        if not self.recorder or not scene.alive or not self.begun:
            return
        stands = scene.serving and not scene.moves and scene.running > 0
        for rank in range(self.ranks):
            launched = scene.launched or (scene.peer == "spin" and rank > 0)
            open_now = scene.moves and scene.running > 0 and scene.serving
            unfinished: tuple[int, ...] = ()
            age = None
            if stands and launched:
                unfinished, age = (self.begun,), self.now - self.stuck_since
            elif open_now:
                unfinished, age = (self.begun,), max(self.now - self.step_end, 0.0)
            yield RankProgress(
                self.pid + 2 + rank, self.now, rank, self.begun, self.now - (self.stuck_since if stands else self.step_end),
                unfinished, age, scene.running, 4 if scene.running == 3 else scene.running, scene.mode, 2, tokens=scene.running * 2,
                launching_age_s=self.now - self.stuck_since if stands and not launched else None,
                healthy_s=self.healthy.get(scene.mode), heard_age_s=0.02, device=rank,
            )  # fmt: skip

    def _cards(self, scene: Scene) -> Iterator[DeviceSample]:
        for rank in range(self.ranks):
            utilisation, memory, power = CARDS[scene.peer if scene.peer and rank else scene.device]
            jitter = self.random.uniform(-1.0, 1.0)
            yield DeviceSample(
                self.now, rank, f"GPU-{rank}", utilisation, memory, power + jitter, BUSY_W if self.steps > 100 else None, 1980,
                60 << 30, sm_util=0.7 if power == 130.0 else None, others=0,
            )  # fmt: skip

    def _processes(self, scene: Scene) -> Iterator[ProcessSample]:
        if not scene.alive:
            yield ProcessSample(self.now, self.pid, "api", None, exit_status=None)
            return
        state = "T" if scene.stopped else "S"
        yield ProcessSample(self.now, self.pid, "api", "S", self.cpu)
        yield ProcessSample(self.now, self.pid + 1, "engine", state, self.cpu)
        for rank in range(self.ranks):
            yield ProcessSample(self.now, self.pid + 2 + rank, "worker", "S", self.cpu)
        if scene.compiler:
            yield ProcessSample(self.now, self.pid + 9, "compiler", "R", self.cpu)


def play(
    scenes: Sequence[Scene], *, seed: int = 1, every: float = 1.0, ranks: int = 1, recorder: bool = True, nvml: bool = True
) -> Iterator[Look]:
    """Looks ``every`` seconds through all scenes."""
    life = _Life(seed, ranks, recorder, nvml)
    for scene in scenes:
        if scene.anew:
            life.anew()
        left, first = scene.seconds, True
        while left > 0:
            step = min(every, left) if scene.looked else left
            life.tick(scene, step, first=first)
            left -= step
            first = False
            if scene.looked:
                yield Look(life.look(scene), scene, life.moved)


def start(rand: random.Random, *, first: bool) -> list[Scene]:
    """A (re)start: gone, then the phases of a start."""
    quiet = {"serving": False, "moves": False, "running": 0, "device": "idle", "health": None}
    scenes = [] if first else [Scene("down", rand.uniform(2, 60), alive=False, **quiet)]  # type: ignore[arg-type]
    for name, low, high, work, device in (
        ("starting", 2, 20, "", "idle"),
        ("load", 10, 900, "load-progress", "idle"),
        ("compile", 5, 600, "compile-start", "idle"),
        ("warm-up", 2, 60, "", "busy"),
        ("capture", 3, 60, "capture-progress", "busy"),
    ):
        scene = Scene(name, rand.uniform(low, high), phase=name, work=work, **{**quiet, "device": device})  # type: ignore[arg-type]
        scenes.append(replace(scene, anew=name == "starting"))
    return scenes


def week(seconds: float, seed: int = 1) -> Iterator[Scene]:
    """A life of that many seconds without a hang: service of changing load, idle hours, every harmless trouble, restarts."""
    rand = random.Random(seed)
    yield from start(rand, first=True)
    passed = 0.0
    restart_at = rand.uniform(0.5, 1.5) * 8 * 3600
    while passed < seconds:
        running = rand.randint(1, 16)
        scenes = [Scene("serving", rand.uniform(20, 600), running=running, step_s=rand.choice([0.02, 0.04, 0.1, 0.4]))]
        if rand.random() < 0.25:
            scenes.append(Scene("idle", rand.expovariate(1 / 600), running=0, device="idle"))
        if rand.random() < 0.8:
            scene, (low, high) = rand.choice(HARMLESS)
            scenes.append(replace(scene, seconds=rand.uniform(low, high), running=scene.running and running))
        if passed > restart_at:
            restart_at += rand.uniform(0.5, 1.5) * 8 * 3600
            scenes += start(rand, first=False)
        for scene in scenes:
            passed += scene.seconds
            yield scene
