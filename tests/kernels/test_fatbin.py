from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_repro.errors import CubinError, ReproError, ToolMissingError
from dsv4_repro.kernels import fatbin
from dsv4_repro.kernels.fatbin import find_cubins, list_entries, open_image, unpack

NEEDLE = b"persistent_topk_kernel"


def test_the_directory_of_an_object_lists_every_entry_in_order(library: bytes) -> None:
    entries = list_entries(library)
    assert [(entry.container, entry.kind, entry.label, entry.compression) for entry in entries] == [
        (0, "cubin", "sm_80", ""),
        (0, "cubin", "sm_90", "zstd"),
        (1, "cubin", "sm_80", ""),
        (1, "cubin", "sm_90", "zstd"),
        (1, "cubin", "sm_120", "zstd"),
        (2, "ptx", "sm_90", ""),
    ]


def test_the_kernel_is_found_for_every_architecture_packed_or_not(library: bytes, standin_cubin: Any) -> None:
    found = find_cubins(library, NEEDLE)
    assert [entry.label for entry, _ in found] == ["sm_80", "sm_90", "sm_120"]
    for entry, raw in found:
        # NVRTC pads nothing behind a cubin; the container pads to 8 bytes.
        assert raw.rstrip(b"\0") == standin_cubin(entry.label).rstrip(b"\0")


def test_an_architecture_filter_takes_out_only_what_it_lets_through(library: bytes) -> None:
    assert [entry.label for entry, _ in find_cubins(library, NEEDLE, arch=lambda entry: entry.sm == 120)] == ["sm_120"]


def test_a_bare_fat_binary_is_read_as_well(makers: Any, standin_cubin: Any) -> None:
    cubin = standin_cubin("sm_90")
    bare = makers.fatbin([[makers.entry(90, makers.zstd(cubin), size=len(cubin))]])
    assert unpack(bare, list_entries(bare)) == [cubin]


def test_suffixes_come_from_the_flags(makers: Any, standin_cubin: Any) -> None:
    cubin = standin_cubin("sm_90")
    bare = makers.fatbin([[makers.entry(90, cubin, "a"), makers.entry(100, cubin, "f"), makers.entry(100, cubin)]])
    assert [entry.label for entry in list_entries(bare)] == ["sm_90a", "sm_100f", "sm_100"]


def test_an_object_without_gpu_code_has_no_entries(makers: Any) -> None:
    plain = makers.object({".text": b"\xc3" * 16})
    assert list_entries(plain) == ()
    assert find_cubins(plain, NEEDLE) == []


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda raw: raw[:20], "fat binary"),
        (lambda raw: struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 60) + raw[16:], "bytes"),
        (lambda raw: raw[:16] + struct.pack("<HHIQ", 2, 0x101, 64, 1 << 62) + raw[32:], "payload do not fit"),
        (lambda raw: raw[:16] + struct.pack("<HHI", 2, 0x101, 0) + raw[24:], "do not fit"),
        (lambda raw: struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 30) + raw[16:46], "cut off"),
        (lambda raw: struct.pack("<IHHQ", 0xBA55ED50, 1, 0, 0) + raw[16:], "not a fat binary"),
        (lambda raw: struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 0) * 5000, "more than 4096"),
    ],
)
def test_a_directory_that_does_not_fit_is_a_typed_error(makers: Any, standin_cubin: Any, spoil: Any, what: str) -> None:
    raw = makers.fatbin([[makers.entry(90, standin_cubin("sm_90"))]])
    with pytest.raises(CubinError, match=what):
        list_entries(spoil(raw))


def test_a_compressed_entry_that_announces_too_much_is_refused_before_it_is_unpacked(makers: Any) -> None:
    bare = makers.fatbin([[makers.entry(90, makers.bomb(1 << 20), size=1 << 40)]])
    with pytest.raises(CubinError, match="MiB"):
        unpack(bare, list_entries(bare))


def test_many_large_entries_together_are_refused(makers: Any) -> None:
    bare = makers.fatbin([[makers.entry(90, makers.bomb(64), size=200 << 20)] * 8])
    with pytest.raises(CubinError, match="of cubins"):
        unpack(bare, list_entries(bare))


