"""Is the server hung? A pure state machine over snapshots; nothing here reads a clock, a file or a device.

starting → healthy → suspect → hung, and exited or crashed. HUNG needs a sign from the device (``device_signs``); what could not
speak is named in ``blind``, and without a sign the state stays SUSPECT with the reason. Work of the host (compile, load, capture,
JIT, a stopped process) explains a silence; what moves, however slowly, is healthy. Back from HUNG leads only lasting movement: one
release frees one launch, and the next one hangs again.
"""

from __future__ import annotations

from collections import deque

from .blind_signals import name_blind
from .device_signs import DeviceTrack, Signs, device_words, own_tracks, recorder_signs, resident, spin_signs
from .host_work import HostWork, log_works
from .movement import Movement
from .records import Assessment, Blind, ServerState, Snapshot
from .server_end import ServerEnd
from .watch_limits import WatchLimits

__all__ = ["ServerWatchdog"]


class ServerWatchdog:
    """Told of snapshots in time order, it says how the server stands. One for each server; a restart of it is noticed."""

    def __init__(self, limits: WatchLimits | None = None) -> None:
        self.limits = limits or WatchLimits()
        self.state: ServerState = "starting"
        self._movement = Movement(self.limits.longest_gap_s)
        self._tracks: dict[str, DeviceTrack] = {}
        self._ready = False
        self._began: float | None = None
        self._end = ServerEnd()
        self._host = HostWork()
        self._restart = ""
        self._start_moved = 0.0
        self._longest_silence = self._pending_silence = 0.0
        self._moves: deque[float] = deque(maxlen=64)
        self._log_line: float | None = None
        self._end_reasons: list[str] = []
        self._signs_since: float | None = None
        self._answered = 0.0
        self._told = 0.0

    @property
    def movement(self) -> Movement:
        """What moves: for callers that learn from it (the busy power level)."""
        return self._movement

    def observe(self, snapshot: Snapshot) -> Assessment:
        """How the server stands as of this snapshot."""
        if self._began is None:
            self._began = snapshot.at
        if why := self._end.replaced(snapshot, ended=self.state in ("exited", "crashed")):
            self._begin_anew(snapshot, why)
        movement = self._movement
        movement.observe(snapshot)
        if movement.restarted:
            self._end.forget()
            self._begin_anew(snapshot, "its counters fell back: it was started anew")
            movement.observe(snapshot)
        keys = [device.uuid or str(device.index) for device in snapshot.devices]
        if keys:
            # A card that is looked at no more (the server's own became known, or it moved to another) says nothing more.
            self._tracks = {key: track for key, track in self._tracks.items() if key in keys}
        for key, device in zip(keys, snapshot.devices, strict=True):
            self._tracks.setdefault(key, DeviceTrack(self.limits)).look(movement.now, device)
        self._host.look(movement.now, snapshot.processes)
        ended = self._end.ended(snapshot, ready=self._ready)
        if ended is not None:
            self._end_reasons = ended[1]
            return self._say(snapshot, ended[0], ended[1], Signs(), None)
        if self.state in ("exited", "crashed"):
            if snapshot.engine is None or snapshot.engine.health != 200:
                return self._say(snapshot, self.state, self._end_reasons, Signs(), None)
            self._end.forget()
            self._begin_anew(snapshot, "it answers again")
            movement.observe(snapshot)
        if not self._ready and self._is_ready(snapshot):
            self._ready = True
            movement.wanted(False)
        if not self._ready:
            return self._starting(snapshot)
        return self._serving(snapshot)

    def _begin_anew(self, snapshot: Snapshot, why: str) -> None:
        self._movement.reset()
        self._tracks.clear()
        self._host.forget()
        self._ready, self._start_moved, self._longest_silence = False, 0.0, 0.0
        self._moves.clear()
        self._began, self._restart, self.state = snapshot.at, why, "starting"
        self._answered, self._log_line, self._signs_since = 0.0, None, None

    def _is_ready(self, snapshot: Snapshot) -> bool:
        engine, log, load = snapshot.engine, snapshot.log, snapshot.load
        if engine is not None and engine.health == 200:
            return True
        if load is not None and self._movement.load is not None and self._movement.moved and self._movement.load.looks == 0:
            return True
        # After a restart the log's last words may still be those of the server before.
        if (
            log is not None
            and not self._restart
            and ("serving" in log.events or log.phase == "serving" or (log.stats_running or 0) > 0)
        ):
            return True
        return any(progress.begun > 0 for progress in snapshot.progress)

    # -- starting ----------------------------------------------------------------------------------------------------------------

    def _starting(self, snapshot: Snapshot) -> Assessment:
        movement, limits, log = self._movement, self.limits, snapshot.log
        self._told = movement.now
        if log is not None and log.last_line_age_s is not None:
            written = log.at - log.last_line_age_s
            if self._log_line is None or written > self._log_line + 0.5:
                self._start_moved = movement.now
            self._log_line = written
        host = self._host.says(movement.now, snapshot)
        reasons = [self._restart] if self._restart else []
        reasons.append(
            f"by its log it is in the phase: {log.phase}"
            if log is not None and log.phase
            else "not ready yet: /health does not answer with 200"
        )
        if host:
            self._start_moved = movement.now
        if working := host or log_works(snapshot.log):
            reasons.append(working)
        quiet = movement.now - self._start_moved
        signs = Signs()
        spin, words = resident(self._tracks, "strong", "flat")
        if not self._tracks:
            signs.blind.append(Blind("NVML", "no card of the server was read"))
        if log is None or log.error:
            signs.blind.append(Blind("log", log.error if log is not None else "none is known: the phase of the start is not seen"))
        limit = limits.start_remote_s if snapshot.remote_ranks else limits.start_spin_s
        if snapshot.remote_ranks:
            signs.blind.append(
                Blind("remote ranks", f"{snapshot.remote_ranks} ranks compute on other machines and are not seen here")
            )
        if not host and log is not None and not log.error and min(spin, quiet) >= limit:
            signs.signals.append(f"NVML: a kernel has been resident on every card for {spin:.0f} s and moves no memory ({words})")
            reasons.append(f"the log has said nothing for {quiet:.0f} s")
            return self._say(snapshot, "hung", reasons, signs, None)
        return self._say(snapshot, "starting", reasons, signs, None)

    # -- serving -----------------------------------------------------------------------------------------------------------------

    def _demand(self, snapshot: Snapshot) -> tuple[bool, int | None, list[Blind]]:
        """(is there anything to do, live requests, what speaks falsely)."""
        engine, load, log = snapshot.engine, snapshot.load, snapshot.log
        blind: list[Blind] = []
        fresh = engine is not None and not engine.error
        running = engine.running if engine is not None and fresh else None
        waiting = engine.waiting if engine is not None and fresh else None
        unfinished = [one for one in snapshot.progress if one.unfinished and not one.error]
        batch = max((one.requests for one in unfinished if one.requests is not None), default=None)
        ours = load.open if load is not None else 0
        canary = snapshot.canary_waiting_s is not None and snapshot.canary_waiting_s > 1.0
        stats = log.stats_running if log is not None and not log.error and running is None else None
        demand = bool(running or waiting or ours or canary or stats)
        if running is None and not fresh:
            # Nobody tells the number of requests: a step that does not end is work in hand.
            demand = demand or bool(unfinished)
        if running == 0 and not waiting:
            others = [f"{ours} streams of our client are open"] if ours else []
            others += ["a canary waits"] if canary else []
            stuck = [one for one in unfinished if (one.unfinished_age_s or 0.0) > self.limits.step_floor_s]
            others += [f"{batch or 'some'} requests are in a step that does not end"] if stuck else []
            if others:
                blind.append(Blind("vllm:num_requests_running", f"says 0 while {' and '.join(others)}"))
                demand = True
        live = running or (batch if batch is not None else ours or stats or running)
        return demand, live, blind

    def _serving(self, snapshot: Snapshot) -> Assessment:
        movement, limits = self._movement, self.limits
        if snapshot.engine is None or snapshot.engine.health is not None or not snapshot.engine.error:
            self._answered = movement.now
        demand, live, blind = self._demand(snapshot)
        movement.wanted(demand)
        host, logged = self._host.says(movement.now, snapshot), log_works(snapshot.log)
        still_s, by = movement.still()
        workers = frozenset(one.pid for one in snapshot.processes if one.role == "worker" and one.state is not None)
        rings = recorder_signs(snapshot.progress, movement, self._tracks, limits, host_works=host or logged, workers=workers)
        standing = movement.standing_engines()
        engine_still = max(standing.values(), default=0.0)
        spins = spin_signs(
            self._tracks, still_s, engine_still, limits, host_works=host, log_works=logged, here=bool(snapshot.processes)
        )
        signs = Signs(blind=[*blind, *rings.blind, *spins.blind])
        if host and "stopped" in host and rings.signals:
            rings.against.append(host)
            rings.facts += rings.signals
            rings.signals = []
        if rings.signals and self._tokens_go_on() and engine_still < limits.still_s:
            rings.against.append("the engine's token counters move on: the step that does not end is not one that they wait for")
            rings.facts += rings.signals
            rings.signals = []
        if demand:
            signs.signals = [*rings.signals, *spins.signals]
        signs.against, signs.facts = [*rings.against, *spins.against], [*rings.facts, *spins.facts]
        if not demand:
            signs.against, signs.facts = [], []
        if snapshot.remote_ranks:
            self._hold_for_remote(snapshot.remote_ranks, signs)
        suspicious = bool(signs.signals) or (demand and still_s >= self.limits.suspect_s)
        name_blind(snapshot, signs, torn=self._movement.torn, suspicious=suspicious)
        if movement.moved:
            self._moves.append(movement.now)
        reasons: list[str] = []
        if movement.gap_s:
            reasons.append(f"nobody looked for {movement.gap_s:.0f} s: standing still is counted anew")
        if signs.signals:
            if still_s >= 1.0:
                reasons.append(f"{by} have stood for {still_s:.1f} s")
            reasons += [*signs.signals, *filter(None, [_canary_waits(snapshot)])]
            self._moves.clear()
            return self._say(snapshot, "hung", reasons, signs, live)
        if self.state == "hung":
            back = self._recovered(demand)
            if not back:
                reasons.append(
                    "it moved, and not for long enough yet" if self._moves else "the sign on the device is gone, nothing moves"
                )
                return self._say(snapshot, "hung", [*reasons, *signs.facts], signs, live)
            reasons.append(back)
        if not snapshot.processes and movement.now - self._answered >= 10.0 and not movement.rings:
            said = (
                f"neither /health nor /metrics has answered for {movement.now - self._answered:.0f} s, and no process is seen here"
            )
            return self._say(snapshot, "suspect", [*reasons, said], signs, live)
        if unknown := self._unknown(snapshot, demand, host or logged):
            return self._say(snapshot, "suspect", [*reasons, unknown], signs, live)
        if not demand:
            return self._say(snapshot, "healthy", [*reasons, "idle: no request in hand"], signs, live)
        return self._judge_silence(snapshot, still_s, by, engine_still, host, logged, reasons, signs, live)

    def _unknown(self, snapshot: Snapshot, demand: bool, works: str) -> str:
        """Why it may be called neither healthy nor hung: nothing tells whether it moves, or cards stand while it says idle."""
        movement, limits = self._movement, self.limits
        stats = movement.stats
        waiting = snapshot.canary_waiting_s or 0.0
        told = (
            (snapshot.engine is not None and not snapshot.engine.error)
            or any(not one.error for one in snapshot.progress)
            or (snapshot.load is not None and snapshot.load.open > 0)
            or (stats is not None and movement.now - stats.moved < 15.0)
            # What the newest one told holds until the next is overdue: they come seconds to minutes apart.
            or (snapshot.canary_age_s is not None and not snapshot.canary_error and waiting < limits.unknown_s)
        )
        if told:
            self._told = movement.now
        spin, words = resident(self._tracks, "strong")
        stands = f"a kernel has been resident for {spin:.0f} s and moves no memory ({words})" if spin > 1.0 else ""
        silent = movement.now - self._told
        if silent >= limits.unknown_s:
            said = f"nothing has told for {silent:.0f} s whether it moves: no counter, no recorder, no stats line"
            said += f"; {_canary_waits(snapshot)}" if _canary_waits(snapshot) else ""
            return f"{said}; {stands}" if stands else said
        if stands and not demand and not works and spin >= limits.unknown_s:
            return f"it says that it has no request in hand, and {stands}"
        return ""

    def _tokens_go_on(self) -> bool:
        """Tokens were seen moving a moment ago, and well after every ring stood (a scrape may come a second or two late)."""
        movement = self._movement
        if movement.tokens is None or not movement.rings or movement.now - movement.tokens.moved > self.limits.still_s:
            return False
        return movement.tokens.moved - max(ring.moved for ring in movement.rings.values()) > 2.0

    def _hold_for_remote(self, count: int, signs: Signs) -> None:
        """A kernel that waits for a rank which nobody sees here looks like one that waits for ever."""
        signs.blind.append(Blind("remote ranks", f"{count} ranks compute on other machines and are not seen here"))
        now = self._movement.now
        if not signs.signals:
            self._signs_since = None
            return
        self._signs_since = now if self._signs_since is None else self._signs_since
        if now - self._signs_since < self.limits.remote_s:
            signs.against.append(
                f"one of the {count} ranks on other machines may be late: {self.limits.remote_s:g} s are waited for"
            )
            signs.facts += signs.signals
            signs.signals = []

    def _judge_silence(
        self, snapshot: Snapshot, still_s: float, by: str, engine_still: float, host: str, logged: str, reasons: list[str],
        signs: Signs, live: int | None,
    ) -> Assessment:  # fmt: skip
        movement, limits = self._movement, self.limits
        limit = min(max(limits.suspect_s, 1.5 * self._longest_silence), limits.suspect_most_s)
        tokens_s, _ = movement.still(tokens_only=True)
        if still_s < limit:
            engine = snapshot.engine
            admits = engine is None or engine.running != 0 or not engine.waiting
            if tokens_s >= limits.thrash_s and movement.tokens is not None and (movement.preempted or not admits):
                what = f"it preempts ({movement.preempted:.0f} times)" if admits else "nothing of what waits is admitted"
                said = f"no token for {tokens_s:.0f} s, though the scheduler turns: {what}"
                return self._say(snapshot, "suspect", [*reasons, said, *self._no_sign(signs)], signs, live)
            if engine_still >= limits.differ_s:
                said = f"one engine with requests has stood for {engine_still:.0f} s, others move"
                return self._say(snapshot, "suspect", [*reasons, said, *self._no_sign(signs)], signs, live)
            held = [*signs.against] if signs.facts and signs.against and not (host or logged) else []
            if movement.moved and self.state == "suspect" and not held:
                reasons.append("it moves again")
            return self._say(snapshot, "suspect" if held else "healthy", [*reasons, *held], signs, live)
        said = f"{by} have stood for {still_s:.1f} s"
        if not movement.moved and still_s < limits.suspect_most_s * 4:
            self._pending_silence = still_s
        working = [track for track in own_tracks(self._tracks).values() if track.works]
        if host or logged:
            return self._say(snapshot, "healthy", [*reasons, said, host or logged], signs, live)
        if working and still_s < limits.working_s and not signs.signals:
            words = "; ".join(device_words(track.newest) for track in working if track.newest)
            return self._say(snapshot, "healthy", [*reasons, said, f"the cards work ({words})"], signs, live)
        waits = _canary_waits(snapshot)
        return self._say(snapshot, "suspect", [*reasons, said, *([waits] if waits else []), *self._no_sign(signs)], signs, live)

    def _no_sign(self, signs: Signs) -> list[str]:
        """Why it is not called hung."""
        idle = [track for track in self._tracks.values() if track.idle_s() >= self.limits.idle_s]
        found = [*signs.against, *signs.facts]
        if idle and len(idle) == len(self._tracks):
            words = "; ".join(device_words(track.newest) for track in idle if track.newest)
            found.append(f"the cards are idle: nothing stands on the device, look at the host ({words})")
        if not found:
            missing = ", ".join(dict.fromkeys(blind.signal for blind in signs.blind))
            found.append("no sign from the device" + (f"; blind: {missing}" if missing else ""))
        return found

    def _recovered(self, demand: bool) -> str:
        limits = self.limits
        if not self._moves:
            return ""
        span = self._movement.now - self._moves[0]
        if span < limits.recover_s:
            return ""
        last = self._movement.now - self._moves[-1]
        if not demand:
            return f"recovered: it moved and has nothing left to do for {last:.1f} s"
        if (
            len(self._moves) >= limits.recover_moves
            and self._moves[-1] - self._moves[0] >= limits.recover_s
            and last < limits.suspect_s
        ):
            return f"recovered: {len(self._moves)} movements in {span:.1f} s"
        return ""

    # -- the answer --------------------------------------------------------------------------------------------------------------

    def _say(self, snapshot: Snapshot, state: ServerState, reasons: list[str], signs: Signs, live: int | None) -> Assessment:
        if state != "starting" and self._restart and state not in ("exited", "crashed"):
            self._restart = ""
        if state == "healthy" and self._movement.moved and self._pending_silence:
            # A silence that ended by itself: the next one may be as long before it is suspect. Old ones fade.
            self._longest_silence = max(0.9 * self._longest_silence, self._pending_silence)
            self._pending_silence = 0.0
        elif state == "hung":
            self._pending_silence = 0.0
        self.state = state
        since = self._movement.moved_at
        if since is None:
            since = self._began if self._began is not None else snapshot.at
        seen: dict[str, Blind] = {}
        for blind in (*snapshot.blind, *signs.blind):
            seen.setdefault(blind.signal, blind)
        return Assessment(
            state=state,
            at=snapshot.at,
            since=min(since, snapshot.at),
            reasons=tuple(reasons),
            device_signals=tuple(signs.signals),
            blind=tuple(seen.values()),
            live_requests=live,
        )


def _canary_waits(snapshot: Snapshot) -> str:
    """Of a completion of our own that has no answer yet: in words, beside what stands still; "" where none waits for long."""
    waiting = snapshot.canary_waiting_s
    return f"the completion that was sent to try it (--canary) has waited for {waiting:.0f} s" if waiting and waiting > 1.0 else ""
