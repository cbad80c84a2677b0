"""The campaign's store: SQLite in WAL mode, one writer, a trial a transaction, so that kill -9 loses only trials in flight.

``trials`` has a row for each trial that ended, by its number: written once, never twice. ``tally`` and ``windows`` are kept in
the same transaction, so a summary of a million trials reads a few hundred rows; ``recount`` makes them anew from the trials. The
order of the trials is a function of their number (and, when guided, of what was stored before), so a resumed campaign makes the
numbers that are missing. Power loss may cost the last second's trials (WAL, synchronous NORMAL); the file stays consistent.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...clock import SYSTEM, Clock, utc_stamp
from ...errors import PlanError, RefusedError, RunStoreError
from .cells import TrialResult
from .plan import HuntPlan
from .stored_rows import STORE_ERRORS, checked_rows, damaged, is_seconds, store_error, text_of
from .summary import HangKind, Summary

__all__ = ["CampaignStore"]

FORMAT = "1"
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE trials (
  number INTEGER PRIMARY KEY, cell INTEGER NOT NULL, seed INTEGER NOT NULL, kind TEXT NOT NULL, window INTEGER NOT NULL,
  identity TEXT, seconds REAL NOT NULL, to_hang REAL, worker TEXT NOT NULL, at TEXT NOT NULL, reused INTEGER, why TEXT NOT NULL
);
CREATE INDEX trials_of_hangs ON trials (identity) WHERE identity IS NOT NULL;
CREATE TABLE tally (
  factor TEXT NOT NULL, value TEXT NOT NULL, kind TEXT NOT NULL, trials INTEGER NOT NULL, seconds REAL NOT NULL,
  PRIMARY KEY (factor, value, kind)
) WITHOUT ROWID;
CREATE TABLE windows (key TEXT PRIMARY KEY, trials INTEGER NOT NULL, hangs INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE hangs (
  identity TEXT PRIMARY KEY, class TEXT NOT NULL, cause TEXT, signature TEXT, first_trial INTEGER NOT NULL, hangs INTEGER NOT NULL,
  minimised TEXT, bundle TEXT
) WITHOUT ROWID;
CREATE TABLE events (id INTEGER PRIMARY KEY, at TEXT NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL);
"""


