"""A GGUF file's tensors as the weights of an unmodified mlx-lm model. Owns names, row order and rotation factors;
bit layouts are gguf_kinds', metadata is gguf_config's."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import ModelNotFound, UnsupportedModel
from . import gguf_kinds
from .gguf_file import GgufFile, GgufTensor
from .gguf_kinds import GROUP, Packed

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROTATION = "rope_freqs.weight"
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTSIDE_NAME = re.compile(r"(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A built, evaluated model and the lines a person should read about its conversion."""

    model: nn.Module
    notes: tuple[str, ...]


def num_parameters(file: GgufFile) -> int:
    """Weights in the file, each counted once."""
    return sum(_elements(tensor) for tensor in file.tensors.values())


def build(file: GgufFile, config: dict[str, Any], dense: mx.Dtype | None, activations: mx.Dtype | None) -> GgufModel:
    """An mlx-lm model of `config` with the weights of `file`.

    `dense`: every weight as this type. None: kinds MLX can express stay packed. `activations`: the type of all else
    beside packed weights, and so of the computation; None: float16 there, and in a file without packed kinds always
    what it stores.
    Raises UnsupportedModel (a tensor or kind we do not know) or ModelNotFound (tensors at odds with the config).
    """
    _refuse_unknown(file)
    other = dense or _computing_type(file, activations)
    weights: dict[str, mx.array] = {}
    bits: dict[str, int] = {}
    for tensor in file.tensors.values():
        if (name := _mlx_name(tensor.name)) is None:
            continue
        heads = _permuted_heads(tensor.name, config)
        if dense is None and len(tensor.shape) == 2 and (pack := _pack(tensor)):
            path = name.removesuffix(".weight")
            bits[path] = pack.bits
            arrays = {
                name: pack.weight,
                f"{path}.scales": pack.scales.astype(other),
                f"{path}.biases": pack.biases.astype(other),
            }
        else:
            arrays = {name: gguf_kinds.dense(tensor).astype(other)}
        arrays = {key: _half_split_rows(array, heads) for key, array in arrays.items()}
        mx.eval(*arrays.values())  # one tensor at a time: its bytes and intermediates go before the next comes
        weights |= arrays
    model = _assemble(file, config, weights, bits)
    _set_rotation(file, model, config)
    return GgufModel(model, _notes(file) if dense is None else ())


def shapes(
    file: GgufFile, config: dict[str, Any], dense: mx.Dtype | None, activations: mx.Dtype | None
) -> tuple[nn.Module, int]:
    """What `build` would make, without making it: a model that computes in the same type, whose weights are random and
    never evaluated, and the bytes that the real ones take."""
    _refuse_unknown(file)
    other = dense or _computing_type(file, activations)
    total = 0
    for tensor in file.tensors.values():
        if _mlx_name(tensor.name) is not None:
            bits = _packed_bits(tensor) if dense is None and len(tensor.shape) == 2 else None
            count = _elements(tensor)
            total += count * other.size if bits is None else count * bits // 8 + 2 * other.size * (count // GROUP)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(other)
    return model, total


def _packed_bits(tensor: GgufTensor) -> int | None:
    """Bits of a weight that stays packed, None where it becomes dense."""
    if tensor.kind in gguf_kinds.PACKED_KINDS and tensor.kind != "Q8_0":
        return 4
    return 8 if tensor.kind in gguf_kinds.PACKED_KINDS | gguf_kinds.REQUANTISED_KINDS else None


def _elements(tensor: GgufTensor) -> int:
    count = 1
    for dim in tensor.shape:
        count *= dim
    return count


def _refuse_unknown(file: GgufFile) -> None:
    kinds = Counter(tensor.kind for tensor in file.tensors.values() if tensor.kind not in gguf_kinds.KINDS)
    if kinds:
        named = ", ".join(f"{kind} ({count} tensors)" for kind, count in kinds.most_common())
        raise UnsupportedModel(
            f"{file.path.name} holds {named}; read are {', '.join(sorted(gguf_kinds.KINDS))}; "
            "give a file of one of those, such as Q4_K_M or Q8_0"
        )


