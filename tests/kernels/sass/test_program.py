"""Programs: from images and cubins, the block cache, the code that ships with the package, and input that cannot be used."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dsv4_repro.kernels.sass as sass
from dsv4_repro.errors import CubinError, ReproError, ToolMissingError
from dsv4_repro.kernels.cache import Cache
from dsv4_repro.kernels.image import KernelImage, sha256_hex
from dsv4_repro.kernels.sass.layout import layout_for
from dsv4_repro.kernels.sass.program import Program
from dsv4_repro.kernels.sass.shipped import (
    SHIPPED_ARCHITECTURES,
    SHIPPED_BUILDS,
    make_document,
    shipped_facts,
    shipped_image,
    shipped_rows,
)
from dsv4_repro.kernels.sass.topk import run_topk

LENGTHS = np.array([5, 600, 9000, 0], np.int32)
LOGITS = np.random.default_rng(2).standard_normal((4, 9216)).astype(np.float32)


def shipped(build: str = "guard", sm: int = 120) -> KernelImage:
    image = shipped_image(build, sm, 512, 4)
    assert image is not None
    return image


def built(build: str = "guard", sm: int = 120) -> KernelImage:
    from dsv4_repro.kernels.build import builtin_image

    try:
        return builtin_image(build, sm, 512, 4)
    except ToolMissingError as error:
        pytest.skip(str(error))


def answers(program: Program) -> np.ndarray[Any, Any]:
    run = run_topk(program, LOGITS, LENGTHS, k=512, chunk_size=9216, ctas_per_group=1, groups=4, max_seq_len=9216)
    assert run.result.completed, run.result
    assert all(verdict.ok for verdict in run.verdicts(LOGITS, LENGTHS))
    return run.outputs


def test_compiled_blocks_are_kept_and_used(tmp_path: Path) -> None:
    store = Cache("blocks", tmp_path)
    first = Program.from_image(shipped(), store=store)
    expected = answers(first)
    assert list(tmp_path.rglob("*")), "nothing was kept"
    second = Program.from_image(shipped(), store=store)
    asked: list[str] = []
    blocks = second.blocks(False)
    loader = blocks._loader

    def watching(name: str, source: Any) -> Any:
        return loader(name, lambda: asked.append(name) or source())  # type: ignore[func-returns-value]

    blocks._loader = watching
    assert np.array_equal(answers(second), expected)
    assert asked == [], "a second run must not compile"


@pytest.mark.parametrize("damage", [b"", b"junk", None])
def test_a_damaged_cache_entry_is_made_again(tmp_path: Path, damage: bytes | None) -> None:
    store = Cache("blocks", tmp_path)
    expected = answers(Program.from_image(shipped(), store=store))
    for entry in tmp_path.rglob("*"):
        if entry.is_file():
            raw = entry.read_bytes()
            entry.write_bytes(raw[: len(raw) // 2] if damage is None else damage)
    assert np.array_equal(answers(Program.from_image(shipped(), store=store)), expected)


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answers(Program.from_image(shipped(), store=Cache("blocks", tmp_path / "file" / "below")))


@pytest.mark.parametrize("sm", SHIPPED_ARCHITECTURES)
def test_shipped_code_has_semantics_throughout(sm: int) -> None:
    for build in SHIPPED_BUILDS:
        for k in (512, 1024, 2048):
            for vec in (4, 2, 1):
                image = shipped_image(build, sm, k, vec)
                assert image is not None
                program = Program.from_image(image)
                assert (program.sm, program.layout.params_size, program.function.unknown) == (sm, 56, ())


def test_shipped_code_is_that_of_the_source() -> None:
    """After a change of the kernel's source: python -m dsv4_repro.kernels.sass.shipped"""
    from dsv4_repro.kernels.build import source_path

    digest = sha256_hex(source_path("persistent_topk.cu").read_bytes())
    for build in SHIPPED_BUILDS:
        for sm in SHIPPED_ARCHITECTURES:
            facts = shipped_facts(build, sm)
            assert facts is not None
            assert facts["source_sha256"] == digest, "the shipped decoding is of an older source: regenerate it"


