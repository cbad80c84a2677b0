"""What surrounds the release's code when it is run here: the GPU's architecture, the server's configuration, and the few names
that launch kernels.

The configuration answers with the recipe where the recipe says something, else with the literal default of the release's own
configuration
class, else with ``Unknown``: a branch on that ends the run with CANNOT TELL instead of a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .builtins_standin import standard_modules
from .interpreter import Interpreter
from .recipe import Recipe
from .release_source import ReleaseSource
from .tensors import DTYPES, Tensor, from_numpy, full, shape_only, unknown_like
from .torch_standin import Recorder, torch_module
from .triton_standin import triton_modules
from .values import CannotDecideError, Namespace, Native, Unknown

__all__ = ["PADDED_WIDTH", "Batch", "ReleaseRuntime", "common_metadata", "release_runtime", "vllm_config"]

#: DeepGEMM's callers pad a row of logits to a multiple of this many floats.
PADDED_WIDTH = 256
_CONFIG_FILES = {
    "scheduler_config": "vllm/config/scheduler.py", "parallel_config": "vllm/config/parallel.py",
    "speculative_config": "vllm/config/speculative.py",
    "attention_config": "vllm/config/attention.py", "kernel_config": "vllm/config/kernel.py",
    "model_config": "vllm/config/model.py",
    "cache_config": "vllm/config/cache.py", "compilation_config": "vllm/config/compilation.py",
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """A padded decode batch. ``seq_lens`` and ``query_lens`` per request slot, 0 and 0 for a padding slot; ``tokens``: padded
    rows."""

    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    tokens: int

    @property
    def query_start_loc(self) -> tuple[int, ...]:
        return (0, *(int(item) for item in np.cumsum(self.query_lens)))


@dataclass
class ReleaseRuntime:
    """An interpreter set up for one release, recipe and architecture, and what the code called."""

    interpreter: Interpreter
    recorder: Recorder
    config: Namespace


def vllm_config(source: ReleaseSource, recipe: Recipe) -> Namespace:
    """The server's configuration under ``recipe``."""

    def part(name: str, known: dict[str, Any]) -> Namespace:
        defaults = source.class_defaults(_CONFIG_FILES.get(name, ""))

        def missing(field: str) -> Any:
            return defaults[field] if defaults.get(field) is not None else Unknown(f"{name}.{field}")

        return Namespace(name, known, missing=missing)

    speculative: Any = None
    if recipe.mtp:
        speculative = part("speculative_config", {"num_speculative_tokens": recipe.mtp, "method": recipe.method})
    hf = Namespace("hf_config", {"index_topk": recipe.top_k, "compress_ratios": [recipe.compress]})
    parts: dict[str, Any] = {
        "scheduler_config": part("scheduler_config", {"max_num_seqs": recipe.max_num_seqs,
        "max_num_batched_tokens": recipe.max_num_batched_tokens}),
        "parallel_config": part(
            "parallel_config",
            {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "tensor_parallel_size": 1,
            "data_parallel_size": recipe.dp,
             "cp_kv_cache_interleave_size": 1, "dcp_kv_cache_interleave_size": 1},
        ),
        "speculative_config": speculative,
        "num_speculative_tokens": recipe.mtp,
        "attention_config": part("attention_config", {}),
        "kernel_config": part("kernel_config", {}),
        "model_config": part("model_config", {"max_model_len": recipe.max_model_len, "hf_config": hf,
        "architectures": ["DeepseekV4ForCausalLM"]}),
        "cache_config": part("cache_config", {}),
        "compilation_config": part("compilation_config", {}),
    }  # fmt: skip
    parts["attention_config"].attrs["resolve_indexer_kv_dtype"] = Native("resolve_indexer_kv_dtype", lambda default="fp8": default)
    return Namespace("vllm_config", parts, missing=lambda field: Unknown(f"vllm_config.{field}"))


