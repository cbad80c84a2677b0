"""Which signals say nothing at one look at a server, or say what is not so (health 200 while nothing moves)."""

from __future__ import annotations

from .device_signs import Signs
from .records import Blind, Snapshot

__all__ = ["name_blind"]


def name_blind(snapshot: Snapshot, signs: Signs, *, torn: bool, suspicious: bool) -> None:
    """Name each signal that says nothing here, or says what is not so."""
    engine, log, blind = snapshot.engine, snapshot.log, signs.blind
    if engine is None:
        blind.append(Blind("/metrics", "not looked at"))
    elif engine.error:
        blind.append(Blind("/metrics", engine.error))
    elif torn:
        blind.append(Blind("/metrics", "the scrape lacks figures of the one before: it is a part, and not compared"))
    else:
        if engine.generation_tokens is None and engine.iterations is None:
            blind.append(Blind("/metrics", "token and iteration counters are not exported"))
        if engine.running is None:
            blind.append(Blind("vllm:num_requests_running", "not exported"))
    if engine is not None and engine.health == 200 and suspicious:
        blind.append(Blind("/health", "answers 200 while nothing moves: it only tells whether the engine died"))
    elif engine is not None and engine.health is None:
        blind.append(Blind("/health", "did not answer"))
    if log is None:
        blind.append(Blind("log", "no log of the server is known"))
    elif log.error:
        blind.append(Blind("log", log.error))
    elif log.stats_age_s is None:
        blind.append(Blind("stats line", "none was seen (they come every 10 s, at INFO, while it is not idle)"))
    elif suspicious and log.stats_age_s > 25.0:
        blind.append(Blind("stats line", f"none for {log.stats_age_s:.0f} s: the logger stands with the engine"))
    if not snapshot.processes:
        blind.append(Blind("processes", "none of the server is seen here: an end would only show at /health"))
    if snapshot.canary_error:
        blind.append(Blind("canary", f"could not be asked, which says nothing of the engine: {snapshot.canary_error}"))
    elif snapshot.canary_age_s is None and snapshot.canary_waiting_s is None:
        blind.append(Blind("canary", "no completion of our own is sent"))