def _mlx_name(name: str) -> str | None:
    """mlx-lm's name; None for a tensor that is no weight. Raises UnsupportedModel for a name we do not know."""
    if name == _ROTATION or name.endswith(".attn_rot_embd.weight"):
        return None
    if (found := _LAYER_NAME.fullmatch(name)) and found[2] in _IN_LAYER:
        return f"model.layers.{found[1]}.{_IN_LAYER[found[2]]}.{found[3]}"
    if (found := _OUTSIDE_NAME.fullmatch(name)) and found[1] in _OUTSIDE:
        return f"{_OUTSIDE[found[1]]}.{found[2]}"
    raise UnsupportedModel(f"the GGUF file holds a tensor {name!r} that its architecture does not have here")


def _pack(tensor: GgufTensor) -> Packed | None:
    """The tensor in MLX's affine format, or None where it stays dense."""
    if tensor.kind in gguf_kinds.PACKED_KINDS:
        return gguf_kinds.packed(tensor)
    if tensor.kind in gguf_kinds.REQUANTISED_KINDS:
        return Packed(*mx.quantize(gguf_kinds.dense(tensor), group_size=GROUP, bits=8), 8)
    return None


def _computing_type(file: GgufFile, activations: mx.Dtype | None) -> mx.Dtype:
    """The type of all that is not packed, where weights stay as stored."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) == 2}
    if kinds <= {"F32"}:
        return mx.float32
    if kinds <= gguf_kinds.FLOAT_KINDS:
        return mx.bfloat16 if "BF16" in kinds else mx.float16
    return activations or mx.float16


def _permuted_heads(name: str, config: dict[str, Any]) -> int:
    """How many heads' rows are interleaved for rotation; 0: none. Only llama's writer interleaves q and k."""
    if config["model_type"] != "llama":
        return 0
    part = name.split(".")[2] if name.startswith("blk.") else ""
    return {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(part, 0)


def _half_split_rows(array: mx.array, heads: int) -> mx.array:
    """Rows of each head from pairs (2i, 2i + 1) back to halves (i, i + half), as mlx-lm rotates them."""
    if not heads:
        return array
    paired = array.reshape(heads, array.shape[0] // heads // 2, 2, -1)
    return paired.swapaxes(1, 2).reshape(array.shape)


def _assemble(file: GgufFile, config: dict[str, Any], weights: dict[str, mx.array], bits: dict[str, int]) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))

    def packing(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        return {"group_size": GROUP, "bits": bits[path], "mode": "affine"} if path in bits else False

    if bits:
        nn.quantize(model, group_size=GROUP, bits=4, class_predicate=packing)
    model.eval()
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        reason = " ".join(str(error).split())[:160]
        raise ModelNotFound(f"{file.path} does not hold the weights its metadata describes: {reason}") from error
    return model


def _set_rotation(file: GgufFile, model: nn.Module, config: dict[str, Any]) -> None:
    """Llama 3's scaling is stored as one factor per pair of dimensions, by which its frequency is divided."""
    if _ROTATION not in file.tensors:
        return
    half = config["head_dim"] // 2
    factors = gguf_kinds.dense(file.tensors[_ROTATION]).astype(mx.float32)
    if factors.shape != (half,) or config["model_type"] != "llama" or "rope_scaling" in config:
        raise UnsupportedModel(f"{file.path.name}: {_ROTATION} has the shape {factors.shape}, expected ({half},)")
    from mlx_lm.models.rope_utils import Llama3RoPE

    base = config["rope_theta"] ** (mx.arange(0, 2 * half, 2) / (2 * half))
    for layer in model.layers:
        rope = Llama3RoPE(2 * half, base=config["rope_theta"], scaling_config={"factor": 1.0})
        rope._freqs = base * factors  # the class holds wavelengths over 2 pi, hence the product
        layer.self_attn.rope = rope


def _notes(file: GgufFile) -> tuple[str, ...]:
    counted = Counter(tensor.kind for tensor in file.tensors.values())
    again = sorted(kind for kind in counted if kind in gguf_kinds.REQUANTISED_KINDS)
    if not again:
        return ()
    return (f"{file.path.name}: MLX has no {', '.join(again)}; those weights were requantised to 8 bits",)
