"""The hook targets against the sources of the releases; no GPU and no vLLM installed."""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from dsv4_repro_agent.guard import Guard, expansion_of_padding
from dsv4_repro_agent.said import Said
from dsv4_repro_agent.targets import BUILDER

from dsv4_repro.errors import DownloadError
from dsv4_repro.kernels.shipped import release_members

_spec = importlib.util.spec_from_file_location("release_features", Path(__file__).with_name("release_features.py"))
assert _spec is not None
assert _spec.loader is not None
release_features = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(release_features)

pytestmark = pytest.mark.release_wheel
#: Release: whether its producer clamps.
RELEASES = {
    "0.20.0": False, "0.20.1": False, "0.20.2": False, "0.21.0": False, "0.22.0": False, "0.22.1": False, "0.23.0": False,
    "0.24.0": False, "0.25.0": False, "0.25.1": False, "0.26.0": False, "0.27.0": False, "0.27.1": False, "0.28.0": True,
    "0.29.0": True, "0.30.0": True, "0.31.0": True, "0.32.0": True, "0.33.0": True,
}  # fmt: skip
TWO = ("0.23.0", "0.33.0")


def some(releases: Any) -> list[Any]:
    return [pytest.param(one, marks=() if one in TWO else pytest.mark.slow) for one in releases]


def members(release: str) -> dict[str, bytes]:
    try:
        return release_members(f"vllm=={release}", list(release_features.PATTERNS))
    except DownloadError as error:
        pytest.skip(f"no release to be had: {error}")


@pytest.mark.parametrize("release", some(RELEASES))
def test_every_hook_has_its_target(release: str) -> None:
    found = release_features.features(members(release))
    assert found.pop("clamp") == ("" if RELEASES[release] else "absent")
    assert {name: why for name, why in found.items() if why} == {}


def producer(release: str) -> Any:
    """The release's own ``_prepare_decode_tensors``, compiled from its text; run in the test's process, on CPU tensors."""
    torch = pytest.importorskip("torch")
    name = release_features.path_of(BUILDER)
    tree = ast.parse(members(release)[name])
    (owner,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DeepseekV32IndexerMetadataBuilder"]
    (function,) = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "_prepare_decode_tensors"]
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([function], []), name, "exec"), scope)
    return scope["_prepare_decode_tensors"]


@pytest.mark.parametrize("release", some(RELEASES))
def test_the_guard_on_the_releases_own_producer(release: str) -> None:
    """[-1, 0] becomes [0, 0]; [L-1, L] stays; a release with the fix is left alone."""
    function = producer(release)
    before = [3058, 3059, 0, 0] if RELEASES[release] else [3058, 3059, -1, 0]
    assert expansion_of_padding(function) == before

    guard = Guard(Said(), wanted=True)
    guard.examine(function)
    assert guard.needed is not RELEASES[release]
    assert guard.active is not RELEASES[release]

    def guarded(builder: Any, **given: Any) -> Any:
        result = function(builder, **given)
        assert guard.apply(result, given["seq_lens"]) is guard.active
        # What the graph reads is the builder's buffer itself.
        assert result[0].data_ptr() == builder.decode_seq_lens_buffer.data_ptr()
        return result

    assert expansion_of_padding(guarded) == [3058, 3059, 0, 0]


@pytest.mark.parametrize("release", some(RELEASES))
def test_plain_decode_is_left_alone(release: str) -> None:
    """next_n 1 returns the caller's own tensor: never clamped in place."""
    torch = pytest.importorskip("torch")
    function = producer(release)
    guard = Guard(Said(), wanted=True)
    guard.examine(function)
    lengths = torch.tensor([10, 0], dtype=torch.int32)
    one = torch.ones(2, dtype=torch.int32)
    builder = types.SimpleNamespace(vllm_config=types.SimpleNamespace(speculative_config=None), supports_varlen=False)
    result = function(
        builder, seq_lens=lengths, block_table=torch.zeros(2, 4), decode_lens=one, decode_lens_cpu=one,
        query_start_loc=torch.tensor([0, 1]), num_decodes=2, num_decode_tokens=2, use_native=True, next_n=1, max_decode_len=1,
    )  # fmt: skip
    assert result[0] is lengths
    assert guard.apply(result, lengths) is False


def test_vllm_is_not_imported() -> None:
    assert "vllm" not in sys.modules
