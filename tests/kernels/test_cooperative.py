"""cooperative_topk: its parameter, and what a release without it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_repro.errors import KernelNotFoundError, UnavailableError
from dsv4_repro.kernels.build import compile_kernel
from dsv4_repro.kernels.cache import Cache, content_key
from dsv4_repro.kernels.cooperative import CooperativeParams, cooperative_image


def test_the_parameter_is_forty_bytes() -> None:
    raw = CooperativeParams(1, 2, 3, 4, 8, 16384).pack()
    assert len(raw) == 40
    assert raw[32:] == (8).to_bytes(4, "little") + (16384).to_bytes(4, "little")


@pytest.mark.parametrize(("kept", "says"), [(b"", "has no cooperative_topk"), (None, "0 instances")])
def test_what_the_cache_holds_is_judged(tmp_path: Path, kept: bytes | None, says: str) -> None:
    cache = Cache("cooperative", tmp_path)
    raw = compile_kernel("companions.cu", 90).cubin if kept is None else kept
    cache.store(content_key("cooperative-1", "vllm==0.26.0", "90"), raw)
    with pytest.raises(KernelNotFoundError, match=says):
        cooperative_image("vllm==0.26.0", 90, 512, cache=cache)


@pytest.mark.release_wheel
def test_a_release_has_it() -> None:
    try:
        image = cooperative_image("vllm==0.26.0", 90, 512)
    except UnavailableError as error:
        pytest.skip(f"needs the package index or a cached release: {error}")
    assert (image.params_size, image.max_threads, image.sm) == (40, 1024, 90)