def test_shipped_code_equals_a_fresh_compile() -> None:
    from dsv4_repro.kernels.build import compiler_version

    built()
    facts = shipped_facts("guard", 120)
    assert facts is not None
    if facts["compiler"] != compiler_version():
        pytest.skip(f"the shipped code is by NVRTC {facts['compiler']}, here is {compiler_version()}")
    fresh = make_document("guard", 120)
    assert fresh["instances"].keys() == facts["instances"].keys()
    for name, item in fresh["instances"].items():
        assert item["rows"] == facts["instances"][name]["rows"], name
        assert item["image"] == facts["instances"][name]["image"], name


def test_a_fresh_compile_gives_the_same_answers() -> None:
    assert answers(Program.from_image(built())).shape == (4, 512)


def test_other_builds_are_not_mistaken_for_shipped_ones() -> None:
    image = shipped()
    assert shipped_rows(image.origin, image.sm, image.cubin_sha256, image.function) is not None
    assert shipped_rows("vllm==0.27.1", image.sm, image.cubin_sha256, image.function) is None
    assert shipped_rows(image.origin, image.sm, "0" * 64, image.function) is None
    assert shipped_image("bounded-spin", 120, 512, 4) is None
    assert shipped_image("guard", 121, 512, 4) is None
    assert shipped_image("guard", 120, 500, 4) is None


def test_from_cubin_checks_name_and_architecture() -> None:
    image = built()
    assert Program.from_cubin(image.cubin, image.function, 120).name == image.function
    with pytest.raises(CubinError, match="no kernel nothing"):
        Program.from_cubin(image.cubin, "nothing", 120)
    with pytest.raises(CubinError, match="sm_90 was asked for"):
        Program.from_cubin(image.cubin, image.function, 90)


@pytest.mark.parametrize("cut", [0, 1, 64, 1000, -1, -100])
def test_truncated_cubins_are_typed_errors(cut: int) -> None:
    image = built()
    with pytest.raises(ReproError):
        Program.from_cubin(image.cubin[:cut], image.function, 120)


def test_damaged_cubins_are_typed_errors(tmp_path: Path) -> None:
    """Flipped bytes: a typed error, or code that decodes; never another exception."""
    image = built()
    chance = np.random.default_rng(3)
    for _ in range(12):
        raw = bytearray(image.cubin)
        for place in chance.integers(0, len(raw), 20):
            raw[int(place)] ^= int(chance.integers(1, 256))
        with contextlib.suppress(ReproError):
            Program.from_cubin(bytes(raw), image.function, 120, store=Cache("blocks", tmp_path))


def test_code_overwritten_with_zeros_is_a_typed_error(tmp_path: Path) -> None:
    """Instructions that nvdisasm does not know."""
    from dsv4_repro.kernels.elf import function_symbols, read_elf

    image = built()
    elf = read_elf(image.cubin, "cubin")
    symbol = next(item for item in function_symbols(elf) if item.name == image.function)
    section = elf.sections[symbol.section]
    raw = bytearray(image.cubin)
    raw[section.offset : section.offset + section.size] = b"\xff" * section.size
    with pytest.raises(ReproError):
        answers(Program.from_cubin(bytes(raw), image.function, 120, store=Cache("blocks", tmp_path)))


@pytest.mark.parametrize("sm", [20, 60, 70, 72, 130, 200])
def test_unknown_architectures_are_refused(sm: int) -> None:
    with pytest.raises(CubinError, match="cannot be interpreted"):
        layout_for(sm, 0x210, 56)


def test_an_image_without_code_that_is_not_shipped() -> None:
    image = shipped()
    import dataclasses

    with pytest.raises(CubinError, match="neither"):
        Program.from_image(dataclasses.replace(image, cubin_sha256="0" * 64))


def test_the_package_offers_its_names_lazily() -> None:
    for name in sass.__all__:
        assert getattr(sass, name) is not None
    with pytest.raises(AttributeError):
        _ = sass.nothing
