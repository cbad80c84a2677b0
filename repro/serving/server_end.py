"""Has the server ended, or did another one take its place? From its processes, ``/health`` and the words of its log. Pure."""

from __future__ import annotations

from .records import ProcessSample, ServerState, Snapshot

__all__ = ["ServerEnd"]

#: Roles without which there is no server.
_CORE = ("api", "engine", "worker")
_DEAD_WORDS = ("fatal", "engine-dead", "worker-died", "engine-proc-died", "engine-failed-start")
_MOST_PIDS = 4096


class ServerEnd:
    """Told of snapshots in time order, it knows the processes that make the server."""

    def __init__(self) -> None:
        self._core: dict[int, str] = {}
        self._bad_health = 0
        self._bad_health_at = -1.0

    def forget(self) -> None:
        """Another server: none of its processes is known."""
        self._core, self._bad_health = {}, 0

    def replaced(self, snapshot: Snapshot, *, ended: bool) -> str:
        """Why this is another server than before, or nothing. ``ended``: the one before has."""
        core = {one.pid: one.role for one in snapshot.processes if one.role in _CORE and one.state not in (None, "Z", "X")}
        api = {pid for pid, role in core.items() if role == "api"}
        known = {pid for pid, role in self._core.items() if role == "api"}
        if api and known and not api & known:
            why = f"another API process (pid {min(api)}): it was started anew"
        elif ended and core and not set(core) & set(self._core):
            why = "other processes than before: it was started anew"
        else:
            why = ""
        if why:
            self.forget()
        self._core.update(core)
        while len(self._core) > _MOST_PIDS:
            self._core.pop(next(iter(self._core)))
        return why

    def ended(self, snapshot: Snapshot, *, ready: bool) -> tuple[ServerState, list[str]] | None:
        """The state and reasons of a server that is no more, or None. ``ready``: it has served."""
        gone = [one for one in snapshot.processes if one.role in _CORE and one.state in (None, "Z", "X") and one.pid in self._core]
        events = snapshot.log.events if snapshot.log is not None else {}
        api = [one for one in gone if one.role == "api"] or (gone if len(gone) == len(self._core) else [])
        if api:
            known = [one for one in api if one.exit_status is not None]
            words = "; ".join(_gone(one) for one in gone[:6])
            if known:
                clean = all(one.exit_status == 0 for one in known)
                return ("exited" if clean else "crashed"), [words]
            if "shutdown" in events and not any(word in events for word in _DEAD_WORDS):
                return "exited", [words, "the log says that it was asked to shut down"]
            return "crashed", [words, "its exit status is not known here: it is not our child"]
        if gone:
            return "crashed", ["; ".join(_gone(one) for one in gone[:6]) + ": the server cannot go on without it"]
        engine = snapshot.engine
        if engine is not None and engine.at > self._bad_health_at:
            self._bad_health_at = engine.at
            self._bad_health = self._bad_health + 1 if engine.health is not None and engine.health >= 500 else 0
        words = ", ".join(word for word in _DEAD_WORDS if word in events)
        if self._bad_health and (self._bad_health >= 2 or words) and (ready or words):
            status = engine.health if engine is not None else 503
            return "crashed", [f"/health answers {status}: its engine is dead" + (f" (log: {words})" if words else "")]
        if words and not snapshot.processes and engine is not None and engine.health is None:
            return "crashed", [f"the log says {words}, and /health does not answer ({engine.error or 'no answer'})"]
        return None


def _gone(one: ProcessSample) -> str:
    how = f" with status {one.exit_status}" if one.exit_status is not None else ""
    return f"process {one.pid} ({one.role}) is gone{how}"
