"""A cache of its own for every session, and a small release written here, with and without the defects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dsv4_repro.forensics.audit.release_source import ReleaseSource


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(session_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_REPRO_CACHE", str(session_cache))
    return


BUILDER = """
import torch
from acme.platform import current_platform
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.split import split


@triton.jit
def expand_kernel(lens_ptr, out_ptr, stride, depth, BLOCK: tl.constexpr):
    at = tl.program_id(0)
    length = tl.load(lens_ptr + at // depth)
    value = length - depth + at % depth + 1
    tl.store(out_ptr + at, {triton_clamp})


class Base:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec = kv_cache_spec
        self.vllm_config = vllm_config
        self.device = device


class Decode:
    def __init__(self, seq_lens, decode_lens, requires_padding):
        self.seq_lens = seq_lens
        self.decode_lens = decode_lens
        self.requires_padding = requires_padding
        self.block_table = None
        self.schedule_metadata = None


class Metadata:
    def __init__(self, num_decodes, num_prefills, num_decode_tokens, max_seq_len, decode, slot_mapping):
        self.num_decodes = num_decodes
        self.num_prefills = num_prefills
        self.num_decode_tokens = num_decode_tokens
        self.max_seq_len = max_seq_len
        self.decode = decode
        self.slot_mapping = slot_mapping


class MetadataBuilder(Base):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        depth = 1 + (self.vllm_config.speculative_config.num_speculative_tokens if self.vllm_config.speculative_config else 0)
        self.depth = depth
        size = self.vllm_config.scheduler_config.max_num_batched_tokens
        self.use_flattening = depth not in (1, 2)
        self.offsets_buffer = torch.arange(depth, dtype=torch.int32, device=self.device)
        self.arange_buffer = torch.arange(size, dtype=torch.int32, device=self.device)
        self.decode_lens_buffer = torch.zeros((size,), dtype=torch.int32, device=self.device)
        self.lengths_buffer = torch.zeros((size,), dtype=torch.int32, device=self.device)
        self.compress_ratio = self.kv_cache_spec.compress_ratio

    def _prepare_decode_tensors(self, seq_lens, decode_lens, decode_lens_cpu, query_start_loc, num_decodes, num_decode_tokens,
    use_native, max_decode_len):
        if use_native:
            view = self.lengths_buffer[: num_decodes * max_decode_len].view(num_decodes, max_decode_len)
            view[:] = (seq_lens.unsqueeze(1) - max_decode_len + 1 + self.offsets_buffer[:max_decode_len]){clamp}
            return view, decode_lens
        if int(decode_lens_cpu.min().item()) == int(decode_lens_cpu.max().item()):
            expand_kernel[(num_decode_tokens,)](seq_lens, self.lengths_buffer, 1, max_decode_len, BLOCK=64)
        else:
            actual = int(decode_lens_cpu.sum().item())
            base = torch.repeat_interleave(seq_lens - decode_lens - query_start_loc, decode_lens, output_size=actual)
            self.lengths_buffer[:actual] = base + self.arange_buffer[:actual] + 1
            self.lengths_buffer[actual:] = 0
        return self.lengths_buffer[:num_decode_tokens], decode_lens

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        num_decodes, num_tokens = split(common)
        torch.diff(common.query_start_loc[: num_decodes + 1], out=self.decode_lens_buffer[:num_decodes])
        decode_lens = self.decode_lens_buffer[:num_decodes]
        decode_lens_cpu = torch.diff(common.query_start_loc_cpu[: num_decodes + 1])
        deepest = int(decode_lens_cpu.max().item())
        native = not self.use_flattening and deepest <= self.depth
        lengths, decode_lens = self._prepare_decode_tensors(
            seq_lens=common.seq_lens[:num_decodes], decode_lens=decode_lens, decode_lens_cpu=decode_lens_cpu,
            query_start_loc=common.query_start_loc[:num_decodes], num_decodes=num_decodes, num_decode_tokens=num_tokens,
            use_native=native, max_decode_len=deepest,
        )
        lengths //= self.compress_ratio
        if lengths.dim() == 1:
            lengths = lengths.unsqueeze(-1)
        uneven = int(decode_lens_cpu.min().item()) != deepest and native
        return Metadata(num_decodes, 0, num_tokens, common.max_seq_len, Decode(lengths, decode_lens, uneven), common.slot_mapping)
"""
SPLIT = """
def split(common):
    query_lens = common.query_start_loc_cpu[1:] - common.query_start_loc_cpu[:-1]
    assert common.num_reqs == query_lens.shape[0]
    return common.num_reqs, common.num_actual_tokens
"""
DISPATCH = """
import torch
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits
from vllm.v1.attention.ops.common import pack_seq_triton


def sparse_attn_indexer(hidden_states, k_cache_prefix, kv_cache, q_quant, weights, topk_tokens, max_model_len, topk_indices_buffer):
    metadata = get_forward_context().attn_metadata[k_cache_prefix]
    decode = metadata.decode
    topk_indices_buffer[: hidden_states.shape[0]] = -1
    if decode.requires_padding:
        queries = pack_seq_triton(q_quant[: metadata.num_decode_tokens], decode.decode_lens)
    else:
        queries = q_quant[: metadata.num_decode_tokens].reshape(decode.seq_lens.shape[0], -1, *q_quant.shape[1:])
    rows = queries.shape[0] * queries.shape[1]
    logits = fp8_fp4_paged_mqa_logits((queries, None), kv_cache, weights[:rows], decode.seq_lens, None, None,
    max_model_len=max_model_len)
    if current_platform.has_device_capability(90) and not current_platform.is_device_capability_family(120):
        torch.ops._C.cooperative_topk(logits, decode.seq_lens, topk_indices_buffer[:rows], None, topk_tokens, metadata.max_seq_len)
    else:
        torch.ops._C.persistent_topk(logits, decode.seq_lens, topk_indices_buffer[:rows], None, topk_tokens, {promised})
    return topk_indices_buffer
"""


def release(*, clamped: bool, promised: str = "logits.shape[1]", extra: Mapping[str, str] | None = None) -> ReleaseSource:
    """A release of our own: the builder's paths with or without the clamp; ``promised``: what is passed as max_seq_len."""
    builder = BUILDER.replace("{clamp}", ".clamp_(min=0)" if clamped else "")
    builder = builder.replace("{triton_clamp}", "tl.maximum(value, 0)" if clamped else "value")
    members = {
        "vllm/v1/attention/indexer.py": builder, "vllm/v1/split.py": SPLIT,
        "vllm/layers/indexer_layer.py": DISPATCH.replace("{promised}", promised),
    }  # fmt: skip
    members.update(extra or {})
    return ReleaseSource({name: text.encode() for name, text in members.items()})


@pytest.fixture
def vulnerable_release() -> ReleaseSource:
    return release(clamped=False)


@pytest.fixture
def fixed_release() -> ReleaseSource:
    return release(clamped=True)
