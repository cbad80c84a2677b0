from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import KernelNotFoundError, UsageError
from dsv4_repro.kernels.select import select, select_kernel

pytestmark = pytest.mark.usefixtures("cache_root")


def test_builtin_is_compiled_for_the_gpu_itself() -> None:
    found = select("builtin", sm=120, top_k=512, vec=4)
    assert (found.exact, found.image.sm, found.image.top_k, found.image.vec) == (True, 120, 512, 4)
    assert found.image.guarded is False
    assert "sm_120" in found.note
    assert select_kernel("builtin:guard", sm=90, top_k=1024, vec=2).guarded is True


def test_unknown_builds_list_the_known() -> None:
    with pytest.raises(KernelNotFoundError) as caught:
        select("builtin:nonsense", sm=90, top_k=512, vec=4)
    assert "guard" in caught.value.help_text


def test_compatible_code_is_said_to_be_that(library: bytes, tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(library)
    exact = select(str(file), sm=120, top_k=512, vec=4)
    assert exact.exact
    assert exact.note == f"{file}: code for sm_120, from lib.so"
    other = select(str(file), sm=121, top_k=512, vec=4)
    assert not other.exact
    assert other.image.sm == 120
    assert "no code for sm_121 itself; code for sm_120 is binary compatible" in other.note
    assert other.image == select_kernel(str(file), sm=121, top_k=512, vec=4)


def test_no_code_for_the_gpu_is_an_error_that_says_what_there_is(library: bytes, tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(library)
    with pytest.raises(KernelNotFoundError, match="no machine code for sm_100; it has sm_80, sm_90, sm_120"):
        select(str(file), sm=100, top_k=512, vec=4)


@pytest.mark.parametrize("spec", ["", "built in", "builtinx", "vllm", "vllm==x"])
def test_anything_else_is_a_usage_error(spec: str, no_network: Any) -> None:
    with pytest.raises(UsageError):
        select(spec, sm=90, top_k=512, vec=4)
