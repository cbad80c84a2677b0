from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import DownloadError
from dsv4_repro.kernels import ranged
from dsv4_repro.kernels.package_index import Connection, IndexSettings
from dsv4_repro.kernels.ranged import RangedFile, RangesRefusedError, download_whole

CONTENT = random.Random(5).randbytes(3_000_000)


def _file(server: Any, **more: Any) -> RangedFile:
    return RangedFile(f"{server.url}/files/f.bin", Connection(IndexSettings()), **more)


@pytest.fixture
def server(index_server: Any) -> Any:
    index_server.files["f.bin"] = CONTENT
    return index_server


def test_reads_are_those_of_a_file(server: Any) -> None:
    file = _file(server)
    same = io.BytesIO(CONTENT)
    rng = random.Random(1)
    assert file.size == len(CONTENT)
    for _ in range(200):
        place, count = rng.randrange(len(CONTENT) + 10), rng.choice([0, 1, 30, 70_000, 1_200_000])
        assert file.seek(place) == same.seek(place)
        assert file.read(count) == same.read(count)
        assert file.tell() == same.tell()
    assert file.seek(-5, io.SEEK_END) == len(CONTENT) - 5
    assert file.read() == CONTENT[-5:]
    assert file.read(10) == b""


def test_only_what_is_read_is_fetched(server: Any) -> None:
    file = _file(server)
    file.seek(len(CONTENT) - 100)
    file.read(100)
    assert file.fetched < 1 << 20


def test_a_window_is_one_request_and_then_none(server: Any, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    file = _file(server, progress=lambda *what: seen.append(what), folder=tmp_path)
    with file.window(1_000_000, 2_500_000, "member"):
        before = len(server.requests)
        file.seek(1_000_000)
        assert file.read(1_500_000) == CONTENT[1_000_000:2_500_000]
        assert len(server.requests) == before
    assert seen[-1] == ("member", 1_500_000, 1_500_000)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_connection_is_resumed_where_it_broke(server: Any) -> None:
    server.break_after = 400_000
    file = _file(server)
    with file.window(0, len(CONTENT), "member"):
        file.seek(0)
        assert file.read() == CONTENT
    assert file.fetched == len(CONTENT)


def test_a_connection_that_gives_nothing_is_given_up(server: Any) -> None:
    file = _file(server)
    server.break_after = 0
    with pytest.raises(DownloadError):
        file.read(100)
    assert len(server.requests) <= 2 + ranged.ATTEMPTS


def test_a_server_without_ranges_is_told_apart(server: Any) -> None:
    server.ranges = False
    with pytest.raises(RangesRefusedError):
        _file(server)


def test_a_file_that_changes_meanwhile_is_an_error(server: Any) -> None:
    file = _file(server)
    server.files["f.bin"] = CONTENT + b"more"
    with pytest.raises(DownloadError, match="changed"):
        file.read(100)


def test_a_missing_file_is_an_error(index_server: Any) -> None:
    with pytest.raises(DownloadError, match="404"):
        _file(index_server)


def test_the_whole_file_with_progress_and_a_size_that_must_hold(server: Any) -> None:
    kept = io.BytesIO()
    seen: list[int] = []
    connection = Connection(IndexSettings())
    url = f"{server.url}/files/f.bin"
    count = download_whole(url, connection, kept, size=len(CONTENT), what="f", progress=lambda _, done, __: seen.append(done))
    assert (count, kept.getvalue() == CONTENT, seen[-1]) == (len(CONTENT), True, len(CONTENT))
    with pytest.raises(DownloadError, match="more than"):
        download_whole(url, connection, io.BytesIO(), size=1000, what="f")
    with pytest.raises(DownloadError, match="ended after"):
        download_whole(url, connection, io.BytesIO(), size=len(CONTENT) + 1, what="f")
