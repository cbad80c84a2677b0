from __future__ import annotations

import contextlib
import re
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_repro.errors import CubinError, ReproError
from dsv4_repro.kernels.cubin import find_topk_functions, kernel_images, read_cubin
from dsv4_repro.kernels.elf import read_elf
from dsv4_repro.kernels.fatbin import cuobjdump_path
from dsv4_repro.kernels.image import sha256_hex

ARCHITECTURES = {
    "sm_75": (75, False, 0x160),
    "sm_80": (80, False, 0x160),
    "sm_89": (89, False, 0x160),
    "sm_90": (90, False, 0x210),
    "sm_90a": (90, True, 0x210),
    "sm_100": (100, False, 0x380),
    "sm_100a": (100, True, 0x380),
    "sm_120": (120, False, 0x380),
    "sm_121a": (121, True, 0x380),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architecture_parameters_and_bounds_are_what_the_cubin_says(arch: str, standin_cubin: Any) -> None:
    sm, specific, base = ARCHITECTURES[arch]
    info = read_cubin(standin_cubin(arch))
    assert (info.sm, info.arch_specific, info.label) == (sm, specific, arch)
    assert info.sha256 == sha256_hex(standin_cubin(arch))
    found = {(top_k, vec): function for function, top_k, vec in find_topk_functions(info)}
    assert set(found) == {(512, 4), (1024, 2)}
    for function in found.values():
        assert (function.params_base, function.params_size, function.parameters) == (base, 56, ((0, 56),))
        assert function.max_threads == 1024
        assert function.static_smem == 256
        assert function.shared_section == (1280 if sm >= 90 else 256)
        assert function.size > 0
        assert function.size % 16 == 0
        assert function.subroutines == ()


def test_every_parameter_of_a_kernel_is_listed(other_cubin: Any) -> None:
    (function,) = read_cubin(other_cubin("sm_90")).functions
    assert function.name == "scale"
    assert function.parameters == ((0, 8), (8, 4), (16, 8))
    assert function.params_size == 24
    assert function.max_threads is None
    assert find_topk_functions(read_cubin(other_cubin("sm_90"))) == []
    assert kernel_images(other_cubin("sm_90"), "x") == ()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_registers_stack_and_shared_memory_agree_with_cuobjdump(arch: str, standin_cubin: Any, tmp_path: Path) -> None:
    file = tmp_path / "k.cubin"
    file.write_bytes(standin_cubin(arch))
    text = subprocess.run([str(cuobjdump_path()), "-res-usage", str(file)], capture_output=True, text=True, check=True).stdout
    said = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    assert len(said) == 2
    info = read_cubin(standin_cubin(arch))
    for name, registers, stack, shared in said:
        function = info.function(name)
        assert function is not None
        assert (function.registers, function.frame_size, function.shared_section) == (int(registers), int(stack), int(shared))


def test_symbol_indices_are_those_that_the_disassembler_takes(standin_cubin: Any) -> None:
    from dsv4_repro.kernels.disasm import text_symbols

    cubin = standin_cubin("sm_120")
    theirs = {name: index for name, (index, _) in text_symbols(cubin).items()}
    assert {function.name: function.symbol_index for function in read_cubin(cubin).functions} == theirs


def test_subroutines_of_a_kernel_have_their_offset(makers: Any) -> None:
    source = """
    __device__ __noinline__ int twice(int x, int* p) { p[x] = x; return x * 2 + p[x + 1]; }
    extern "C" __global__ void caller(int* p) { p[threadIdx.x] = twice(p[0], p) + twice(p[1], p + 4); }
    """
    function = read_cubin(makers.compile("sm_90", source)).function("caller")
    assert function is not None
    (routine,) = function.subroutines
    assert "twice" in routine.name
    assert 0 < routine.offset < function.size + routine.size
    assert routine.offset % 16 == 0


def test_images_carry_the_metadata_and_the_whole_cubin(standin_cubin: Any) -> None:
    cubin = standin_cubin("sm_90")
    images = kernel_images(cubin, "FILE.cubin")
    assert {(image.top_k, image.vec) for image in images} == {(512, 4), (1024, 2)}
    for image in images:
        assert image.cubin is cubin
        assert (image.origin, image.sm, image.params_base, image.params_size) == ("FILE.cubin", 90, 0x210, 56)
        assert (image.static_smem, image.max_threads, image.guarded) == (256, 1024, None)
        assert image.registers > 0


def _info_offset(cubin: bytes, number: int) -> int:
    """Where attribute ``number`` of the first top-k kernel's .nv.info lies in the file."""
    image = read_elf(cubin)
    section = next(item for item in image.sections if item.name.startswith(".nv.info.") and "ILi512" in item.name)
    offset, end = section.offset, section.offset + section.size
    while offset < end:
        form, attribute, word = struct.unpack_from("<BBH", cubin, offset)
        if attribute == number:
            return offset
        offset += 4 + (word if form == 4 else 0)
    raise AssertionError(number)


def test_the_parameter_size_is_read_and_not_assumed(standin_cubin: Any) -> None:
    raw = bytearray(standin_cubin("sm_120"))
    at = _info_offset(bytes(raw), 0x0A)
    raw[at + 8 : at + 12] = (0x048 << 16 | 0x390).to_bytes(4, "little")
    image = next(image for image in kernel_images(bytes(raw), "x") if image.top_k == 512)
    assert (image.params_base, image.params_size) == (0x390, 0x48)


@pytest.mark.parametrize(("number", "what"), [(0x0A, "parameters lie"), (0x05, "launch bounds")])
def test_a_kernel_that_does_not_declare_what_is_needed_is_a_typed_error(number: int, what: str, standin_cubin: Any) -> None:
    raw = bytearray(standin_cubin("sm_120"))
    raw[_info_offset(bytes(raw), number) + 1] = 0xEE
    with pytest.raises(CubinError, match=what):
        kernel_images(bytes(raw), "x")


def _patched(cubin: bytes, offset: int, value: bytes) -> bytes:
    return cubin[:offset] + value + cubin[offset + len(value) :]


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda raw: b"", "no ELF"),
        (lambda raw: b"MZ" + raw[2:], "not an ELF"),
        (lambda raw: raw[:40], "no ELF"),
        (lambda raw: _patched(raw, 4, b"\x01"), "64-bit"),
        (lambda raw: _patched(raw, 5, b"\x02"), "little-endian"),
        (lambda raw: _patched(raw, 18, struct.pack("<H", 62)), "machine 62"),
        (lambda raw: _patched(raw, 40, struct.pack("<Q", 0)), "no section table"),
        (lambda raw: _patched(raw, 40, struct.pack("<Q", 1 << 63)), "do not fit"),
        (lambda raw: _patched(raw, 60, struct.pack("<H", 65535)), "do not fit"),
        (lambda raw: _patched(raw, 62, struct.pack("<H", 60000)), "section names"),
        (lambda raw: _patched(raw, 48, struct.pack("<I", 0)), "no known architecture"),
        (lambda raw: raw[: len(raw) // 2], "do not fit"),
    ],
)
def test_what_is_no_cubin_is_a_typed_error_that_says_why(spoil: Any, what: str, standin_cubin: Any) -> None:
    with pytest.raises(CubinError, match=what):
        read_cubin(spoil(standin_cubin("sm_90")))


