"""Tiny random models of many families, made from mlx-lm's own ModelArgs. float32, seeded, a few milliseconds each."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

VOCAB = 199
_BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 3,
}

PAGED: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "tie_word_embeddings": False},
    "qwen2": {**_BASE},
    "qwen3": {**_BASE, "head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {**_BASE, **_MOE, "head_dim": 16, "tie_word_embeddings": False},
    "gemma3_text": {
        **_BASE,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
    },
    "gemma4_text": {
        **_BASE,
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 16,
    },
    "phi3": {**_BASE},
    "gpt_oss": {
        **_BASE,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 24,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    "olmo2": {**_BASE},
    "cohere2": {**_BASE, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 24, "sliding_window_pattern": 2},
    "glm4": {**_BASE, "attention_bias": True, "head_dim": 16, "partial_rotary_factor": 0.5},
    "granite": {
        **_BASE,
        "logits_scaling": 1.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 4.0,
        "residual_multiplier": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "smollm3": {**_BASE},
    "ministral3": {
        **_BASE,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 8,
        },
    },
}
"""Families the paged path serves."""

SOLO: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_BASE,
        **_MOE,
        **_LINEAR,
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
        "head_dim": 16,
    },
    "deepseek_v3": {
        **_BASE,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "gemma2": {
        **_BASE,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
}
"""Families that go to the one-at-a-time path: recurrent layers, latent attention, attention maths of its own."""

_SPREAD = 4.0
"""Weights are scaled up so that logits differ by much more than rounding, and greedy tokens vary."""


def tiny_model(family: str, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """(model, config) of a family, the same weights at each call."""
    config = {"model_type": family, **(PAGED | SOLO)[family], **changes}
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict(config))
    parameters = tree_map(lambda array: _spread(array), model.parameters())
    model.update(parameters)
    model.eval()
    mx.eval(model.parameters())
    return model, config


def _spread(array: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    array = array.astype(mx.float32)
    if array.ndim < 2:
        return array + mx.random.normal(array.shape) * 0.1  # norms, sinks and biases are not trivial either
    return mx.random.normal(array.shape) * (_SPREAD / 4 / array.shape[-1] ** 0.5)
