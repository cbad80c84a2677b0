"""Entries prove themselves, keys stay inside the folder, and a bad disk costs time only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.kernels import cache as module
from dsv4_repro.kernels.cache import Cache, cache_root, content_key


def test_what_is_stored_is_loaded(tmp_path: Path) -> None:
    store = Cache("cubin", tmp_path)
    assert store.load("k1") is None
    assert store.store("k1", b"one\nline\n")
    assert store.store("k2", b"")
    assert (store.load("k1"), store.load("k2")) == (b"one\nline\n", b"")
    assert store.store("k1", b"two")
    assert store.load("k1") == b"two"
    assert Cache("sass", tmp_path).load("k1") is None
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".tmp")]


@given(payload=st.binary(max_size=200), position=st.integers(0, 400), byte=st.integers(1, 255), flip=st.booleans())
@settings(max_examples=120, deadline=None)
def test_any_damage_makes_it_absent(
    payload: bytes, position: int, byte: int, flip: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = Cache("cubin", tmp_path_factory.getbasetemp() / "damage")
    assert store.store("key", payload)
    path = store.path("key")
    raw = bytearray(path.read_bytes())
    position %= len(raw)
    if flip:
        raw[position] ^= byte
    else:
        del raw[position:]
    path.write_bytes(raw)
    assert store.load("key") is None
    assert not path.exists()


def test_a_huge_file_is_not_read_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Cache("cubin", tmp_path)
    store.store("key", b"x")
    monkeypatch.setattr(module, "MAX_ENTRY_BYTES", 1 << 10)
    with store.path("key").open("r+b") as stream:
        stream.truncate(1 << 34)
    assert store.load("key") is None


@pytest.mark.parametrize("key", ["", ".", "..", "../x", "a/b", ".hidden", "a b", "x" * 121, "k\0"])
def test_keys_that_could_leave_the_folder_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a cache key"):
        Cache("cubin", tmp_path).store(key, b"x")
    with pytest.raises(ValueError, match="not a cache key"):
        Cache("../cubin", tmp_path).load("key")


def test_no_two_lists_of_parts_share_a_key() -> None:
    lists = [("ab", "c"), ("a", "bc"), ("abc",), ("", "abc"), ("abc", ""), (b"\0", "abc")]
    assert len({content_key(*parts) for parts in lists}) == len(lists)
    assert content_key("a") == content_key(b"a")


def test_a_root_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    store = Cache("cubin", tmp_path / "file" / "deep")
    assert not store.store("key", b"x")
    assert store.load("key") is None


def test_the_environment_chooses_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSV4_REPRO_CACHE", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
    monkeypatch.delenv("DSV4_REPRO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "dsv4-repro"


def test_writers_at_the_same_time_leave_one_whole_entry(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from dsv4_repro.kernels.cache import Cache\n"
        "store = Cache('cubin', Path(sys.argv[1])); mine = sys.argv[2].encode() * 100000\n"
        "for _ in range(60):\n"
        "    assert store.store('key', mine)\n"
        "    found = store.load('key'); assert found is not None and len(set(found)) == 1 and len(found) == 100000\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    writers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), letter], env=environment) for letter in "abc"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
