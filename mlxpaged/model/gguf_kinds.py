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

    def dense(self) -> mx.array:
        """float32 [rows, columns]."""
        return mx.dequantize(self.weight, self.scales, self.biases, group_size=GROUP, bits=self.bits)


def dense_float(tensor: GgufTensor) -> mx.array:
    """F32, F16 or BF16 values in their own type."""
    if tensor.kind == "BF16":  # numpy has no bfloat16
        return mx.array(tensor.data.view(np.uint16)).view(mx.bfloat16).reshape(tensor.shape)
    return mx.array(tensor.data.view(np.float16 if tensor.kind == "F16" else np.float32)).reshape(tensor.shape)


def dequantised(tensor: GgufTensor) -> mx.array:
    """float32 values of a kind whose groups MLX cannot express: Q6_K here, the rarer ones by the gguf package."""
    if tensor.kind == "Q6_K":
        return _q6_k(mx.array(tensor.data).reshape(-1, 210)).reshape(tensor.shape)
    rows = tensor.data.reshape(*tensor.shape[:-1], -1)
    return mx.array(quants.dequantize(rows, GGMLQuantizationType[tensor.kind]))


def packed(tensor: GgufTensor) -> Packed:
    """A matrix of one of the kinds in PACKED_KINDS; nothing is rounded."""
    block_bytes, unpack = _PACKED[tensor.kind]
    rows = tensor.shape[0]
    raw = mx.array(tensor.data).reshape(rows, -1, block_bytes)
    codes, scales, biases = unpack(raw)
    bits = 8 if tensor.kind == "Q8_0" else 4
    return Packed(codes.reshape(rows, -1).view(mx.uint32), scales.reshape(rows, -1), biases.reshape(rows, -1), bits)


def _half(raw: mx.array, start: int) -> mx.array:
    """The float16 at byte `start` of each block, as float32 [..., 1]."""
    return mx.contiguous(raw[..., start : start + 2]).view(mx.float16).astype(mx.float32)


def _nibbles(low: mx.array, high: mx.array) -> mx.array:
    """Codes of 4 bits in uint8 [..., n] each, in the order low then high, two to a byte: uint8 [..., n]."""
    codes = mx.concatenate([low, high], axis=-1)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _q4_0(raw: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """d float16, 16 bytes: value i in the low half of byte i, value 16 + i in its high half; d * (code - 8)."""
    scale, quants_ = _half(raw, 0), raw[..., 2:]
    return _nibbles(quants_ & 15, quants_ >> 4), scale, -8 * scale


def _q4_1(raw: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """d and m float16, 16 bytes as in Q4_0; d * code + m."""
    quants_ = raw[..., 4:]
    return _nibbles(quants_ & 15, quants_ >> 4), _half(raw, 0), _half(raw, 2)


def _q8_0(raw: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """d float16, 32 int8; d * code, with the code moved to 0..255 by its sign bit."""
    scale = _half(raw, 0)
    return raw[..., 2:] ^ 128, scale, -128 * scale


def _q4_k(raw: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """256 values: d and dmin float16; 12 bytes with a scale and a minimum of 6 bits for each of 8 groups; 128 bytes,
    where 32 bytes hold group 2c in their low halves and group 2c + 1 in their high halves.
    value = d * scale * code - dmin * minimum."""
    first, second, third = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = mx.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minima = mx.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    quants_ = raw[..., 16:].reshape(*raw.shape[:-1], 4, 32)
    pairs = mx.stack([quants_ & 15, quants_ >> 4], axis=-2)  # [rows, blocks, 4, 2, 32]: eight groups in order
    codes = pairs[..., 0::2] | (pairs[..., 1::2] << 4)
    return codes, _half(raw, 0) * scales.astype(mx.float32), -_half(raw, 2) * minima.astype(mx.float32)


def _q6_k(raw: mx.array) -> mx.array:
    """256 values: 128 bytes with the low 4 bits, 64 with the high 2, 16 int8 scales, d float16. Each half of 128 is
    four runs of 32: the runs' low bits lie in bytes 0-31 and 32-63, low halves first, their high bits in bit pairs
    of 32 bytes. value = d * scale of its 16 * (code - 32)."""
    low, high = raw[:, :128].reshape(-1, 2, 1, 2, 32), raw[:, 128:192].reshape(-1, 2, 1, 32)
    low = mx.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = mx.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2)
    codes = (low | (high << 4)).astype(mx.float32) - 32
    scales = _half(raw, 208) * mx.contiguous(raw[:, 192:208]).view(mx.int8).astype(mx.float32)
    return codes.reshape(-1, 16, 16) * scales[..., None]


_PACKED: dict[str, tuple[int, Callable[[mx.array], tuple[mx.array, mx.array, mx.array]]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
}
FLOAT_KINDS = frozenset({"F32", "F16", "BF16"})
PACKED_KINDS = frozenset(_PACKED)
DENSE_KINDS = frozenset({"Q6_K"})
"""Read to 16 bits where weights stay as stored: no format of MLX has groups of 16 with 6 bits."""
REQUANTISED_KINDS = frozenset({"Q2_K", "Q3_K", "Q5_0", "Q5_1", "Q5_K"})
KINDS = FLOAT_KINDS | PACKED_KINDS | DENSE_KINDS | REQUANTISED_KINDS