def _platform(sm: int) -> Namespace:
    def number(value: Any) -> int:
        if isinstance(value, tuple):
            return int(value[0]) * 10 + int(value[1])
        if isinstance(value, Unknown):
            raise CannotDecideError(f"a capability check against {value.why}")
        return int(value)

    table: dict[str, Callable[..., Any]] = {
        "is_cuda": lambda: True, "is_cuda_alike": lambda: True, "is_rocm": lambda: False, "is_xpu": lambda: False,
        "is_cpu": lambda: False, "is_tpu": lambda: False,
        "has_device_capability": lambda capability, device_id=0: sm >= number(capability),
        "is_device_capability": lambda capability, device_id=0: sm == number(capability),
        "is_device_capability_family": lambda capability, device_id=0: sm // 10 == number(capability) // 10,
        "fp8_dtype": lambda: DTYPES["float8_e4m3fn"],
    }  # fmt: skip
    return Namespace("current_platform", {name: Native(name, call) for name, call in table.items()})


def release_runtime(source: ReleaseSource, recipe: Recipe, sm: int, num_sms: int, row_stride: int | None = None) -> ReleaseRuntime:
    """An interpreter for a release. ``row_stride``: of the logits, in floats; None is their
    width."""
    recorder = Recorder()
    config = vllm_config(source, recipe)

    def logits(*args: Any, **kwargs: Any) -> Any:
        """fp32 logits [B * next_n, max_model_len]; only their shape matters here."""
        query = args[0] if args else kwargs.get("q")
        query = query[0] if isinstance(query, tuple) else query
        width = kwargs.get("max_model_len", args[6] if len(args) > 6 else None)
        if not isinstance(query, Tensor) or not isinstance(width, int):
            return Unknown("logits of unknown shape")
        return shape_only((query.shape[0] * query.shape[1], width), DTYPES["float32"], row_stride or width)

    def packed(value: Any, lengths: Any, *args: Any, **kwargs: Any) -> Any:
        """``pack_seq_triton``: [tokens, …] to [requests, longest, …]."""
        if not isinstance(value, Tensor) or not isinstance(lengths, Tensor):
            return Unknown("pack_seq_triton")
        longest = lengths.reduced(np.max).item()
        if not isinstance(longest, int):
            return Unknown("pack_seq_triton of unknown lengths")
        return shape_only((lengths.shape[0], longest, *value.shape[1:]), value.dtype)

    def unpacked(value: Any, lengths: Any, *args: Any) -> Any:
        """``unpack_seq_triton``: [requests, longest, …] back to [tokens, …]."""
        if not isinstance(value, Tensor) or not isinstance(lengths, Tensor):
            return Unknown("unpack_seq_triton")
        tokens = lengths.reduced(np.sum).item()
        if not isinstance(tokens, int):
            return Unknown("unpack_seq_triton of unknown lengths")
        return unknown_like((tokens, *value.shape[2:]), value.dtype)

    def workspaces(*specs: Any) -> list[Any]:
        return [unknown_like(spec[0], spec[1]) if isinstance(spec, tuple) else Unknown("a workspace") for spec in specs]

    manager = Namespace("workspace_manager", {"get_simultaneous": Native("get_simultaneous", workspaces)})
    group = Namespace("group", {"rank_in_group": 0, "world_size": 1, "rank": 0})
    quiet = Native("logger", lambda *args, **kwargs: None)
    logger = Namespace("logger", missing=lambda name: quiet)
    forward = Namespace("forward_context", missing=lambda name: Unknown(f"forward_context.{name}"))
    standins: dict[str, Any] = {
        "torch": torch_module(recorder), "numpy": _numpy(), **standard_modules(), **triton_modules(),
        "vllm.platforms": Namespace("vllm.platforms", {"current_platform": _platform(sm)}),
        "vllm.logger": Namespace("vllm.logger", {"init_logger": Native("init_logger", lambda *args: logger)}),
        "vllm.envs": Namespace("vllm.envs", {"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": 512}),
        "vllm.forward_context": Namespace("vllm.forward_context", {"get_forward_context": Native("get_forward_context",
        lambda: forward)}),
    }  # fmt: skip
    deep_gemm = "vllm.utils.deep_gemm"
    schedule = Native("get_paged_mqa_logits_metadata", lambda *args, **kwargs: unknown_like((num_sms + 1, 2), DTYPES["int32"]))
    slots = Native("get_compressed_slot_mapping", lambda *args, **kwargs: kwargs.get("out", Unknown("slot mapping")))
    overrides: dict[tuple[str, str], Any] = {
        (deep_gemm, "has_deep_gemm"): Native("has_deep_gemm", lambda: True), (deep_gemm, "get_paged_mqa_logits_metadata"): schedule,
        (deep_gemm, "fp8_fp4_paged_mqa_logits"): Native("fp8_fp4_paged_mqa_logits", logits), (deep_gemm,
        "fp8_paged_mqa_logits"): Native("fp8_paged_mqa_logits", logits),
        (deep_gemm, "as_fp32_logits"): Native("as_fp32_logits", lambda value, *_: value),
        (deep_gemm, "mqa_logits_mx_inputs"): Native("mqa_logits_mx_inputs", lambda q, scale, weights: (scale, weights)),
        (deep_gemm, "mqa_logits_use_mx_scales"): Native("mqa_logits_use_mx_scales", lambda: False),
        ("vllm.utils.import_utils", "has_deep_gemm"): Native("has_deep_gemm", lambda: True),
        ("vllm.utils.flashinfer", "has_flashinfer"): Native("has_flashinfer", lambda: True),
        ("vllm.utils.platform_utils", "num_compute_units"): Native("num_compute_units", lambda *args: num_sms),
        ("vllm.distributed.parallel_state", "get_dcp_group"): Native("get_dcp_group", lambda: group),
        ("vllm.distributed.parallel_state", "get_pcp_group"): Native("get_pcp_group", lambda: group),
        ("vllm.distributed", "get_dcp_group"): Native("get_dcp_group", lambda: group),
        ("vllm.distributed", "get_pcp_group"): Native("get_pcp_group", lambda: group),
        ("vllm.v1.worker.cp_utils", "get_total_cp_world_size"): Native("get_total_cp_world_size", lambda: 1),
        ("vllm.config", "get_current_vllm_config"): Native("get_current_vllm_config", lambda: config),
        ("vllm.v1.worker.workspace", "current_workspace_manager"): Native("current_workspace_manager", lambda: manager),
    }  # fmt: skip
    for module in ("vllm.v1.attention.backends.mla.compressor_utils", "vllm.v1.attention.ops.deepseek_v4_ops.fused_indexer_q"):
        overrides[module, "get_compressed_slot_mapping"] = slots
    for module in ("vllm.v1.attention.ops.common", "vllm.model_executor.layers.sparse_attn_indexer"):
        overrides[module, "pack_seq_triton"] = Native("pack_seq_triton", packed)
        overrides[module, "unpack_seq_triton"] = Native("unpack_seq_triton", unpacked)
    interpreter = Interpreter(source.members, standins, overrides, source.trees)
    recorder.place = lambda: interpreter.where
    return ReleaseRuntime(interpreter, recorder, config)


