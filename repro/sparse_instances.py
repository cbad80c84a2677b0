"""Has FlashInfer a decode kernel for this model's (heads, top_k) on SM120? ``doctor --model``. Files are read, nothing is imported.

FlashInfer's sparse MLA for SM120 has a decode kernel for listed pairs of query heads and index width alone
(``flashinfer/mla/_sparse_mla_sm120.py``, a literal up to 0.6.18). A decode call of another pair falls to the prefill kernel, which
refuses up to 64 tokens: an error at the first decode instead of at start (flashinfer #3828, #4380, #4541; vLLM #51538). Widths:
DeepSeek-V4 gives the sliding window as the first cache's width, its DSpark draft the window and the draft tokens, padded to
tiles of 64 (133 to 192, flashinfer #4380; other integrations took 256); models of the V3.2 family give index_topk.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import EvidenceError, ReproError, UsageError
from .doctor import Check

__all__ = ["ModelShape", "instance_checks", "listed_pairs", "read_shape"]

_SOURCE = "flashinfer/mla/_sparse_mla_sm120.py"
_TABLES = {"DeepSeek-V4": "_DECODE_DSV4_DISPATCH", "DeepSeek-V3.2": "_DECODE_DSV3_2_DISPATCH"}
_TILE = 64
_MAX_BYTES = 4 << 20
_ASK = "In the server's environment: python -c 'import flashinfer.mla as m; print(m.supported_sparse_mla_sm120_configs())'"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model asks of the decode kernel. ``heads``: of one rank; ``widths``: (index width, whose)."""

    family: str
    heads: int
    widths: tuple[tuple[int, str], ...]


def read_shape(path: Path, tp: int, draft: int = 0) -> ModelShape:
    """From ``config.json``. EvidenceError: unreadable, no number where one belongs; UsageError: heads that tp does not divide."""
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            config: Any = json.loads(stream.read(_MAX_BYTES))
    except OSError as error:
        raise EvidenceError(f"cannot be read: {error.strerror or error}", path=str(file)) from None
    except (ValueError, RecursionError):
        raise EvidenceError("not JSON", path=str(file)) from None
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    if not isinstance(config, dict):
        raise EvidenceError("not a model's configuration", path=str(file))

    def number(name: str) -> int:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 24:
            raise EvidenceError(f"{name} is {str(value)[:40]!r}, a positive number is expected", path=str(file))
        return value

    heads = number("num_attention_heads")
    if heads % tp:
        raise UsageError(f"{heads} heads cannot be split over --tp {tp}")
    top_k = number("index_topk")  # a model without one has no sparse attention of this kind
    if "compress_ratios" not in config and "v4" not in str(config.get("model_type", "")).lower():
        return ModelShape("DeepSeek-V3.2", heads // tp, ((top_k, "index_topk"),))
    window = number("sliding_window")
    widths = [(window, "the sliding window")]
    if draft:
        widths.append((-(-(window + draft) // _TILE) * _TILE, f"the window and {draft} draft tokens, in tiles of {_TILE}"))
    return ModelShape("DeepSeek-V4", heads // tp, tuple(widths))


def listed_pairs(source: str, table: str) -> frozenset[tuple[int, int]] | None:
    """The (heads, width) of one table of FlashInfer's source; None where it is no literal set. EvidenceError: not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise EvidenceError("not Python that can be read", path=_SOURCE) from None
    for node in tree.body:
        if not (isinstance(node, ast.Assign) and any(isinstance(item, ast.Name) and item.id == table for item in node.targets)):
            continue
        value = node.value
        if isinstance(value, ast.Call) and len(value.args) == 1:
            value = value.args[0]
        try:
            found = ast.literal_eval(value)
            pairs = [(int(heads), int(width)) for heads, width in found]
        except (ValueError, TypeError, RecursionError, MemoryError):
            return None
        return frozenset(pairs)
    return None


def instance_checks(path: Path, tp: int, draft: int, flashinfer: str) -> list[Check]:
    """One check for each width. ``flashinfer``: ``installed`` or a release. EvidenceError, UsageError: of ``read_shape``."""
    shape = read_shape(path, tp, draft)
    origin, source, why = _source_of(flashinfer)
    pairs: frozenset[tuple[int, int]] | None = None
    if source is not None:
        pairs = listed_pairs(source, _TABLES[shape.family])
        why = "" if pairs is not None else f"{origin} computes which pairs it has, and lists none"
    return [_check(shape, width, whose, pairs, origin, why) for width, whose in shape.widths]


def _check(shape: ModelShape, width: int, whose: str, pairs: frozenset[tuple[int, int]] | None, origin: str, why: str) -> Check:
    what = f"decode {shape.heads} heads with index width {width} ({whose}) on SM120"
    identity = f"sparse-mla-{shape.heads}-{width}"
    if pairs is None:
        return Check(id=identity, what=what, state="unknown", found=why, remedy=_ASK)
    if (shape.heads, width) in pairs:
        return Check(
            id=identity,
            what=what,
            state="yes",
            found=f"{origin} lists the pair ({shape.family}); other architectures not looked at",
        )
    widths = sorted(other for heads, other in pairs if heads == shape.heads)
    has = f"for {shape.heads} heads it has {', '.join(map(str, widths))}" if widths else f"it has nothing for {shape.heads} heads"
    return Check(
        id=identity, what=what, state="no",
        found=f"{origin} does not list the pair ({shape.family}); {has}: the first decode fails, not the start",
        remedy="Another --tp, or a FlashInfer that lists it: 192 and 256 came with flashinfer #4380 (0.6.18). Where vLLM pads the "
        "heads to 64 or 128, those count.",
    )  # fmt: skip


def _source_of(flashinfer: str) -> tuple[str, str | None, str]:
    """(origin, FlashInfer's table file or None, why not)."""
    if flashinfer != "installed":
        from ..kernels.flashinfer import release_files

        origin = f"FlashInfer {flashinfer[:32]}"
        try:
            found = release_files(f"flashinfer=={flashinfer}", [_SOURCE])
        except UsageError:
            raise
        except ReproError as error:
            return origin, None, str(error)
        raw = found.get(_SOURCE)
        return origin, raw.decode("utf-8", "replace") if raw is not None else None, f"{origin} has no {_SOURCE}"
    from importlib import metadata

    try:
        distribution = metadata.distribution("flashinfer-python")
        file = Path(str(distribution.locate_file(_SOURCE)))
        origin = f"the installed FlashInfer {distribution.version}"
        with file.open("rb") as stream:
            return origin, stream.read(_MAX_BYTES).decode("utf-8", "replace"), ""
    except metadata.PackageNotFoundError:
        return "FlashInfer", None, "FlashInfer is not installed here; name a release: --flashinfer 0.6.18"
    except OSError as error:
        return origin, None, f"{origin}: {_SOURCE}: {error.strerror or error}"
