"""From GGUF metadata to the config mlx-lm's model classes read. Owns the key names; imports no mlx."""

from __future__ import annotations

from typing import Any

from ..errors import ModelNotFound, UnsupportedModel
from .gguf_file import GgufFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Mistral-shaped models are written as llama."""
_DEFAULTS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The config of the model in `file`, checked against its tensors' shapes.

    Raises UnsupportedModel (another architecture, a rotation or expert layout we do not know) or ModelNotFound
    (metadata missing or at odds with the tensors).
    """
    architecture = _known_architecture(file)
    keys = _Keys(file, architecture)
    if keys.whole("expert_count", 0):
        raise UnsupportedModel(
            f"{file.path.name} has experts; GGUF files with experts are not read; give the model's MLX form"
        )
    heads = keys.whole("attention.head_count")
    hidden = keys.whole("embedding_length")
    config: dict[str, Any] = {
        "model_type": architecture,
        "hidden_size": hidden,
        "num_hidden_layers": keys.whole("block_count"),
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": keys.whole("attention.key_length", hidden // max(heads, 1)),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": keys.whole("context_length"),
        "rope_theta": keys.real("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    if scaling := _rope_scaling(keys, config["max_position_embeddings"]):
        config["rope_scaling"] = scaling
    _check(file, keys, config)
    return config


def _known_architecture(file: GgufFile) -> str:
    """The architecture, once the file is known to hold a whole model of it."""
    architecture = file.text("general.architecture")
    if architecture is None:
        raise ModelNotFound(f"{file.path} is damaged: general.architecture is missing; fetch it again")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path.name} is a {architecture} model; GGUF files are read for {', '.join(ARCHITECTURES)} "
            "(mistral is written as llama); give the model's MLX or Hugging Face form"
        )
    if (parts := int(file.number("split.count", 1) or 1)) > 1:
        raise UnsupportedModel(f"{file.path.name} is one of {parts} parts; join them with llama-gguf-split --merge")
    if "token_embd.weight" not in file.tensors:
        raise ModelNotFound(f"{file.path} holds no token_embd.weight; it is not a whole model")
    return architecture


def gguf_defaults(file: GgufFile) -> dict[str, float]:
    """The sampling defaults the file recommends, where it does."""
    found = {name: file.number(key) for name, key in _DEFAULTS.items()}
    return {name: value for name, value in found.items() if value is not None}


class _Keys:
    """Metadata of one architecture: `whole("block_count")` reads `llama.block_count`."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def real(self, key: str, default: float | None = None) -> float:
        value = self.file.number(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelNotFound(f"{self.file.path} is damaged: {self.architecture}.{key} is missing; fetch it again")
        return float(value)

    def whole(self, key: str, default: int | None = None) -> int:
        if isinstance(self.file.value(f"{self.architecture}.{key}"), list):
            raise UnsupportedModel(
                f"{self.file.path.name} has another {key} in each layer; give the model's MLX or Hugging Face form"
            )
        return int(self.real(key, default))

    def text(self, key: str) -> str | None:
        return self.file.text(f"{self.architecture}.{key}")


def _rope_scaling(keys: _Keys, context_len: int) -> dict[str, Any] | None:
    """RoPE scaling written as metadata. (Llama 3's is a tensor, rope_freqs.weight: see gguf_weights.)"""
    kind = keys.text("rope.scaling.type")
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0))
    if (kind in (None, "none") and factor == 1.0) or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or keys.real("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"{keys.file.path.name} scales its rotation by {kind!r}; GGUF files are read with linear, yarn or "
            "rope_freqs scaling; give the model's MLX or Hugging Face form"
        )
    original = keys.whole("rope.scaling.original_context_length", context_len)
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def _check(file: GgufFile, keys: _Keys, config: dict[str, Any]) -> None:
    """Metadata and tensors must agree before anything is built from either."""
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    blocks = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if not 1 <= layers == len(blocks):
        raise ModelNotFound(f"{file.path} claims {layers} layers and holds {len(blocks)}; fetch it again")
    if not (heads >= 1 <= kv_heads and heads % kv_heads == 0 and head_dim >= 2 and head_dim % 2 == 0):
        raise ModelNotFound(
            f"{file.path} is damaged: {heads} heads of {head_dim} over {kv_heads} KV heads; fetch it again"
        )
    if config["max_position_embeddings"] < 1 or not 0 < config["rms_norm_eps"] < 1 or config["rope_theta"] <= 0:
        raise ModelNotFound(f"{file.path} is damaged: its context, epsilon or RoPE base is out of range")
    expected = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "output_norm.weight": (hidden,),
        "blk.0.attn_q.weight": (heads * head_dim, hidden),
        "blk.0.attn_k.weight": (kv_heads * head_dim, hidden),
        "blk.0.ffn_gate.weight": (config["intermediate_size"], hidden),
    }
    for name, shape in expected.items():
        found = file.tensors[name].shape if name in file.tensors else None
        if found != shape:
            raise ModelNotFound(f"{file.path}: {name} should have the shape {shape}, it has {found}; fetch it again")
    rotated = keys.whole("rope.dimension_count", head_dim)
    if rotated != head_dim or (config["model_type"] == "qwen2" and head_dim * heads != hidden):
        raise UnsupportedModel(
            f"{file.path.name} rotates {rotated} of {head_dim} dimensions in {heads} heads over {hidden}; "
            "mlx-lm's class for it cannot; give the model's MLX or Hugging Face form"
        )
