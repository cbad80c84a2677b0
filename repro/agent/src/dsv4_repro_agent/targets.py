"""What the hooks need of vLLM, as a table: found by name and shape, never by release.

``tests/agent`` holds this table against the sources of every release.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUILDER", "DISPATCH_V2", "OUTPUT_V1", "OUTPUT_V2", "RUNNER_V1", "RUNNER_V2", "TARGETS", "TOPK_MODULES", "Target"]

RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
OUTPUT_V1 = RUNNER_V1
OUTPUT_V2 = "vllm.v1.worker.gpu.async_utils"
BUILDER = "vllm.v1.attention.backends.mla.indexer"
DISPATCH_V2 = "dispatch_cg_and_sync_dp"
#: After one of these was imported the op is loaded.
TOPK_MODULES = ("vllm.model_executor.layers.sparse_attn_indexer", "vllm.model_executor.layers.indexer_topk")


@dataclass(frozen=True)
class Target:
    """``owner``: class in the module, empty for a name of the module itself. ``needs``: parameters that the hook reads."""

    feature: str
    module: str
    owner: str
    name: str
    needs: tuple[str, ...] = ()


TARGETS: tuple[Target, ...] = (
    Target("v1 step", RUNNER_V1, "GPUModelRunner", "execute_model", ("scheduler_output",)),
    Target("v1 sample", RUNNER_V1, "GPUModelRunner", "sample_tokens"),
    Target("v1 batch", RUNNER_V1, "GPUModelRunner", "_determine_batch_execution_and_padding", ("num_tokens", "num_reqs")),
    Target("v1 output", OUTPUT_V1, "AsyncGPUModelRunnerOutput", "get_output"),
    Target("v2 step", RUNNER_V2, "GPUModelRunner", "execute_model", ("scheduler_output", "dummy_run")),
    Target("v2 sample", RUNNER_V2, "GPUModelRunner", "sample_tokens"),
    Target("v2 batch", RUNNER_V2, "", DISPATCH_V2, ("num_reqs", "num_tokens")),
    Target("v2 output", OUTPUT_V2, "AsyncOutput", "get_output"),
    Target(
        "decode lengths", BUILDER, "DeepseekV32IndexerMetadataBuilder", "_prepare_decode_tensors",
        ("seq_lens", "decode_lens_cpu", "use_native", "next_n", "max_decode_len"),
    ),
)  # fmt: skip
