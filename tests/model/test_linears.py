"""Our linears against mlx's own: every way of computing them gives the same numbers."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxpaged.model.linears import LinearWays, flatten_linears

WAYS = [None, LinearWays(dense_above=1), LinearWays(dense_above=3)]


class Attention(nn.Module):
    """Three projections of one input, as models have them."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(64, 96, bias=bias), nn.Linear(64, 32, bias=bias)
        self.v_proj = nn.Linear(64, 32, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)


def quantized(module: nn.Module, bits: int | None) -> nn.Module:
    if bits:
        nn.quantize(module, group_size=32, bits=bits)
    return module


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("bias", [False, True])
def test_flattened_linears_compute_the_same(bits, ways, bias) -> None:
    mx.random.seed(0)
    layers = nn.Sequential(nn.Linear(64, 128, bias=bias), nn.Linear(128, 64, bias=bias))
    layers.embedding = nn.Embedding(32, 64)
    quantized(layers, bits)
    inputs = [mx.random.normal((rows, 1, 64)) for rows in (6, 5, 1)]
    before = [(np.array(layers(x)), np.array(layers.embedding.as_linear(x))) for x in inputs]
    flatten_linears(layers, ways)
    flatten_linears(layers, ways)
    for x, (expected, head) in zip(inputs, before, strict=True):
        assert layers(x).shape == x.shape
        assert np.allclose(np.array(layers(x)), expected, atol=1e-5)
        assert np.allclose(np.array(layers.embedding.as_linear(x)), head, atol=1e-5)
        assert np.allclose(np.array(layers(x.reshape(1, -1, 64))).reshape(expected.shape), expected, atol=1e-5)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_joined_linears_compute_the_same_and_hold_nothing_twice(bits, bias) -> None:
    mx.random.seed(0)
    attention = quantized(Attention(bias), bits)
    x, other = mx.random.normal((5, 1, 64)), mx.random.normal((5, 1, 64))
    expected, alone = np.array(attention(x)), np.array(attention.k_proj(other))
    parameters = {name: np.array(array) for name, array in tree_flatten(attention.parameters())}
    mx.clear_cache()
    active = mx.get_active_memory()
    flatten_linears(attention, LinearWays(join=True))
    assert mx.get_active_memory() <= active + 4096
    assert np.allclose(np.array(attention(x)), expected, atol=1e-5)
    assert np.allclose(np.array(attention(x)), expected, atol=1e-5)
    # Called alone, twice, or with another input in between, each still gives its own.
    for _ in range(2):
        assert np.allclose(np.array(attention.k_proj(other)), alone, atol=1e-5)
    assert np.allclose(np.array(attention(x)), expected, atol=1e-5)
    after = dict(tree_flatten(attention.parameters()))
    assert all(np.array_equal(np.array(after[name]), value) for name, value in parameters.items())
    assert after.keys() == parameters.keys()


def test_linears_that_differ_in_kind_are_not_joined() -> None:
    attention = Attention()
    attention.v_proj = nn.Linear(64, 32, bias=True)
    attention.k_proj = nn.QuantizedLinear.from_linear(attention.k_proj, group_size=32, bits=4)
    x = mx.random.normal((2, 1, 64))
    expected = np.array(attention(x))
    flatten_linears(attention, LinearWays(join=True))
    assert np.allclose(np.array(attention(x)), expected, atol=1e-5)


def test_joined_linears_compute_one_product_inside_a_compiled_function() -> None:
    attention = Attention()
    x = mx.random.normal((4, 1, 64))
    expected = np.array(attention(x))
    flatten_linears(attention, LinearWays(join=True))
    compiled = mx.compile(attention)
    assert np.allclose(np.array(compiled(x)), expected, atol=1e-5)
    assert np.allclose(np.array(compiled(x + 1)), np.array(attention(x + 1)), atol=1e-5)
