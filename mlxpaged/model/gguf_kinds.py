"""Tensor kinds of GGUF as MLX arrays. Owns the bit layouts; knows no names and no model.

Q4_0, Q4_1, Q4_K and Q8_0 are affine in groups of 32, as MLX's are: value = scale * code + bias, so their codes move
over unchanged. Layouts: the GGUF format's block structures (ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, quants

from .gguf_file import GgufTensor

GROUP = 32
"""Values that share one scale and one bias."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix in MLX's affine format: `weight` uint32 [rows, columns * bits / 32], `scales` and `biases` float32
    [rows, columns / 32]."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int


def packed(tensor: GgufTensor) -> Packed:
    """A matrix of one of the kinds in PACKED_KINDS; nothing is rounded."""
    block_bytes, unpack = _PACKED[tensor.kind]
    rows, bits = tensor.shape[0], 8
    codes, scales, biases = unpack(mx.array(tensor.data).reshape(-1, block_bytes))
    codes = codes.reshape(-1, GROUP)
    if tensor.kind != "Q8_0":
        codes, bits = codes[:, 0::2] | (codes[:, 1::2] << 4), 4
    return Packed(codes.reshape(rows, -1).view(mx.uint32), scales.reshape(rows, -1), biases.reshape(rows, -1), bits)


def dense(tensor: GgufTensor) -> mx.array:
    """The values: F32, F16 and BF16 in their own type, other kinds as float32 by the gguf package."""
    match tensor.kind:
        case "F32" | "F16":
            floats = tensor.data.view(np.float32 if tensor.kind == "F32" else np.float16)
            return mx.array(floats).reshape(tensor.shape)
        case "BF16":  # numpy has no bfloat16
            return mx.array(tensor.data.view(np.uint16)).view(mx.bfloat16).reshape(tensor.shape)
    rows = tensor.data.reshape(*tensor.shape[:-1], -1)
    with np.errstate(all="ignore"):  # damaged scales are no reason for a warning on a person's terminal
        return mx.array(quants.dequantize(rows, GGMLQuantizationType[tensor.kind]))


def _half(raw: mx.array, start: int) -> mx.array:
    """The float16 at byte `start` of each block, as float32 [blocks, 1]."""
    return mx.contiguous(raw[:, start : start + 2]).view(mx.float16).astype(mx.float32)


def _nibbles(data: mx.array) -> mx.array:
    """Codes of 4 bits: all low halves of the last axis, then all high halves."""
    return mx.concatenate([data & 15, data >> 4], axis=-1)


def _q4_0(raw: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """d float16, 16 bytes: value i in the low half of byte i, value 16 + i in its high half; d * (code - 8)."""
    scale = _half(raw, 0)
    return _nibbles(raw[:, 2:]), scale, -8 * scale


def _q4_1(raw: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """d and m float16, 16 bytes as in Q4_0; d * code + m."""
    return _nibbles(raw[:, 4:]), _half(raw, 0), _half(raw, 2)


def _q8_0(raw: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """d float16, 32 int8; d * code, with the code moved to 0..255 by its sign bit."""
    scale = _half(raw, 0)
    return raw[:, 2:] ^ 128, scale, -128 * scale


def _q4_k(raw: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """256 values: d and dmin float16; 12 bytes with a scale and a minimum of 6 bits for each of 8 groups; 128 bytes,
    where 32 bytes hold group 2c in their low halves and group 2c + 1 in their high halves.
    value = d * scale * code - dmin * minimum."""
    first, second, third = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = mx.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minima = mx.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    codes = _nibbles(raw[:, 16:].reshape(-1, 4, 32))
    return codes, _half(raw, 0) * scales.astype(mx.float32), -_half(raw, 2) * minima.astype(mx.float32)


_PACKED: dict[str, tuple[int, Callable[[mx.array], tuple[mx.array, mx.array, mx.array]]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
}
FLOAT_KINDS = frozenset({"F32", "F16", "BF16"})
PACKED_KINDS = frozenset(_PACKED)
DENSE_KINDS = frozenset({"Q6_K"})
"""Dense also where weights stay as stored: no format of MLX has groups of 16 with 6 bits."""
REQUANTISED_KINDS = frozenset({"Q2_K", "Q3_K", "Q5_0", "Q5_1", "Q5_K"})
KINDS = FLOAT_KINDS | PACKED_KINDS | DENSE_KINDS | REQUANTISED_KINDS
