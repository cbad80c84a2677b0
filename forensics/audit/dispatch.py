"""The dispatch layer: which top-k operator a release's own code calls for a padded batch on an architecture, and with what.

The function that the layer's operator is registered for is interpreted on the producer's own metadata; every compiled operator
that it calls is
recorded with its arguments: the rows, their stride, the lengths, and the scalar that the kernel takes for max_seq_len.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .producer import BuiltMetadata
from .recipe import Recipe
from .release_source import ReleaseSource
from .tensors import DTYPES, Tensor, shape_only, unknown_like
from .torch_standin import OperatorCall
from .values import CannotDecideError, Function, Namespace, Native, Unknown

__all__ = ["TOP_K_OPERATORS", "TopKCall", "run_dispatch"]

#: Operators that select the top k of the indexer's logits, by the name under ``torch.ops``.
TOP_K_OPERATORS = ("persistent_topk", "cooperative_topk", "top_k_per_row_decode", "large_context_topk", "topk")


@dataclass(frozen=True)
class TopKCall:
    """The top-k launch that the release's code makes. ``lengths``: per row, None where not known. ``max_seq_len`` None: not passed.

    ``sentinel``: whether the rows of the index buffer were filled with -1 before the launch; None if that could not be seen.
    """

    operator: str
    rows: int
    width: int
    stride: int
    lengths: tuple[int | None, ...]
    max_seq_len: int | None
    top_k: int
    place: str
    sentinel: bool | None


def _flat(value: Any) -> list[Any]:
    return [item for part in value for item in _flat(part)] if isinstance(value, list) else [value]


def run_dispatch(source: ReleaseSource, recipe: Recipe, built: BuiltMetadata, rows: int) -> TopKCall:
    """The top-k call for the batch of ``built``. CannotDecideError where the code cannot be followed."""
    located = source.dispatch()
    if located is None:
        raise CannotDecideError("no top-k dispatch was found in the release's Python")
    runtime = built.runtime
    interpreter = runtime.interpreter
    function = interpreter.name_of_module(located.module, located.name)
    if not isinstance(function, Function):
        raise CannotDecideError(f"{located.name} is not a function", located.place)
    identity = Native("_resolve_layer_name", lambda name: name)
    interpreter.overrides[located.module, "_resolve_layer_name"] = identity
    interpreter.overrides[located.module, "kv_cache_as_quant_view"] = Native("kv_cache_as_quant_view", lambda cache, *_: cache)
    modes = interpreter.name_of_module("vllm.config", "CUDAGraphMode")
    full = Unknown("CUDAGraphMode.FULL") if isinstance(modes, Unknown) else interpreter.attribute(modes, "FULL")
    context = interpreter.standins["vllm.forward_context"].attrs["get_forward_context"].call()
    if isinstance(context, Namespace):
        context.attrs.update({"attn_metadata": {"indexer": built.metadata}, "cudagraph_runtime_mode": full})
    buffer = unknown_like((rows, recipe.top_k), DTYPES["int32"])
    arguments: dict[str, Any] = {
        "hidden_states": shape_only((rows, 4096), DTYPES["bfloat16"]), "k_cache_prefix": "indexer",
        "kv_cache": shape_only((16, 64, 132), DTYPES["uint8"]), "q_quant": shape_only((rows, 64, 128), DTYPES["float8_e4m3fn"]),
        "q_fp8": shape_only((rows, 64, 128), DTYPES["float8_e4m3fn"]), "q_scale": None, "k": shape_only((rows, 128),
        DTYPES["bfloat16"]),
        "weights": shape_only((rows, 64), DTYPES["float32"]), "quant_block_size": 128, "scale_fmt": "ue8m0",
        "topk_tokens": recipe.top_k,
        "head_dim": 128, "max_model_len": recipe.width, "total_seq_lens": recipe.max_num_batched_tokens,
        "topk_indices_buffer": buffer,
        "skip_k_cache_insert": True, "use_pcp": False, "pcp_shard_decode_requests": False, "dense_mha_metadata_layer_name": "",
        "use_fp4_cache": False, "has_fused_topk": False,
    }  # fmt: skip
    kernel_config = runtime.config.attrs.get("kernel_config")
    backend = interpreter.attribute(kernel_config, "sparse_indexer_topk_backend") if kernel_config is not None else None
    arguments["topk_backend"] = backend if isinstance(backend, str) else "auto"
    names = function.parameters
    defaults = len(function.node.args.defaults)
    required = [item.arg for item in function.node.args.args]
    required = required[: len(required) - defaults]
    missing = [name for name in required if name not in arguments]
    if missing:
        raise CannotDecideError(f"the dispatch takes {', '.join(missing)}, which is not known here", located.place)
    sentinel_before = len(runtime.recorder.calls)
    filled: list[bool] = []

    def seen() -> str:
        filled.append(not bool(buffer.mask.any()) and bool((buffer.array == -1).all()))
        return interpreter.where

    runtime.recorder.place = seen
    interpreter.call(function, [], {name: value for name, value in arguments.items() if name in names})
    calls = runtime.recorder.calls[sentinel_before:]
    for position, call in enumerate(calls):
        if call.name in TOP_K_OPERATORS:
            return _described(call, recipe, filled[position] if position < len(filled) else None)
    raise CannotDecideError("the dispatch called no top-k operator that is known here", located.place)


def _described(call: OperatorCall, recipe: Recipe, sentinel: bool | None) -> TopKCall:
    tensors = [item for item in call.args if isinstance(item, Tensor)]
    logits = tensors[0] if tensors else None
    if logits is None or logits.array.ndim != 2:
        raise CannotDecideError(f"{call.name} is called without logits", call.place)
    rows = logits.shape[0]
    lengths = next((item for item in tensors[1:] if item.dtype.name == "int32" and item.array.size == rows), None)
    promised: int | None = None
    if call.name in ("persistent_topk", "cooperative_topk"):
        last = call.args[-1]
        if not isinstance(last, int):
            raise CannotDecideError(f"{call.name} gets a max_seq_len that is not known: {last!r}", call.place)
        promised = last
    return TopKCall(
        operator=call.name, rows=rows, width=logits.shape[1], stride=logits.stride(0),
        lengths=tuple(_flat(lengths.tolist())) if lengths is not None else (None,) * rows, max_seq_len=promised,
        top_k=recipe.top_k, place=call.place, sentinel=sentinel,
    )  # fmt: skip