def test_the_most_sections_that_a_header_can_say_cost_little_time() -> None:
    head = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01" + b"\0" * 9, 2, 190, 1, 0, 0, 64, 0x6005A04, 64, 0, 0, 64, 65535, 0
    )
    body = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64, 64, 0, 0, 0, 0) * 65535
    started = time.process_time()
    with contextlib.suppress(CubinError):
        read_cubin(head + body)
    assert time.process_time() - started < 5


def test_names_of_all_sections_together_are_bounded() -> None:
    count = 4000
    names = b"\0" + b"n" * 60_000 + b"\0"
    table = 64 + len(names)
    head = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01" + b"\0" * 9, 2, 190, 1, 0, 0, table, 0x6005A04, 64, 0, 0, 64, count, 0
    )
    body = struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, 64, len(names), 0, 0, 0, 0) * count
    with pytest.raises(CubinError, match="MiB of names"):
        read_cubin(head + names + body)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_spoilt_cubin_gives_anything_but_a_typed_error(standin_cubin: Any, data: st.DataObject) -> None:
    raw = bytearray(standin_cubin("sm_90"))
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
    try:
        images = kernel_images(bytes(raw[:cut]), "x")
    except ReproError:
        return
    for image in images:
        assert image.params_size is not None
        assert image.top_k >= 0