def test_a_bomb_that_unpacks_to_more_than_announced_is_an_error_and_fills_no_disk(makers: Any, tmp_path: Path) -> None:
    bare = makers.fatbin([[makers.entry(90, makers.bomb(512 << 20, announced=4096), size=4096)]])
    assert len(bare) < 100_000
    with pytest.raises(CubinError):
        unpack(bare, list_entries(bare), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_garbage_in_place_of_a_frame_is_an_error(makers: Any) -> None:
    bare = makers.fatbin([[makers.entry(90, b"\x28\xb5\x2f\xfd" + b"\xff" * 400, size=9000)]])
    with pytest.raises(CubinError, match="cuobjdump"):
        unpack(bare, list_entries(bare))


def test_no_cuobjdump_is_a_typed_error_with_the_remedy(library: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fatbin.sys, "path", [str(tmp_path)])  # type: ignore[attr-defined]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissingError) as caught:
        find_cubins(library, NEEDLE)
    assert "pip install nvidia-cuda-cuobjdump" in caught.value.help_text


def test_empty_and_missing_files_are_typed_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.so").touch()
    for name in ("empty.so", "missing.so"):
        with pytest.raises(CubinError, match=name), open_image(tmp_path / name):
            pass


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_spoilt_object_gives_anything_but_a_typed_error(library: bytes, data: st.DataObject) -> None:
    raw = bytearray(library)
    for _ in range(data.draw(st.integers(1, 6))):
        # Headers are where the damage counts: the ELF header, the section table and the container headers.
        place = data.draw(
            st.one_of(st.integers(0, 63), st.integers(max(len(raw) - 400, 0), len(raw) - 1), st.integers(0, len(raw) - 1))
        )
        raw[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
    try:
        entries = list_entries(bytes(raw[:cut]))
    except ReproError:
        return
    assert all(0 <= entry.offset <= cut and entry.offset + entry.stored <= cut for entry in entries)


def _spoilt(makers: Any, standin_cubin: Any, bad: set[str]) -> bytes:
    """One container with the kernel for three architectures; the entries of ``bad`` are zeroes where their frame should be."""
    entries = []
    for sm in (80, 90, 120):
        packed = makers.zstd(standin_cubin(f"sm_{sm}"))
        entries.append(makers.entry(sm, b"\0" * len(packed) if f"sm_{sm}" in bad else packed, size=len(standin_cubin(f"sm_{sm}"))))
    result: bytes = makers.fatbin([entries])
    return result


@pytest.mark.parametrize("bad", ["sm_80", "sm_90", "sm_120"])
def test_an_entry_that_cannot_be_unpacked_costs_only_itself(makers: Any, standin_cubin: Any, bad: str) -> None:
    raw = _spoilt(makers, standin_cubin, {bad})
    failed: list[str] = []
    found = find_cubins(raw, NEEDLE, failed=failed)
    assert [entry.label for entry, _ in found] == [label for label in ("sm_80", "sm_90", "sm_120") if label != bad]
    assert len(failed) == 1
    assert failed[0].startswith(bad)
    with pytest.raises(CubinError):
        find_cubins(raw, NEEDLE)


def test_what_is_not_wanted_is_never_unpacked(makers: Any, standin_cubin: Any) -> None:
    raw = _spoilt(makers, standin_cubin, {"sm_80", "sm_120"})
    assert [entry.label for entry, _ in find_cubins(raw, NEEDLE, arch=lambda entry: entry.sm == 90)] == ["sm_90"]


def test_a_library_of_which_nothing_unpacks_ends(makers: Any, standin_cubin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = _spoilt(makers, standin_cubin, {"sm_80", "sm_90", "sm_120"})
    failed: list[str] = []
    assert find_cubins(raw, NEEDLE, failed=failed) == []
    assert len(failed) == 3
    monkeypatch.setattr(fatbin, "MAX_FAILED", 1)
    with pytest.raises(CubinError):
        find_cubins(raw, NEEDLE, failed=[])
