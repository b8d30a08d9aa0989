"""Our linears against mlx's own: every way of computing them gives the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxpaged.kernels.launch import KernelSpec
from mlxpaged.model.linears import LinearWays, Skinny, flatten_linears

from ..emulator import FORWARD, EmulatorLauncher, require_tools

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


class Started:
    """The emulator, and how many kernels it was asked for."""

    def __init__(self) -> None:
        require_tools()
        self._launch = EmulatorLauncher(passes=(FORWARD,))
        self.count = 0

    def __call__(self, spec: KernelSpec, *args: Any, **kwargs: Any) -> list[mx.array]:
        self.count += 1
        return self._launch(spec, *args, **kwargs)


def of_16_bits(bits: int | None, bias: bool = False) -> nn.Module:
    mx.random.seed(0)
    layers = nn.Module()
    layers.linear, layers.embedding = nn.Linear(128, 96, bias=bias), nn.Embedding(40, 128)
    layers.set_dtype(mx.bfloat16)
    return quantized(layers, bits)


def in_float32(module: nn.Module) -> nn.Module:
    """A copy whose products are not rounded to 16 bits on the way, as MLX's are on a CPU."""
    exact = copy.deepcopy(module)
    exact.set_dtype(mx.float32)
    return exact


def close(got: mx.array, expected: mx.array) -> bool:
    error = mx.abs(got.astype(mx.float32) - expected.astype(mx.float32)).max()
    return bool(error <= 2e-2 * mx.abs(expected.astype(mx.float32)).max())


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_go_through_skinny_matmul_and_others_do_not(bits, bias) -> None:
    layers, launch = of_16_bits(bits, bias), Started()
    inputs = {rows: mx.random.normal((rows, 1, 128)).astype(mx.bfloat16) for rows in (1, 2, 32, 33)}
    exact = in_float32(layers)
    flatten_linears(layers, LinearWays(skinny=Skinny(launch)))
    for rows, x in inputs.items():
        launch.count = 0
        got = layers.linear(x), layers.embedding.as_linear(x)
        assert launch.count == (2 if 1 < rows <= 32 else 0)
        wide = x.astype(mx.float32)
        if launch.count:
            assert close(got[0], exact.linear(wide)) and close(got[1], exact.embedding.as_linear(wide))


def test_the_kernel_serves_where_it_is_said_to_be_faster() -> None:
    layers, launch, asked = of_16_bits(4), Started(), []

    def faster(*size: int) -> bool:
        asked.append(size)
        return size[0] < 9

    flatten_linears(layers, LinearWays(skinny=Skinny(launch, faster)))
    for rows in (9, 8):
        mx.eval(layers.linear(mx.zeros((rows, 128), mx.bfloat16)))
    assert asked == [(9, 96, 128, 4, 32), (8, 96, 128, 4, 32)] and launch.count == 1


def test_what_the_kernel_does_not_take_is_left_to_mlx() -> None:
    launch = Started()
    ways = LinearWays(skinny=Skinny(launch))
    wide, floats = of_16_bits(8), of_16_bits(None)
    floats.set_dtype(mx.float32)
    of_mode = of_16_bits(None)
    nn.quantize(of_mode, group_size=32, bits=4, mode="mxfp4")
    odd = nn.Linear(80, 8)
    odd.set_dtype(mx.bfloat16)
    for layer, x in (
        (floats.linear, mx.ones((4, 128))),
        (wide.linear, mx.ones((4, 128))),  # its scales are of 16 bits
        (of_mode.linear, mx.ones((4, 128), mx.bfloat16)),
        (odd, mx.ones((4, 80), mx.bfloat16)),
    ):
        holder = nn.Module()
        holder.layer = layer
        expected = layer(x)
        flatten_linears(holder, ways)
        assert mx.allclose(layer(x), expected, rtol=1e-2)
    assert launch.count == 0


def test_weights_lie_row_by_row_before_the_kernel_reads_them() -> None:
    """A model that transposes its weights as it loads them has views of them."""
    layers, launch = of_16_bits(None), Started()
    for layer in (layers.linear, layers.embedding):
        layer.weight = mx.contiguous(layer.weight.T).T
    x = mx.random.normal((3, 128)).astype(mx.bfloat16)
    exact, seen = in_float32(layers), []

    def looking(spec: KernelSpec, inputs: list[mx.array], **how: Any) -> list[mx.array]:
        seen.append(memoryview(inputs[1].view(mx.uint16)).c_contiguous)  # type: ignore[arg-type]
        return launch(spec, inputs, **how)

    flatten_linears(layers, LinearWays(skinny=Skinny(looking)))
    assert close(layers.linear(x), exact.linear(x.astype(mx.float32)))
    assert close(layers.embedding.as_linear(x), exact.embedding.as_linear(x.astype(mx.float32)))
    assert seen == [True, True]


@pytest.mark.parametrize("bits", [None, 4])
def test_joined_linears_can_be_copied(bits) -> None:
    attention = quantized(Attention(), bits)
    x = mx.random.normal((3, 1, 64))
    flatten_linears(attention, LinearWays(join=True))
    copied = copy.deepcopy(attention)
    assert mx.array_equal(copied(x), attention(x))
    assert copied.q_proj._siblings is copied.v_proj._siblings is not attention.v_proj._siblings


@pytest.mark.parametrize("bits", [None, 4])
def test_joined_linears_of_few_rows_start_one_kernel_by_the_ways_given_last(bits) -> None:
    attention, launch = quantized(Wide(), bits), Started()
    x = mx.random.normal((3, 1, 128)).astype(mx.bfloat16)
    expected = in_float32(attention)(x.astype(mx.float32))
    flatten_linears(attention, LinearWays(join=True))
    mx.eval(attention(x))
    assert launch.count == 0
    flatten_linears(attention, LinearWays(join=True, skinny=Skinny(launch)))
    assert close(attention(x), expected) and launch.count == 1


class Wide(Attention):
    """Of 16 bits, with inputs wide enough for packed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(128, size, bias=False) for size in (96, 32, 32))
        self.set_dtype(mx.bfloat16)
