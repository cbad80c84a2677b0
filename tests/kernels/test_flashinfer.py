"""FlashInfer's sampler kernel: which release is asked for, its parameters, its host's shape, and that its source compiles."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from dsv4_repro.errors import ToolMissingError, UnavailableError, UsageError
from dsv4_repro.kernels import flashinfer
from dsv4_repro.kernels.cache import Cache
from dsv4_repro.kernels.flashinfer import SamplerParams, flashinfer_image, sampler_shape


@pytest.mark.parametrize("spec", ["builtin", "vllm==0.27.1", "flashinfer==", "flashinfer", "flashinfer==x y"])
def test_what_is_no_release_is_refused(spec: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no release of FlashInfer"):
        flashinfer_image(spec, 120, cache=Cache("flashinfer", tmp_path))


def test_parameters_lie_where_the_compiled_kernel_reads_them() -> None:
    raw = SamplerParams(1, 2, 3, 50, 96000, 1, 24000, 4).pack()
    assert len(raw) == 56
    assert struct.unpack_from("<Q", raw, 40) == (3,)
    assert struct.unpack_from("<II", raw, 48) == (24000, 4)


@pytest.mark.parametrize(
    ("vocabulary", "smem", "shape"),
    [
        (96000, 101376, (4, 24000, 98080)),
        (50000, 101376, (3, 16668, 68752)),
        (152064, 232448, (3, 50688, 204832)),
        (32000, 232448, (1, 32000, 130080)),
    ],
)
def test_the_hosts_shape(vocabulary: int, smem: int, shape: tuple[int, int, int]) -> None:
    assert sampler_shape(vocabulary, smem) == shape
    ctas, chunk, _ = shape
    assert (ctas - 1) * chunk < vocabulary <= ctas * chunk


def test_an_nvrtc_without_headers_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cuda.bindings import nvrtc

    cache = Cache("flashinfer", tmp_path)
    monkeypatch.setattr(flashinfer, "_sources", lambda *_more: {})
    monkeypatch.delattr(nvrtc, "nvrtcInstallBundledHeaders")
    with pytest.raises(ToolMissingError, match="brings no CUDA headers"):
        flashinfer_image("flashinfer==0.6.13", 120, cache=cache)


@pytest.mark.release_wheel
@pytest.mark.parametrize("sm", [90, 120])
@pytest.mark.parametrize(
    ("release", "resets_last", "converges"),
    [("0.6.13", False, False), ("0.6.14", True, False), ("0.7.0.post1", True, False), ("0.7.1", True, True)],
)
def test_a_release_compiles_and_its_source_has_the_repairs_or_not(
    release: str, resets_last: bool, converges: bool, sm: int
) -> None:
    try:
        image = flashinfer_image(f"flashinfer=={release}", sm)
    except UnavailableError as error:
        pytest.skip(f"needs the package index: {error}")
    assert (image.sm, image.params_size) == (sm, 56)
    sources = flashinfer._sources(flashinfer._version(image.origin), image.origin, Cache("flashinfer"), None)
    assert (b"RadixGroupResetStateLastCTA" in sources["topk.cuh"]) is resets_last
    assert (b"converge the CTA so tx0's release covers" in sources["topk.cuh"]) is converges
