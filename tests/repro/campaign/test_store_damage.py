"""Stores that somebody sent, or that a disk damaged: each reading gives its answer or a typed error that names the file."""

from __future__ import annotations

import math
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import RunStoreError
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.campaign import stored_rows
from dsv4_repro.repro.campaign.cells import TrialResult
from dsv4_repro.repro.campaign.plan import HuntPlan
from dsv4_repro.repro.campaign.store import CampaignStore

HANG = TrialResult("hang", 1, True, identity="a" * 12, class_="gpu-spin-barrier", cause="peer-left", windows=("w1",), to_hang_s=0.1)
CLEAN = TrialResult("clean", 1, True, windows=("w1",))
PLAN = HuntPlan.from_document({"name": "t", "budget": {"trials": 12}, "minimise": False, "matrix": {"mtp": [0, 1]}})
_ODD = [
    None, "", "abc", b"\xff\0", -1, 1 << 62, float("inf"), 1e308, "\x1b[31m", "[[[", "{}", "1", "../../x", "/etc/passwd",
    '{"seconds": "x"}',
]  # fmt: skip
_COLUMNS = {
    "meta": ("key", "value"),
    "tally": ("factor", "value", "kind", "trials", "seconds"),
    "windows": ("key", "trials", "hangs"),
    "hangs": ("identity", "class", "cause", "signature", "first_trial", "hangs", "minimised", "bundle"),
    "events": ("at", "kind", "detail"),
    "trials": ("cell", "seed", "kind", "identity", "seconds", "to_hang"),
}


def _stored(folder: Path) -> Path:
    with CampaignStore.create(folder, PLAN) as store:
        store.add(0, 0, {"mtp": 0}, HANG, "w")
        store.add(1, 1, {"mtp": 1}, CLEAN, "w")
        store.event("invocation", seconds=1.0)
    return folder / "campaign.sqlite"


def _anew(path: Path, data: bytes) -> Path:
    for beside in path.parent.glob("campaign.sqlite*"):
        beside.unlink()
    path.write_bytes(data)
    return path


def _look_at_everything(folder: Path) -> None:
    """Every reading of a store: what it says, or RunStoreError naming the file."""
    refused: list[RunStoreError] = []

    def attempt(reading: Callable[[], Any]) -> Any:
        try:
            return reading()
        except RunStoreError as error:
            refused.append(error)
            return None

    store = attempt(lambda: CampaignStore.read(folder))
    if store is not None:
        with store:
            for reading in (store.summary, store.times_to_hang, store.window_counts, store.done_numbers):
                attempt(reading)
            attempt(lambda: store.first_trial("a" * 12))
            attempt(lambda: store.plan)
            events = attempt(store.events) or []
            assert all(math.isfinite(float(detail.get("seconds", 0))) for _, _, detail in events)
    assert all(str(folder) in str(error) for error in refused)


@pytest.mark.parametrize(("table", "column"), [(table, column) for table, columns in _COLUMNS.items() for column in columns])
def test_any_value_in_any_column_is_read_or_named(tmp_path: Path, table: str, column: str, capsys: Any) -> None:
    path = _stored(tmp_path / "c")
    whole = path.read_bytes()
    for value in _ODD:
        with closing(sqlite3.connect(_anew(path, whole))) as db, suppress(sqlite3.IntegrityError), db:
            db.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (value,))
        _look_at_everything(tmp_path / "c")
        assert main(["hunt", "--status", str(tmp_path / "c"), "--json"]) in (0, 3, 4, 5)
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err
        if value in ("../../x", "/etc/passwd") and column in ("minimised", "bundle"):
            assert f"table hangs, {column}" in said.err


def test_a_store_with_flipped_bytes_or_without_its_tables(tmp_path: Path) -> None:
    path = _stored(tmp_path / "c")
    whole = path.read_bytes()
    rnd = random.Random(7)
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rnd.randint(1, 30)):
            damaged[rnd.randrange(len(damaged))] = rnd.randrange(256)
        _anew(path, bytes(damaged[: rnd.choice([len(whole), rnd.randrange(len(whole))])]))
        _look_at_everything(tmp_path / "c")
    for table, columns in _COLUMNS.items():
        for change in (f"DROP TABLE {table}", f"ALTER TABLE {table} RENAME COLUMN {columns[-1]} TO other"):
            with closing(sqlite3.connect(_anew(path, whole))) as db, db:
                db.execute(change)
            _look_at_everything(tmp_path / "c")


def test_a_summary_is_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hunt that counts a hang between the reading of two tables does not make more hangs than trials."""
    folder = tmp_path / "c"
    _stored(folder)
    read = stored_rows.checked_rows

    def meanwhile(db: Any, path: Path, table: str, *more: Any) -> Any:
        yield from read(db, path, table, *more)
        if table == "tally":
            with CampaignStore.resume(folder) as writer:
                writer.add(2, 0, {"mtp": 0}, HANG, "w")

    with CampaignStore.read(folder) as store:
        monkeypatch.setattr("dsv4_repro.repro.campaign.store.checked_rows", meanwhile)
        found = store.summary()
        assert (found.kinds["hang"], found.hangs[0].hangs) == (1, 1)
        monkeypatch.undo()
        assert store.summary().kinds["hang"] == 2
