"""The emulator computes what Metal would: demo kernels against numpy, rounding, lanes, in-place writes."""

import importlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.kernels.launch import KernelSpec
from tests.emulator import FORWARD, EmulatorLauncher, KernelError, build, generate, metal_kernel, require_tools
from tests.emulator.demos import SCATTER, Demo, demos, float64

pytestmark = pytest.mark.needs_tool
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
TOLERANCE = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
CHECKER = os.environ.get("MSL_CHECKER", "")  # folder of an independent checker of Metal text, where there is one


@pytest.fixture(autouse=True, scope="module")
def tools():
    require_tools()


def each_demo(test):
    cases = [
        pytest.param(demo, dtype, id=f"{demo.spec.name}-{dtype}".replace("mlx.core.", ""))
        for dtype in DTYPES
        for demo in demos(dtype)
    ]
    return pytest.mark.parametrize(("demo", "dtype"), cases)(test)


def one_group(source: str, x: mx.array, threads: int = 32) -> mx.array:
    """float32 [threads]: what `source` writes to out[i] by thread i of one threadgroup, with input x."""
    kernel = metal_kernel("one_group", ["x"], ["out"], "uint i = thread_position_in_grid.x;" + source)
    extents = {"grid": (threads, 1, 1), "threadgroup": (threads, 1, 1)}
    return kernel(inputs=[x], output_shapes=[(threads,)], output_dtypes=[mx.float32], **extents)[0]


@each_demo
def test_a_demo_kernel_agrees_with_numpy(demo: Demo, dtype):
    expected = demo.expected(*map(float64, demo.inputs))
    for got, want in zip(EmulatorLauncher()(demo.spec, demo.inputs, **demo.options), expected, strict=True):
        assert np.abs(float64(got) - want).max() <= TOLERANCE[dtype] * np.abs(want).max()


