from __future__ import annotations

import io
import stat
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_repro.errors import CubinError, ReproError
from dsv4_repro.kernels import wheels
from dsv4_repro.kernels.wheels import WheelFile


def _open(raw: bytes) -> WheelFile:
    return WheelFile(io.BytesIO(raw), "x.whl")


def test_names_members_and_metadata(makers: Any) -> None:
    wheel = _open(makers.wheel({"vllm/a.py": b"a = 1\n", "vllm/v1/b/indexer.py": b"b", "vllm/_C.abi3.so": b"\x7fELF"}))
    assert "vllm/a.py" in wheel.names
    assert wheel.matching(["vllm/**/indexer*.py"]) == ["vllm/v1/b/indexer.py"]
    assert wheel.matching(["vllm/*.so", "*/a.py"]) == ["vllm/a.py", "vllm/_C.abi3.so"]
    assert wheel.read("vllm/a.py") == b"a = 1\n"
    assert wheel.metadata() == {"Name": "vllm", "Version": "0.99.0", "Tag": "cp38-abi3-manylinux_2_28_x86_64"}
    assert len(wheel.record()["vllm/a.py"]) == 64


def test_a_member_that_is_not_what_record_says_is_an_error(makers: Any) -> None:
    good = makers.wheel({"vllm/_C.so": b"first"})
    kept = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(kept, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"other" if name.endswith(".so") else old.read(name))
    with pytest.raises(CubinError, match="RECORD"):
        _open(kept.getvalue()).extract("vllm/_C.so", io.BytesIO())


def test_a_flipped_bit_is_caught_by_the_checksum(makers: Any) -> None:
    raw = bytearray(makers.wheel({"vllm/_C.so": bytes(range(256)) * 64}, record=False))
    with zipfile.ZipFile(io.BytesIO(bytes(raw))) as archive:
        info = archive.getinfo("vllm/_C.so")
    raw[info.header_offset + 30 + len(info.filename) + 20] ^= 1
    with pytest.raises(CubinError):
        _open(bytes(raw)).read("vllm/_C.so")


def _zip(*members: tuple[zipfile.ZipInfo | str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    kept = io.BytesIO()
    with zipfile.ZipFile(kept, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return kept.getvalue()


def test_any_byte_of_the_directory_may_lie(tmp_path: Path) -> None:
    """In a file, unlike in memory, an offset before its beginning is an OSError."""
    raw = _zip(("vllm/_C.so", b"a" * 500), ("p-1.dist-info/RECORD", b"x"))
    path = tmp_path / "p-1-py3-none-any.whl"
    begin = raw.index(b"PK\x01\x02")
    refused = 0
    for place in range(begin, len(raw)):
        for value in (0, 1, 0x7F, 0x80, 0xFF):
            for width in (1, 4):
                path.write_bytes(raw[:place] + bytes([value]) * width + raw[place + width :])
                with path.open("rb") as stream:
                    try:
                        wheel = WheelFile(stream, str(path))
                        for name in wheel.names:
                            wheel.read(name)
                    except CubinError:
                        refused += 1
    assert refused > 100


def test_a_bomb_is_refused_by_its_announced_size() -> None:
    raw = _zip(("vllm/_C.so", b"\0" * (4 << 20)))
    assert len(raw) < 10_000
    with pytest.raises(CubinError, match="more than 1048576"):
        _open(raw).extract("vllm/_C.so", io.BytesIO(), limit=1 << 20)


def test_a_bomb_that_announces_little_is_stopped_while_it_unpacks() -> None:
    raw = bytearray(_zip(("vllm/_C.so", b"\0" * (8 << 20))))
    start = raw.index(b"PK\x01\x02")
    raw[start + 24 : start + 28] = struct.pack("<I", 1000)
    kept = io.BytesIO()
    with pytest.raises(CubinError):
        _open(bytes(raw)).extract("vllm/_C.so", kept)
    assert len(kept.getvalue()) <= 1 << 20


def test_links_encryption_and_other_compression_are_refused() -> None:
    link = zipfile.ZipInfo("vllm/_C.so")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(CubinError, match="symbolic link"):
        _open(_zip((link, b"/etc/passwd"))).read("vllm/_C.so")
    with pytest.raises(CubinError, match="compression method"):
        _open(_zip(("vllm/_C.so", b"x" * 100), method=zipfile.ZIP_LZMA)).read("vllm/_C.so")
    raw = bytearray(_zip(("vllm/_C.so", b"x" * 100)))
    start = raw.index(b"PK\x01\x02")
    raw[start + 8] |= 1
    with pytest.raises(CubinError, match="encrypted"):
        _open(bytes(raw)).read("vllm/_C.so")


def test_names_that_lead_elsewhere_are_only_names() -> None:
    wheel = _open(_zip(("../../../../etc/cron.d/x", b"evil"), ("/etc/passwd", b"root"), ("vllm/ok.py", b"ok")))
    assert wheel.read("vllm/ok.py") == b"ok"
    assert wheel.read("../../../../etc/cron.d/x") == b"evil"


def test_a_directory_that_claims_to_be_huge_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = bytearray(_zip(("a", b"x" * 300_000), method=zipfile.ZIP_STORED))
    monkeypatch.setattr(wheels, "MAX_DIRECTORY_BYTES", 100_000)
    end = raw.index(b"PK\x05\x06")
    raw[end + 12 : end + 20] = struct.pack("<II", end, 0)
    with pytest.raises(CubinError, match="directory"):
        _open(bytes(raw))


def test_too_many_members_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "MAX_MEMBERS", 5)
    with pytest.raises(CubinError, match="6 members"):
        _open(_zip(*[(f"m{number}", b"") for number in range(6)]))


@pytest.mark.parametrize(
    "raw", [b"", b"PK\x03\x04", b"PK\x05\x06" + b"\0" * 10, b"PK\x05\x06" + b"\xff" * 18, b"not a zip at all" * 10]
)
def test_what_is_no_archive_is_a_typed_error(raw: bytes) -> None:
    with pytest.raises(CubinError, match=r"x\.whl"):
        _open(raw)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_spoilt_wheel_gives_anything_but_a_typed_error(makers: Any, data: st.DataObject) -> None:
    raw = bytearray(makers.wheel({"vllm/_C.abi3.so": b"\x7fELF" + b"x" * 300, "vllm/a.py": b"a"}))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
    try:
        wheel = _open(bytes(raw[:cut]))
        wheel.metadata()
        for name in wheel.names:
            wheel.extract(name, io.BytesIO())
    except ReproError:
        return
