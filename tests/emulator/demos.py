"""Four small kernels that use what the project's kernels use, each with its expected result in numpy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxpaged.kernels.launch import KernelSpec

N = 1000  # elements; no multiple of a simdgroup, and 4000 bytes are no multiple of a page
THREADS = 128

ADD = KernelSpec(
    "add",
    source="""
uint i = thread_position_in_grid.x;
if (i < uint(a_shape[0])) {
  out[i] = T(float(a[i]) + float(b[i]));
}
""",
    header="",
    input_names=("a", "b"),
    output_names=("out",),
)

# One threadgroup sums all of x through threadgroup memory.
REDUCE = KernelSpec(
    "reduce",
    source="""
threadgroup float shared[THREADS];
uint i = thread_index_in_threadgroup;
float sum = 0.0f;
for (uint j = i; j < uint(x_shape[0]); j += THREADS) {
  sum += float(x[j]);
}
shared[i] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint step = THREADS / 2; step > 0; step /= 2) {
  if (i < step) {
    shared[i] += shared[i + step];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
if (i == 0) {
  out[0] = shared[0];
}
""",
    header="constexpr constant uint THREADS = 128;\n",
    input_names=("x",),
    output_names=("out",),
)

# Each simdgroup takes 128 elements, 4 a lane by one vector load: their maximum, and their sum by shuffles.
SIMD = KernelSpec(
    "simd",
    source="""
uint group = thread_position_in_grid.x / 32;
float4 v = float4(((const device vec<T, 4>*)x)[thread_position_in_grid.x]);
float highest = simd_max(max(max(v.x, v.y), max(v.z, v.w)));
float sum = v.x + v.y + v.z + v.w;
for (uint offset = 16; offset > 0; offset /= 2) {
  sum += simd_shuffle_xor(sum, offset);
}
if (thread_index_in_simdgroup == 0) {
  out[2 * group] = highest;
  out[2 * group + 1] = sum;
}
""",
    header="",
    input_names=("x",),
    output_names=("out",),
)

# Writes rows of `values` into `pool`, which MLX passes as an input; a slot of 0 is skipped.
SCATTER = KernelSpec(
    "scatter",
    source="""
uint row = threadgroup_position_in_grid.x;
uint column = thread_index_in_threadgroup;
if (row == 0 && column < 8) {
  token[column] = 1u;
}
if (slots[row] > 0) {
  ((device T*)pool)[slots[row] * values_shape[1] + column] = values[row * values_shape[1] + column];
}
""",
    header="",
    input_names=("pool", "values", "slots"),
    output_names=("token",),
    inplace=("pool",),
)


@dataclass(frozen=True)
class Demo:
    """One call of a kernel: `inputs` may be written by it; `expected(*inputs)` gives the outputs in float64."""

    spec: KernelSpec
    inputs: list[mx.array]
    options: dict
    expected: Callable[..., list[np.ndarray]]


def demos(dtype: mx.Dtype) -> list[Demo]:
    """Every demo over random values of `dtype`, the same each time."""
    rng = np.random.default_rng(7)

    def values(*shape: int) -> mx.array:
        array = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
        mx.eval(array)
        return array

    def options(grid: int, threads: int, shape: tuple[int, ...], out: mx.Dtype, template: Sequence = ()) -> dict:
        extents = {"grid": (grid, 1, 1), "threadgroup": (threads, 1, 1)}
        return {"template": template, "shapes": [shape], "dtypes": [out], **extents}

    typed = [("T", dtype)]
    slots = mx.array([3, 0, 5, 1, 6, 0, 0, 2], mx.int32)
    return [
        Demo(ADD, [values(N), values(N)], options(1024, THREADS, (N,), dtype, typed), lambda a, b: [a + b]),
        Demo(REDUCE, [values(N)], options(THREADS, THREADS, (1,), mx.float32), lambda x: [x.sum(keepdims=True)]),
        Demo(SIMD, [values(1024)], options(256, 64, (16,), mx.float32, typed), _simd_expected),
        Demo(
            SCATTER,
            [values(8, 64), values(8, 64), slots],
            options(512, 64, (8,), mx.uint32, typed),
            lambda *_: [np.ones(8)],
        ),
    ]


def _simd_expected(x: np.ndarray) -> list[np.ndarray]:
    groups = x.reshape(-1, 128)
    return [np.stack([groups.max(axis=1), groups.sum(axis=1)], axis=1).reshape(-1)]


def float64(array: mx.array) -> np.ndarray:
    """The array's values on the host, exactly."""
    return np.array(array.astype(mx.float32)).astype(np.float64)