class CampaignStore:
    """Open with ``create``, ``resume`` (both take the lock) or ``read`` (takes none). A context manager."""

    def __init__(self, folder: Path, connection: sqlite3.Connection, lock: int | None, clock: Clock) -> None:
        self.folder = folder
        connection.text_factory = text_of
        self._db = connection
        self._lock = lock
        self._clock = clock

    # -- opening -------------------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, folder: Path, plan: HuntPlan, *, clock: Clock = SYSTEM) -> CampaignStore:
        """A new campaign in ``folder``. RefusedError if there is one already or somebody hunts there; RunStoreError for disk
        errors.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunStoreError(f"cannot make the folder: {error.strerror or error}", path=str(folder)) from None
        lock = _locked(folder)
        if (folder / "campaign.sqlite").exists():
            os.close(lock)
            raise RefusedError(f"{folder} holds a campaign already", help_text="Go on with --resume, or write elsewhere: --out DIR")
        partial = folder / "campaign.sqlite.new"
        for leftover in folder.glob("campaign.sqlite.new*"):
            leftover.unlink()
        store = cls(folder, _connect(partial), lock, clock)
        try:
            with store._writing():
                for statement in _TABLES.split(";\n"):
                    if statement.strip():
                        store._db.execute(statement)
                meta = {"format": FORMAT, "plan": json.dumps(plan.document()), "plan_key": plan.key, "created": utc_stamp(clock)}
                store._db.executemany("INSERT INTO meta VALUES (?, ?)", sorted(meta.items()))
            store._db.close()
            partial.replace(folder / "campaign.sqlite")  # a store is whole or not there
            store._db = _connect(folder / "campaign.sqlite")
            store._db.text_factory = text_of
        except STORE_ERRORS as error:
            os.close(lock)
            raise store_error(error, folder) from None
        return store

    @classmethod
    def resume(cls, folder: Path, plan: HuntPlan | None = None, *, clock: Clock = SYSTEM) -> CampaignStore:
        """Go on. RefusedError if somebody hunts there now, or if ``plan`` is another one (its budget may differ)."""
        path = _existing(folder)
        lock = _locked(folder)
        store = cls(folder, _connect(path), lock, clock)
        try:
            store._check_format()
            if plan is not None and store._meta("plan_key") != plan.key:
                raise RefusedError(
                    f"{folder} holds the campaign of another plan",
                    help_text="Only the budget may change; or write elsewhere: --out DIR",
                )
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def read(cls, folder: Path) -> CampaignStore:
        """Look at a campaign, running or not, without the lock. RunStoreError if there is none that can be read."""
        path = _existing(folder)
        try:
            connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=30.0)
        except STORE_ERRORS as error:
            raise store_error(error, path) from None
        store = cls(folder, connection, None, SYSTEM)
        try:
            store._check_format()
        except BaseException:
            store.close()
            raise
        return store

    def __enter__(self) -> CampaignStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close and let go of the lock; may be called twice."""
        self._db.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check_format(self) -> None:
        found = self._meta("format")
        if found != FORMAT:
            raise RunStoreError(f"format {str(found)[:40]!r}, {FORMAT!r} expected", path=str(self._path))

    def _meta(self, key: str) -> str | None:
        try:
            row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        except STORE_ERRORS as error:
            raise store_error(error, self._path) from None
        return None if row is None else str(row[0])

    @property
    def _path(self) -> Path:
        return self.folder / "campaign.sqlite"

    def _rows(self, table: str, columns: Mapping[str, str], rest: str = "", given: tuple[Any, ...] = ()) -> Iterator[Any]:
        return checked_rows(self._db, self._path, table, columns, rest, given)

    @contextmanager
    def _one_moment(self) -> Iterator[None]:
        """What is read here is of one moment: a hunt that goes on meanwhile has counted a hang in no table or in all of them."""
        try:
            self._db.execute("BEGIN")
        except STORE_ERRORS as error:
            raise store_error(error, self._path) from None
        try:
            yield
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    @property
    def plan(self) -> HuntPlan:
        """The plan that the campaign was created with."""
        try:
            document = json.loads(self._meta("plan") or "{}")
            if not isinstance(document, dict):
                raise ValueError("no table of keys")
            return HuntPlan.from_document(document, "plan")
        except (ValueError, RecursionError, PlanError) as error:
            raise damaged(self._path, f"its plan: {str(error)[:300]}") from None

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db
            self._db.execute("COMMIT")
        except STORE_ERRORS as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise store_error(error, self._path) from None
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    # -- writing -------------------------------------------------------------------------------------------------------------

    def add(self, number: int, cell: int, factors: Mapping[str, Any], result: TrialResult, worker: str) -> bool:
        """One trial that ended, in one transaction. False if that number is stored already: then nothing is counted."""
        return self.add_many([(number, cell, factors, result, worker)]) == 1

    def add_many(self, ended: list[tuple[int, int, Mapping[str, Any], TrialResult, str]]) -> int:
        """Several trials in one transaction; how many were new."""
        new = 0
        with self._writing() as db:
            for number, cell, factors, result, worker in ended:
                new += self._add(db, number, cell, factors, result, worker)
        return new

    def _add(
        self, db: sqlite3.Connection, number: int, cell: int, factors: Mapping[str, Any], result: TrialResult, worker: str
    ) -> int:
        reused = None if result.reused is None else int(result.reused)
        done = db.execute(
            "INSERT OR IGNORE INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (number, cell, result.seed, result.kind, int(result.window), result.identity, result.seconds, result.to_hang_s, worker,
             utc_stamp(self._clock), reused, "" if result.kind == "clean" else result.why[:1000]),
        )  # fmt: skip
        if done.rowcount != 1:
            return 0
        rows = [(name, _text(value), result.kind, result.seconds) for name, value in (("", ""), *factors.items())]
        db.executemany(
            "INSERT INTO tally VALUES (?, ?, ?, 1, ?) "
            "ON CONFLICT DO UPDATE SET trials = trials + 1, seconds = seconds + excluded.seconds",
            rows,
        )
        hung = int(result.kind == "hang")
        last = result.windows[-1] if result.windows else None
        db.executemany(
            "INSERT INTO windows VALUES (?, 1, ?) ON CONFLICT DO UPDATE SET trials = trials + 1, hangs = hangs + excluded.hangs",
            [(key, hung if key == last else 0) for key in result.windows],
        )
        if hung:
            db.execute(
                "INSERT INTO hangs VALUES (?, ?, ?, ?, ?, 1, NULL, NULL) ON CONFLICT DO UPDATE SET hangs = hangs + 1",
                (result.identity or "not identified", result.class_, result.cause, result.signature, number),
            )
        return 1

    def event(self, kind: str, **detail: Any) -> None:
        """A worker that died, a node that was lost, a device that was cleared."""
        with self._writing() as db:
            text = json.dumps(detail, default=str)[:4000]
            db.execute("INSERT INTO events (at, kind, detail) VALUES (?, ?, ?)", (utc_stamp(self._clock), kind, text))

    def note_artefact(self, identity: str, *, minimised: str | None = None, bundle: str | None = None) -> None:
        """What was written about a hang."""
        with self._writing() as db:
            db.execute(
                "UPDATE hangs SET minimised = coalesce(?, minimised), bundle = coalesce(?, bundle) WHERE identity = ?",
                (minimised, bundle, identity),
            )

    def recount(self) -> None:
        """Make ``tally`` anew from the trials (the windows' table cannot be: trials do not keep all their keys)."""
        plan = self.plan
        tally: dict[tuple[str, str, str], list[float]] = {}
        for cell, kind, seconds in self._rows("trials", {"cell": "count", "kind": "text", "seconds": "seconds"}):
            for name, value in (("", ""), *plan.values_of(cell).items()):
                entry = tally.setdefault((name, _text(value), kind), [0, 0.0])
                entry[0] += 1
                entry[1] += seconds
        with self._writing() as db:
            db.execute("DELETE FROM tally")
            db.executemany("INSERT INTO tally VALUES (?, ?, ?, ?, ?)", [(*key, int(n), s) for key, (n, s) in tally.items()])

    # -- reading -------------------------------------------------------------------------------------------------------------

    def done_numbers(self) -> tuple[int, list[int]]:
        """(the smallest number from which on none is stored, the missing numbers below it; at most a million of them)."""
        high, count = next(self._rows("trials", {"coalesce(max(number) + 1, 0)": "count", "count(*)": "count"}))
        if count == high:
            return high, []
        missing: list[int] = []
        expected = 0
        for (number,) in self._rows("trials", {"number": "count"}, "ORDER BY number"):
            while expected < number and len(missing) < 1_000_000:
                missing.append(expected)
                expected += 1
            expected = number + 1
        return high, missing

    def window_counts(self) -> dict[str, int]:
        """Danger window -> trials that reached it."""
        return dict(self._rows("windows", {"key": "text", "trials": "count"}))

    def first_trial(self, identity: str) -> tuple[int, int]:
        """(cell, seed) of the first trial that hung so."""
        first = "WHERE identity = ? ORDER BY number LIMIT 1"
        row = next(self._rows("trials", {"cell": "count", "seed": "count"}, first, (identity,)), None)
        if row is None:
            raise RunStoreError(f"no trial hung with identity {identity}", path=str(self.folder))
        return int(row[0]), int(row[1])

    def times_to_hang(self, most: int = 10_000) -> list[tuple[str, float]]:
        """(identity, seconds from the trial's start to the verdict), the first ``most`` hangs."""
        known = "WHERE identity IS NOT NULL AND to_hang IS NOT NULL ORDER BY number LIMIT ?"
        rows = self._rows("trials", {"identity": "text", "to_hang": "seconds"}, known, (most,))
        return [(identity, float(seconds)) for identity, seconds in rows]

    def events(self, kind: str | None = None) -> list[tuple[str, str, dict[str, Any]]]:
        """(when, kind, detail) of all events, or of one kind."""
        columns = {"at": "text", "kind": "text", "detail": "text"}
        found = []
        for at, name, detail in self._rows("events", columns, "WHERE ? IS NULL OR kind = ? ORDER BY id", (kind, kind)):
            try:
                parsed = json.loads(detail)
            except (ValueError, RecursionError):
                parsed = None  # cut at its longest
            if not isinstance(parsed, dict) or not is_seconds(parsed.get("seconds", 0)):
                parsed = {"text": detail}
            found.append((at, name, parsed))
        return found

    def summary(self) -> Summary:
        """The campaign so far, from the tallies. RunStoreError if it cannot be read."""
        factors: dict[str, dict[str, dict[str, int]]] = {}
        kinds: dict[str, int] = {}
        total = 0.0
        with self._one_moment():
            columns = {"factor": "text", "value": "text", "kind": "text", "trials": "count", "seconds": "seconds"}
            for factor, value, kind, trials, seconds in self._rows("tally", columns):
                if factor == "":
                    kinds[kind] = trials
                    total += seconds
                else:
                    factors.setdefault(factor, {}).setdefault(value, {})[kind] = trials
            columns = {
                "identity": "text", "class": "text", "cause": "text?", "signature": "text?", "first_trial": "count",
                "hangs": "count", "minimised": "path?", "bundle": "path?",
            }  # fmt: skip
            hangs = tuple(HangKind(*row) for row in self._rows("hangs", columns, "ORDER BY hangs DESC, identity"))
            columns = {"key": "text", "trials": "count", "hangs": "count"}
            windows = tuple(self._rows("windows", columns, "ORDER BY trials DESC, key"))
        if sum(hang.hangs for hang in hangs) > kinds.get("hang", 0) or any(hung > trials for _, trials, hung in windows):
            raise damaged(self._path, "tables tally, windows and hangs: more hangs than trials")
        return Summary(self.plan.name, sum(kinds.values()), kinds, total, hangs, windows, factors)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _connect(path: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(path, timeout=30.0, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
    except STORE_ERRORS as error:
        raise store_error(error, path) from None
    return connection


def _existing(folder: Path) -> Path:
    path = folder / "campaign.sqlite"
    if not path.is_file():
        raise RunStoreError("no campaign here", path=str(folder), help_text="Start one: dsv4-repro hunt PLAN.toml --out DIR")
    return path


def _locked(folder: Path) -> int:
    """An exclusive lock that the kernel drops with the process, however it ends."""
    try:
        fd = os.open(folder / "campaign.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunStoreError(f"the lock cannot be made: {error.strerror or error}", path=str(folder)) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise RefusedError(
            f"another hunt is writing to {folder}",
            help_text="Look at it: dsv4-repro hunt --status DIR; or write elsewhere: --out DIR",
        ) from None
    os.set_inheritable(fd, False)
    return fd