def _numpy() -> Namespace:
    return Namespace("numpy", {"ndarray": Namespace("numpy.ndarray"), "int32": DTYPES["int32"], "int64": DTYPES["int64"]})


def common_metadata(batch: Batch, max_seq_len: int, table_width: int = 4) -> Namespace:
    """``CommonAttentionMetadata`` of a padded decode batch, as the model runner fills it: padding slots have length 0 and no
    query."""

    def ints(values: tuple[int, ...]) -> Tensor:
        return from_numpy(np.array(values, np.int32))

    slots = len(batch.seq_lens)
    fields: dict[str, Any] = {
        "num_reqs": slots, "num_actual_tokens": batch.tokens, "max_query_len": max(batch.query_lens), "max_seq_len": max_seq_len,
        "query_start_loc": ints(batch.query_start_loc), "query_start_loc_cpu": ints(batch.query_start_loc),
        "seq_lens": ints(batch.seq_lens), "seq_lens_cpu": ints(batch.seq_lens), "_seq_lens_cpu": ints(batch.seq_lens),
        "seq_lens_cpu_upper_bound": ints(batch.seq_lens), "slot_mapping": full((batch.tokens,), 0, DTYPES["int64"]),
        "block_table_tensor": full((slots, table_width), 0, DTYPES["int32"]), "dcp_local_seq_lens": None,
        "dcp_local_seq_lens_cpu": None,
        "dcp_local_seq_lens_cpu_upper_bound": None, "is_prefilling": full((slots,), 0, DTYPES["bool"]), "positions": None,
        "req_idx": None, "causal": True,
    }  # fmt: skip
    return Namespace(
        "common_attn_metadata",
        fields,
        kinds=("CommonAttentionMetadata",),
        missing=lambda name: Unknown(f"common_attn_metadata.{name}"),
    )