if CHECKER and Path(CHECKER).is_dir():

    @each_demo
    def test_a_demo_kernel_gives_the_same_bits_in_an_independent_checker(demo: Demo, dtype, monkeypatch):
        monkeypatch.setattr(sys, "path", [CHECKER, *sys.path])
        checker = importlib.import_module("msl_emulator")
        spec, options = demo.spec, dict(demo.options)
        theirs = checker.metal_kernel(
            spec.name, spec.input_names, spec.output_names, spec.source, spec.header, inplace=spec.inplace
        )
        ours = EmulatorLauncher()(spec, [mx.array(a) for a in demo.inputs], **demo.options)
        shapes, dtypes = options.pop("shapes"), options.pop("dtypes")
        for mine, other in zip(
            ours, theirs(inputs=demo.inputs, output_shapes=shapes, output_dtypes=dtypes, **options), strict=True
        ):
            assert mx.array_equal(mine, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_write_in_place_reaches_the_callers_own_array(dtype):
    pool = mx.zeros((8, 64), dtype)
    values = mx.array(np.arange(512).reshape(8, 64) % 251).astype(dtype)
    mx.eval(pool)
    address = np.array(pool.view(mx.uint16) if dtype == mx.bfloat16 else pool, copy=False).ctypes.data
    slots = mx.array([3, 0, 5, 1, 6, 0, 0, 2], mx.int32)
    options = {"grid": (512, 1, 1), "threadgroup": (64, 1, 1), "shapes": [(8,)], "dtypes": [mx.uint32]}
    EmulatorLauncher()(SCATTER, [pool, values, slots], template=[("T", dtype)], **options)
    want = np.zeros((8, 64))
    want[[3, 5, 1, 6, 2]] = float64(values)[[0, 2, 3, 4, 7]]
    assert np.array_equal(float64(pool), want)
    assert np.array(pool.view(mx.uint16) if dtype == mx.bfloat16 else pool, copy=False).ctypes.data == address
    assert np.array_equal(float64(pool + 1), want + 1)  # and what MLX computes from it sees the write


def test_a_failed_launch_leaves_the_pool_as_it_was():
    pool = mx.zeros((8, 64))
    slots = mx.array([1, 2, 3, 4, 5, 6, 7, 8], mx.int32)  # the last is one row too far
    options = {"grid": (512, 1, 1), "threadgroup": (64, 1, 1), "shapes": [(8,)], "dtypes": [mx.uint32]}
    with pytest.raises(KernelError, match="a write outside `pool` at byte 2048"):
        EmulatorLauncher()(SCATTER, [pool, mx.ones((8, 64)), slots], template=[("T", mx.float32)], **options)
    assert not pool.any()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_every_conversion_and_operation_rounds_to_nearest_even_as_in_mlx(dtype):
    bits = np.random.default_rng(3).integers(0, 2**32, 200_000, dtype=np.uint32)
    floats = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        x = mx.array(np.where(np.isnan(floats), np.float32(1), floats))
    source = """
uint i = thread_position_in_grid.x;
T a = T(x[i]), b = T(x[i] * 0.3f);
out[i] = a;
product[i] = a * b;
sum[i] = a + b * a;
"""
    kernel = metal_kernel(
        "rounding", ["x"], ["out", "product", "sum"], source, launcher=EmulatorLauncher(passes=(FORWARD,))
    )
    finite = mx.where(mx.abs(x) < 1e4, x, mx.array(1.0))  # no overflow, no NaN
    got = kernel(inputs=[finite], template=[("T", dtype)], grid=(200_000, 1, 1), threadgroup=(250, 1, 1),
                 output_shapes=[x.shape] * 3, output_dtypes=[dtype] * 3)  # fmt: skip
    a, b = finite.astype(dtype), (finite * 0.3).astype(dtype)
    for ours, mlx in zip(got, (a, a * b, a + b * a), strict=True):
        assert mx.array_equal(ours, mlx)


def test_lanes_exchange_values_as_metal_says():
    x = mx.arange(32).astype(mx.float32)
    lanes = np.arange(32)
    cases = {
        "simd_sum(x[i])": np.full(32, 496),
        "simd_min(x[i] + 2.0f)": np.full(32, 2),
        "simd_broadcast(x[i], 5)": np.full(32, 5),
        "simd_shuffle(x[i], 31 - i)": 31 - lanes,
        "simd_shuffle_xor(x[i], 3)": lanes ^ 3,
        "float(simd_any(i == 7)) + 2.0f * float(simd_all(i < 32))": np.full(32, 3),
    }
    for expression, want in cases.items():
        assert np.array_equal(np.array(one_group(f"out[i] = {expression};", x)), want), expression
    down = one_group("float y = simd_shuffle_down(x[i], 4); out[i] = i < 28 ? y : 0.0f;", x)
    assert np.array_equal(np.array(down), np.where(lanes < 28, lanes + 4, 0))


def test_the_last_simdgroup_of_a_threadgroup_may_be_smaller():
    got = one_group("out[i] = simd_sum(x[i]);", mx.ones((48,)), threads=48)
    assert np.array_equal(np.array(got), [32] * 32 + [16] * 16)


def test_every_thread_knows_its_place_in_three_dimensions():
    source = """
uint3 p = thread_position_in_grid, g = threadgroup_position_in_grid, t = thread_position_in_threadgroup;
uint3 n = threads_per_grid, s = threads_per_threadgroup, m = threadgroups_per_grid;
uint at = (p.z * n.y + p.y) * n.x + p.x;
bool ok = p.x == g.x * s.x + t.x && p.y == g.y * s.y + t.y && p.z == g.z * s.z + t.z && m.x * s.x == n.x && m.z == 3;
ok = ok && thread_index_in_threadgroup == (t.z * s.y + t.y) * s.x + t.x;
uint first = simdgroup_index_in_threadgroup * threads_per_simdgroup;
ok = ok && first + thread_index_in_simdgroup == thread_index_in_threadgroup;
out[at] = ok ? at : 0u;
"""
    kernel = metal_kernel("places", ["x"], ["out"], source)
    got = kernel(
        inputs=[mx.zeros((8,))],
        grid=(8, 4, 6),
        threadgroup=(4, 2, 2),
        output_shapes=[(192,)],
        output_dtypes=[mx.uint32],
    )
    assert got[0].tolist() == list(range(192))


@pytest.mark.parametrize(
    ("dtype", "vector", "step"), [(mx.float16, "half4", 4), (mx.float32, "float4", 4), (mx.float32, "float2", 2)]
)
def test_a_vector_load_may_start_at_any_multiple_of_its_size_whatever_the_buffers_length(dtype, vector, step):
    x = mx.arange(37).astype(dtype)  # the end of the buffer and its vectors cannot both be aligned
    got = one_group(f"{vector} v = ((const device {vector}*)x)[i]; out[i] = float(v.x) + float(v.y);", x, threads=9)
    assert got.tolist() == [2 * step * i + 1 for i in range(9)]


def test_a_python_number_is_a_scalar_input_as_in_mlx():
    kernel = metal_kernel("scalar", ["x"], ["out"], "out[0] = x;")
    (got,) = kernel(
        inputs=[2.5], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.float32]
    )
    assert got.tolist() == [2.5]


def test_launches_work_from_any_thread_and_survive_a_fault_there():
    copy = metal_kernel(
        "copy", ["x"], ["out"], "uint i = thread_position_in_grid.x; out[i] = x[int(i) + x_shape[0] - 64];"
    )
    extents = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)], "output_dtypes": [mx.float32]}

    def work(n: int) -> list[float] | str:
        try:
            return copy(inputs=[mx.arange(n).astype(mx.float32)], **extents)[0].tolist()
        except KernelError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, [64, 60, 100, 63] * 5))
    for i, result in enumerate(results):
        if i % 2:
            assert "a read outside `x` at byte -" in result
        else:
            assert result == [float(x) for x in range(36 * (i % 4 // 2), 36 * (i % 4 // 2) + 64)]


def test_a_kernel_is_compiled_once_and_found_again_by_its_content(tmp_path, monkeypatch):
    spec = KernelSpec("cached", "out[0] = x[0];", "", ("x",), ("out",))
    kernel = generate(spec, ((mx.float32, (8,)),), (mx.float32,))
    build.load_runtime()
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "objects"))
    build.load_kernel.__wrapped__(kernel)
    (first,) = (tmp_path / "objects").iterdir()
    monkeypatch.setattr(build, "_clang", None)  # any compilation now would fail
    build.load_kernel.__wrapped__(kernel)
    assert [first] == list((tmp_path / "objects").iterdir())


def test_a_missing_compiler_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(build, "find_clang", build.find_clang.__wrapped__)
    assert build.missing_tool() == "the Metal emulator needs clang++ 19 or newer (apt install clang-19)"
