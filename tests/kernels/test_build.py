"""Own kernels compile for every architecture that NVRTC offers, and what was compiled is not compiled again."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import KernelNotFoundError, ToolMissingError
from dsv4_repro.kernels import build
from dsv4_repro.kernels.abi import PARAMS_SIZE, TOP_K_VALUES, VECTOR_WIDTHS, param_base
from dsv4_repro.kernels.build import VARIANTS, BuildError, _out_buffer, builtin_image, compile_kernel, parse_builtin
from dsv4_repro.kernels.cache import Cache
from dsv4_repro.kernels.cubin import read_cubin

SOME_ARCHITECTURES = (75, 80, 89, 90, 100, 120)


@pytest.mark.parametrize("sm", SOME_ARCHITECTURES)
def test_the_image_says_what_the_cubin_says(sm: int, cache_root: Path) -> None:
    image = builtin_image("unguarded", sm)
    assert (image.origin, image.sm, image.top_k, image.vec) == ("builtin", sm, 512, 4)
    assert (image.params_size, image.params_base, image.static_smem) == (PARAMS_SIZE, param_base(sm), 0)
    assert image.max_threads == 1024
    # Two CTAs of 1024 threads must fit an SM that holds 2048 threads; one elsewhere.
    assert image.registers <= (32 if sm in (80, 90, 100) else 64)
    assert "persistent_topk_kernelILi512ELj4E" in image.function
    assert image.guarded is False
    assert builtin_image("guard", sm).guarded is True


def test_every_offered_architecture_compiles(cache_root: Path) -> None:
    offered = build.supported_architectures()
    assert {75, 80, 90, 100, 120} <= set(offered)
    for sm in offered:
        assert builtin_image("unguarded", sm, 2048, 1).sm == sm
        assert compile_kernel("patients.cu", sm).cubin[:4] == b"\x7fELF"


@pytest.mark.parametrize("k", TOP_K_VALUES)
@pytest.mark.parametrize("vec", VECTOR_WIDTHS)
def test_every_instance_compiles(k: int, vec: int, cache_root: Path) -> None:
    image = builtin_image("guard", 90, k, vec)
    assert (image.top_k, image.vec, image.origin) == (k, vec, "builtin:guard")
    assert image.registers <= 32


def test_every_variant_is_other_code(cache_root: Path) -> None:
    shas: dict[str, str] = {}
    for name, variant in VARIANTS.items():
        image = builtin_image(name, 90)
        assert image.guarded is variant.guarded
        shas[name] = image.cubin_sha256
    # A clamp after the conversion to unsigned is dead code: the compiler makes what it makes without one.
    assert shas.pop("guard-after-cast") == shas["unguarded"]
    assert len(set(shas.values())) == len(shas)


def test_settings_reach_the_code(cache_root: Path) -> None:
    short = builtin_image("bounded-spin", 90, settings={"spin_limit": 64})
    other = builtin_image("bounded-spin", 90, settings={"spin_limit": 65})
    assert short.origin == "builtin:bounded-spin,spin_limit=64"
    assert short.cubin_sha256 != other.cubin_sha256
    with pytest.raises(KernelNotFoundError, match="spin_limit=0"):
        builtin_image("bounded-spin", 90, settings={"spin_limit": 0})
    with pytest.raises(KernelNotFoundError, match="depth=1"):
        builtin_image("bounded-spin", 90, settings={"depth": 1})


def test_patients_are_what_the_fixtures_need(cache_root: Path) -> None:
    functions = {function.name for function in read_cubin(compile_kernel("patients.cu", 90).cubin).functions}
    assert functions == {
        "healthy_worker", "grid_barrier_once", "flag_wait", "named_barrier_stuck", "mbarrier_phase_stuck", "cluster_peer_stuck",
        "illegal_access", "misaligned_access",
    }  # fmt: skip
    old = {function.name for function in read_cubin(compile_kernel("patients.cu", 80).cubin).functions}
    assert functions - old == {"mbarrier_phase_stuck", "cluster_peer_stuck"}


def test_the_cache_saves_the_second_compilation(cache_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = builtin_image("guard", 120, 1024, 2)

    def refuse(*_: object) -> Any:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patch:
        patch.setattr(build, "_compile", refuse)
        assert builtin_image("guard", 120, 1024, 2) == first
        with pytest.raises(AssertionError, match="compiled again"):
            builtin_image("guard", 120, 1024, 1)
        with pytest.raises(AssertionError, match="compiled again"):
            builtin_image("unguarded", 120, 1024, 2)
        patch.setattr(build, "compiler_version", lambda: "99.0")
        with pytest.raises(AssertionError, match="compiled again"):
            builtin_image("guard", 120, 1024, 2)


@pytest.mark.parametrize("source", ["persistent_topk.cu", "patients.cu", "companions.cu"])
def test_a_cubin_does_not_depend_on_when_and_where_it_was_made(source: str, cache_root: Path) -> None:
    # NVRTC puts the time and the process into the names of entities with internal linkage: there must be none.
    expressions = ("dsv4_repro::persistent::persistent_topk_kernel<512, 4u>",) if source == "persistent_topk.cu" else ()
    made = compile_kernel(source, 90, expressions=expressions, defines=("DSV4_BOUNDED_SPIN",))
    assert b"_INTERNAL_" not in made.cubin
    assert str(os.getpid()).encode() not in made.cubin


def test_a_damaged_entry_is_compiled_again(cache_root: Path) -> None:
    first = builtin_image("guard", 90)
    (entry,) = [path for path in cache_root.rglob("*") if path.is_file()]
    raw = entry.read_bytes()
    middle = len(raw) // 2
    for damage in (b"", raw[:-1], raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :], b"\0" * 100):
        entry.write_bytes(damage)
        assert builtin_image("guard", 90) == first
        assert entry.read_bytes() == raw


def test_what_does_not_exist_is_named(cache_root: Path) -> None:
    with pytest.raises(KernelNotFoundError, match="sm_91") as caught:
        builtin_image("guard", 91)
    assert "sm_90" in caught.value.help_text
    for arguments in (("guarded", 90, 512, 4), ("guard", 90, 500, 4), ("guard", 90, 512, 3)):
        with pytest.raises(KernelNotFoundError) as caught:
            builtin_image(*arguments)
        assert caught.value.help_text
    with pytest.raises(KernelNotFoundError, match=r"nothing\.cu"):
        compile_kernel("nothing.cu", 90)
    assert not list(cache_root.rglob("*"))


def test_the_compilers_complaint_comes_with_the_error(tmp_path: Path, cache_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void f(int* p) { *p = undeclared_thing; }\n')
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(BuildError, match="undeclared_thing") as caught:
        compile_kernel("broken.cu", 90)
    assert 'identifier "undeclared_thing" is undefined' in caught.value.log
    assert caught.value.exit_status == 70
    (tmp_path / "bad_ptx.cu").write_text('extern "C" __global__ void f(int* p) { asm volatile("no.such.instruction;"); }\n')
    with pytest.raises(BuildError):
        compile_kernel("bad_ptx.cu", 90)
    (tmp_path / "template.cu").write_text("template <int N> __global__ void f(int* p) { *p = N; }\n")
    with pytest.raises(BuildError):
        compile_kernel("template.cu", 90, expressions=("g<3>",))
    assert compile_kernel("template.cu", 90, expressions=("f<3>", "f<4>")).functions == ("_Z1fILi3EEvPi", "_Z1fILi4EEvPi")


def test_a_missing_compiler_names_the_remedy(cache_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (build._nvrtc, build.supported_architectures, build.compiler_version):
        cached.cache_clear()
    try:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        with pytest.raises(ToolMissingError) as caught:
            builtin_image("guard", 90)
        assert caught.value.help_text == "pip install nvidia-cuda-nvrtc"
    finally:
        for cached in (build._nvrtc, build.supported_architectures, build.compiler_version):
            cached.cache_clear()


def test_a_cached_kernel_needs_no_compiler(cache_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = builtin_image("guard", 90)
    build._nvrtc.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert builtin_image("guard", 90) == first


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("builtin", ("unguarded", {})),
        ("builtin:", ("unguarded", {})),
        ("builtin:guard", ("guard", {})),
        ("builtin:bounded-spin,spin_limit=64", ("bounded-spin", {"spin_limit": 64})),
        ("builtin:init-race,widen_us=50", ("init-race", {"widen_us": 50})),
        ("vllm==0.27.1", None),
        ("builtins", None),
        ("./builtin.cubin", None),
    ],
)
def test_the_users_words(text: str, parsed: object) -> None:
    assert parse_builtin(text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "builtin:guarded",
        "builtin:guard,spin_limit",
        "builtin:guard,spin_limit=-1",
        "builtin:guard,a=1",
        "builtin:guard,spin_limit=٣x",
    ],
)
def test_words_that_mean_nothing(text: str) -> None:
    with pytest.raises(KernelNotFoundError) as caught:
        parse_builtin(text)
    assert "There are:" in caught.value.help_text


def test_own_kernels_include_no_header() -> None:
    sources = list(build.SOURCES.glob("*.cu"))
    assert {path.name for path in sources} >= {"persistent_topk.cu", "patients.cu"}
    for path in sources:
        text = path.read_text(encoding="ascii")
        assert "#include" not in text
        assert text.startswith("// SPDX-License-Identifier: Apache-2.0")


def test_every_switch_in_the_source_belongs_to_a_variant_or_setting() -> None:
    import re

    text = build.source_path("persistent_topk.cu").read_text()
    used = set(re.findall(r"(?:defined\(|#if(?:n?)def )DSV4_([A-Z_]+)", text))
    known = {define for variant in VARIANTS.values() for define in variant.defines} | {name.upper() for name in build.SETTINGS}
    assert used == known


def test_compiling_leaves_the_bytes_that_python_shares_alone(tmp_path: Path) -> None:
    """The log of a silent compilation is one byte: written into a shared object it changes that byte for the whole process."""
    compile_kernel("patients.cu", 90, cache=Cache("nvrtc", tmp_path))
    assert [bytes([value])[0] for value in range(256)] == list(range(256))
    assert (bytes(bytearray([32])), bytes(bytearray([0])), bytes(bytearray())) == (b" " * 1, b"\0" * 1, b"")
    assert all(len(_out_buffer(size)) > 1 for size in (0, 1, 2))
