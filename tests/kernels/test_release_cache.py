from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv4_repro.kernels.release_cache import Entry, ReleaseCache


def test_contents_come_back_and_prove_themselves(tmp_path: Path) -> None:
    digest = ReleaseCache(tmp_path).keep(b"machine code" * 1000)
    assert ReleaseCache(tmp_path).content(digest) == b"machine code" * 1000
    (file,) = [path for path in (tmp_path / "shipped").rglob("*") if path.is_file()]
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(bytes(raw))
    assert ReleaseCache(tmp_path).content(digest) is None


@pytest.mark.parametrize("digest", ["", "x", "../../etc/passwd", "0" * 63, "0" * 65, "G" * 64])
def test_what_is_no_digest_is_never_a_path(tmp_path: Path, digest: str) -> None:
    assert ReleaseCache(tmp_path).content(digest) is None


def test_the_index_keeps_what_others_add(tmp_path: Path) -> None:
    first, second = ReleaseCache(tmp_path), ReleaseCache(tmp_path)
    first.put("vllm==0.26.0@x86_64", Entry(release="0.26.0", cubins={"sm_90": ("a" * 64,)}))
    second.put("vllm==0.27.1@x86_64", Entry(release="0.27.1", searched=("x.so",)))
    entries = ReleaseCache(tmp_path).entries()
    assert sorted(entries) == ["vllm==0.26.0@x86_64", "vllm==0.27.1@x86_64"]
    assert entries["vllm==0.26.0@x86_64"].cubins == {"sm_90": ("a" * 64,)}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []


def test_two_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from dsv4_repro.kernels.release_cache import Entry, ReleaseCache
cache = ReleaseCache(Path(sys.argv[1]))
for number in range(8):
    cache.put(f"{sys.argv[2]}-{number}", Entry(release="1.0"))
"""
    workers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in ("a", "b")]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    assert len(ReleaseCache(tmp_path).entries()) == 16


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"schema": "other/1", "entries": {}}',
        '{"schema": "dsv4-repro/shipped-index/1", "entries": 5}',
        "[" * 100_000,
        '{"schema": "dsv4-repro/shipped-index/1"}',
    ],
)
def test_an_index_that_cannot_be_read_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "shipped-index.json").write_text(text)
    cache = ReleaseCache(tmp_path)
    assert cache.entries() == {}
    cache.put("k", Entry(release="1.0"))
    assert list(cache.entries()) == ["k"]


def test_one_bad_entry_does_not_spoil_the_others(tmp_path: Path) -> None:
    ReleaseCache(tmp_path).put("good", Entry(release="1.0"))
    document = json.loads((tmp_path / "shipped-index.json").read_text())
    document["entries"]["bad"] = {"cubins": 7}
    (tmp_path / "shipped-index.json").write_text(json.dumps(document))
    assert list(ReleaseCache(tmp_path).entries()) == ["good"]


def test_a_cache_that_cannot_be_written_loses_nothing_of_this_run(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    cache = ReleaseCache(blocked / "cache")
    digest = cache.keep(b"code")
    cache.put("k", Entry(release="1.0"))
    assert cache.content(digest) == b"code"
    assert cache.entries() == {}
    with cache.lock("x"), cache.work_folder() as folder:
        assert Path(folder).is_dir()
    assert not Path(folder).exists()


def test_what_a_killed_process_left_is_removed_and_what_another_fills_is_not(tmp_path: Path) -> None:
    cache = ReleaseCache(tmp_path)
    old, new = tmp_path / "work" / "fetch-old", tmp_path / "work" / "fetch-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "wheel").write_bytes(b"x")
    os.utime(old, (time.time() - 3 * 86400,) * 2)
    with cache.work_folder():
        assert not old.exists()
        assert new.exists()


def test_the_lock_makes_the_other_wait(tmp_path: Path) -> None:
    import fcntl

    cache = ReleaseCache(tmp_path)
    with cache.lock("vllm==1"):
        (path,) = (tmp_path / "locks").iterdir()
        with path.open("ab") as stream, pytest.raises(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with path.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
