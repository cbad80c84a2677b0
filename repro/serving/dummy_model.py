"""A tiny DeepSeek-V3.2 as files: configuration and tokenizer, no weights (``--load-format dummy`` draws them).

Shapes are those that were seen to reach the defect on one H200 with vLLM 0.23.0: sparse attention with an indexer of 2048 in every
layer, one MTP layer, dense (no MoE), bf16; a layer fewer or more changes nothing about it. The tokenizer is a word list in the
JSON form of the ``tokenizers`` library, written here as text, so that nothing of it has to be installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ..atomic import write_atomic

__all__ = ["DUMMY_LAYERS", "INDEX_TOPK", "MAX_LAYERS", "VOCABULARY", "model_config", "tokenizer_document", "write_dummy_model"]

#: Indexer layers of the model that was run; DeepSeek-V4-Flash has 21.
DUMMY_LAYERS = 2
MAX_LAYERS = 128
INDEX_TOPK = 2048
VOCABULARY = 4096
_LONGEST = 163840
_SPECIAL = ("<bos>", "<eos>", "<pad>", "<unk>")


def model_config(layers: int = DUMMY_LAYERS, *, mtp_layers: int = 1) -> dict[str, Any]:
    """``config.json``. Every one of the ``layers`` has an indexer (compress ratio 1). UsageError for a senseless count."""
    if not 1 <= layers <= MAX_LAYERS:
        raise UsageError(f"--layers {layers}: a dummy model has 1 to {MAX_LAYERS}")
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        # Beyond the last layer: no layer is a mixture of experts.
        "first_k_dense_replace": max(99, layers + mtp_layers),
        "hidden_act": "silu",
        "hidden_size": 1024,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": INDEX_TOPK,
        "initializer_range": 0.02,
        "intermediate_size": 2048,
        "kv_lora_rank": 512,
        "max_position_embeddings": _LONGEST,
        "moe_intermediate_size": 512,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": mtp_layers,
        "q_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }


def tokenizer_document(size: int = VOCABULARY) -> dict[str, Any]:
    """``tokenizer.json``: one word a token, ``t4`` to ``t4095``, split at white space."""
    words = {word: index for index, word in enumerate(_SPECIAL)} | {f"t{index}": index for index in range(len(_SPECIAL), size)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }


def write_dummy_model(folder: Path, *, layers: int = DUMMY_LAYERS, mtp_layers: int = 1) -> Path:
    """Write the model into ``folder`` (made if it is not there) and return it. RunStoreError if it cannot be written."""
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": _LONGEST,
    }
    config = model_config(layers, mtp_layers=mtp_layers)
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in (("config.json", config), ("tokenizer.json", tokenizer_document()), ("tokenizer_config.json", tokenizer)):
        write_atomic(folder / name, json.dumps(document, indent=1).encode())
    return folder
