"""Negative controls: every way to break Metal's rules that the emulator promises to notice is noticed, by name."""

import platform
import re
from dataclasses import replace

import mlx.core as mx
import pytest

from mlxpaged.kernels.launch import KernelSpec
from tests.emulator import BACKWARD, FORWARD, CompileError, EmulatorLauncher, KernelError, require_tools
from tests.emulator.demos import REDUCE, SCATTER

pytestmark = pytest.mark.needs_tool
ONE_THREAD = {"template": (), "grid": (1, 1, 1), "threadgroup": (1, 1, 1), "shapes": [(1,)], "dtypes": [mx.float32]}
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@pytest.fixture(autouse=True, scope="module")
def tools():
    require_tools()


def launch(
    source: str,
    *,
    x=None,
    threads: int = 64,
    groups: int = 1,
    shape=None,
    dtype=mx.float32,
    template=(),
    header="",
    launcher=None,
):
    """Runs `source`, which sees i, the input x (64 floats) and out (one element per thread)."""
    spec = KernelSpec("faulty", "uint i = thread_position_in_grid.x;\n" + source, header, ("x",), ("out",))
    x = mx.arange(64).astype(mx.float32) if x is None else x
    extents = {"grid": (threads * groups, 1, 1), "threadgroup": (threads, 1, 1)}
    shapes = [(threads * groups,) if shape is None else shape]
    return (launcher or EmulatorLauncher())(spec, [x], template=template, shapes=shapes, dtypes=[dtype], **extents)


def refuses(message: str, source: str, error=KernelError, **options) -> None:
    with pytest.raises(error, match=message):
        launch(source, **options)


# ---- memory ----


def test_a_read_one_past_the_end_names_kernel_buffer_element_and_thread():
    place = r"in threadgroup \(0, 0, 0\) by thread \(63, 0, 0\)"
    refuses(rf"faulty: a read outside `x` at byte 256 \(element 64 of 64\), {place}", "out[i] = x[i + 1];")


def test_a_read_one_before_the_start_is_seen_though_buffers_share_no_page():
    refuses(r"a read outside `x` at byte -4 \(element -1 of 64\)", "out[i] = x[int(i) - 1];")


def test_a_read_far_outside_is_seen():
    refuses(r"a read outside `x` at byte 4000000 ", "out[i] = x[i + 1000000];")
    refuses(r"a read outside `x` at byte 17179869180 \(element 4294967295 of 64\)", "out[i] = x[i - 1u];")


def test_a_read_one_past_the_end_is_seen_in_a_buffer_of_odd_size():
    refuses(r"a read outside `x` at byte 37 ", "out[i] = float(x[i]);", x=mx.zeros((37,), mx.uint8))


def test_a_write_past_the_end_of_an_output_is_seen():
    refuses("a write outside `out` at byte 252 ", "out[i] = x[i];", shape=(63,))


def test_a_read_of_the_shape_past_its_rank_is_seen():
    refuses("a read outside `x_shape` at byte 4 ", "out[i] = float(x_shape[1]);")


def test_a_write_to_an_input_that_is_not_named_inplace_is_seen():
    refuses(r"a write to the read-only `x` at byte 0 \(element 0\)", "((device float*)x)[i] = 1.0f; out[i] = 0.0f;")


def test_a_write_past_a_buffer_whose_vectors_need_alignment_is_seen_in_its_margin():
    # 148 bytes end 12 before the page does, once a vector access has asked for a start at a multiple of 16.
    x = mx.zeros((37,), mx.float32)
    source = "((device float4*)x)[0] = float4(1.0f); ((device float*)x)[37] = 1.0f; out[0] = 1.0f;"
    spec = KernelSpec("margin", source, "", ("x",), ("out",), ("x",))
    with pytest.raises(KernelError, match="margin: a write past the last element of `x`"):
        EmulatorLauncher()(spec, [x], **ONE_THREAD)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors load vectors from anywhere")
def test_a_misaligned_vector_load_is_seen():
    source = "((device float4*)(x + 1))[0] = ((const device float4*)x)[2]; out[0] = 1.0f;"
    spec = KernelSpec("askew", source, "", ("x",), ("out",), ("x",))
    with pytest.raises(KernelError, match="askew: a vector access at an address that is no multiple of 16"):
        EmulatorLauncher()(spec, [mx.zeros((64,))], **ONE_THREAD)


def test_an_index_past_a_threadgroup_or_private_array_is_seen():
    refuses("line 6: index 64 is outside the array", "threadgroup float s[64]; s[i + 1] = x[i]; out[i] = s[i];")
    refuses("line 6: index 8 is outside the array", "float p[8]; p[0] = x[0]; out[i] = p[i];")


def test_memory_nobody_wrote_is_never_silently_zero():
    refuses("64 of 64 elements of `out` .* come from memory nobody wrote", "threadgroup float s[64]; out[i] = s[i];")
    refuses(
        "64 of 64 elements of `out`, .*, depend on .* memory nobody wrote",
        "threadgroup int s[64]; out[i] = float(s[i]);",
    )
    refuses("56 of 64 elements of `out` are NaN though no input is", "float p[8]; p[0] = x[i]; out[i] = p[i % 8];")


def test_an_output_element_nobody_wrote_is_counted_and_located():
    refuses(
        "2 of 64 elements of `out` were never written or come from memory nobody wrote, the first is 62",
        "if (i < 62) { out[i] = x[i]; }",
    )
    refuses(
        "1 of 64 elements of `out` were never written or come from memory nobody wrote, the first is 5",
        "if (i != 5) { out[i] = -1; }",
        dtype=mx.int8,
    )


def test_an_output_that_holds_the_poison_by_right_is_accepted():
    assert launch("out[i] = i % 2 ? -1 : char(0xA5);", dtype=mx.int8)[0].tolist() == [-91, -1] * 32


def test_a_nan_from_clean_inputs_is_reported_and_one_from_a_nan_is_not():
    refuses("1 of 64 elements of `out` are NaN though no input is", "out[i] = x[i] / x[i];")
    launch("out[i] = x[i];", x=mx.full((64,), float("nan")))


def test_a_full_stack_is_seen():
    source = "float big[80000]; for (uint j = 0; j < 80000; j++) { big[j] = x[j % 64]; }\nout[i] = big[uint(x[i])];"
    refuses("the thread's stack of 262144 bytes is full", source)


# ---- order ----


@pytest.mark.parametrize("removed", [0, 1])
def test_a_removed_barrier_is_seen(removed):
    parts = REDUCE.source.split(BARRIER)
    assert len(parts) == 3
    source = BARRIER.join(parts[: removed + 1]) + BARRIER.join(["", *parts[removed + 1 :]]).removeprefix(BARRIER)
    spec = KernelSpec("hasty", source, REDUCE.header, REDUCE.input_names, REDUCE.output_names)
    options = {"grid": (128, 1, 1), "threadgroup": (128, 1, 1), "shapes": [(1,)], "dtypes": [mx.float32]}
    with pytest.raises(
        KernelError, match=r"hasty: .* depend on the order of threads .*: is a barrier missing?|`out` are NaN"
    ):
        EmulatorLauncher()(spec, [mx.arange(500).astype(mx.float32)], template=(), **options)


def test_a_removed_simdgroup_barrier_is_seen():
    body = "threadgroup float s[64]; s[i] = x[i]; {} out[i] = s[i ^ 1];"
    assert launch(body.replace("{}", "simdgroup_barrier(mem_flags::mem_threadgroup);"))[0].tolist()[:4] == [1, 0, 3, 2]
    refuses("is a barrier missing|NaN", body.replace("{}", ""))


def test_threadgroups_that_write_one_element_differently_are_seen():
    refuses(
        "depend on the order of threads",
        "out[0] = float(threadgroup_position_in_grid.x) + 0.0f * x[0];",
        groups=2,
        shape=(1,),
    )


def test_a_barrier_in_a_branch_is_seen():
    message = "line 7: threadgroup_barrier while 32 threads wait at the one in line 6"
    refuses(message, f"if (i < 32) {{ {BARRIER} }}\nelse {{ {BARRIER} }}\nout[i] = x[i];")


def test_an_early_return_before_a_barrier_is_seen():
    refuses(
        "threadgroup_barrier after 32 threads of the threadgroup have returned|returned while",
        f"out[i] = x[i]; if (i < 32) return;\n{BARRIER}",
    )


def test_a_loop_with_uneven_barriers_is_seen():
    refuses("returned", f"for (uint j = 0; j <= i / 32; j++) {{ {BARRIER} }} out[i] = x[i];")


def test_a_simdgroup_function_called_by_half_a_simdgroup_is_seen():
    refuses("simd_sum", "float s = 0.0f; if (i % 32 < 16) { s = simd_sum(x[i]); }\nout[i] = s;")


def test_two_simdgroup_functions_in_two_branches_are_seen():
    refuses(
        "line 6: simd_(sum|max) while 16 of the simdgroup wait in simd_(max|sum), line 6",
        "float s; if (i % 32 < 16) { s = simd_sum(x[i]); } else { s = simd_max(x[i]); } out[i] = s;",
    )


def test_lane_groups_that_leave_a_shuffling_loop_at_different_times_are_seen():
    source = "float s = x[i]; for (uint j = i % 32 / 8; j < 6; j += 4) { s += simd_shuffle_xor(s, 4); }\nout[i] = s;"
    refuses("simd_shuffle_xor", source)


def test_a_barrier_of_some_lanes_while_others_shuffle_is_seen():
    refuses(
        "threadgroup_barrier",
        f"float s = x[i]; if (i % 32 < 16) {{ {BARRIER} }} else {{ s = simd_sum(s); }} out[i] = s;",
    )


def test_a_shuffle_distance_that_differs_between_lanes_is_seen():
    refuses(
        "line 6: simd_shuffle_xor with [01] by one lane and [01] by another", "out[i] = simd_shuffle_xor(x[i], i % 2);"
    )


def test_the_value_of_a_lane_that_does_not_exist_is_nan():
    refuses("4 of 32 elements of `out` are NaN", "out[i] = simd_shuffle_down(x[i], 4);", threads=32)


def test_an_endless_loop_ends_at_the_time_limit():
    source = "float s = 1.0f; while (s > 0.0f) { s = fast::exp2(s * x[i] * 0.0f); }\nout[i] = s;"
    refuses("not finished after 0.2 s of processor time", source, launcher=EmulatorLauncher(limit_s=0.2))


def test_arithmetic_that_metal_leaves_undefined_is_seen():
    refuses("line 6: integer division by zero", "out[i] = float(7 / int(x[i]));")
    refuses("line 6: shift by more than the type's width", "out[i] = float(1u << (i + 1));")
    refuses("line 6: a float that the integer type cannot hold", "out[i] = float(int(x[i] * 1e9f));")


def test_the_process_survives_and_the_next_launch_is_right():
    for _ in range(50):
        refuses("a read outside `x`", "out[i] = x[i + 1];")
    assert launch("out[i] = x[i];")[0].tolist() == list(range(64))


# ---- types ----

SUM2 = "template <typename P> float sum2(const device P* p) { return p[0] + p[1]; }\n"


def test_an_input_in_constant_memory_is_not_passed_as_device_memory():
    launch("out[i] = sum2(x);", header=SUM2)
    refuses("no matching function for call to 'sum2'", "out[i] = sum2(x);", CompileError, header=SUM2, x=mx.zeros((4,)))


@pytest.mark.parametrize(
    "source",
    [
        "threadgroup float s[64]; device float* p = s; out[i] = p[0];",
        "const float* p = x; out[i] = p[0];",
        "const constant float* p = x; out[i] = p[0];",
        "out[i] = ((const constant float*)x)[0];",
        "out[i] = ((const float*)x)[0];",
        "out[i] = reinterpret_cast<const constant float*>(x)[0];",
        "out[i] = (*(const constant float4*)x).x;",
    ],
)
def test_address_spaces_do_not_mix(source):
    refuses("(constant|device|address space)", source, CompileError)
    typed = re.sub(r"\bfloat\b", "T", source)  # the same, seen only where the template is instantiated
    refuses("(constant|device|address space)", typed, CompileError, template=[("T", mx.float32)])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("out[i] = x[i] * 0.1;", "implicit conversion increases floating-point precision: .* to 'double'"),
        (
            "bfloat y = x[i]; out[i] = float(y);",
            "implicit conversion loses floating-point precision: .* to '(__bf16|bfloat)'",
        ),
        ("out[i] = max(x[i], 0);", "no matching function for call to 'max'"),
        (
            "float4 v = float4(x[0], x[1]); out[i] = v.x;",
            "a vector is made of one value, or of one scalar per component",
        ),
        ("float y; out[i] = y;", "variable 'y' is uninitialized"),
        ("out[i] = missing(x[i]);", "undeclared identifier 'missing'"),
    ],
)
def test_text_outside_the_dialect_does_not_compile(source, message):
    refuses(message, source, CompileError)


# ---- calls ----


def test_calls_that_mlx_or_cuda_would_treat_differently_are_refused():
    spec = KernelSpec("call", "out[thread_position_in_grid.x] = x[0];", "", ("x",), ("out",))
    good = {"template": (), "grid": (64, 1, 1), "threadgroup": (64, 1, 1), "shapes": [(64,)], "dtypes": [mx.float32]}
    bad = {
        r"grid (64, 1, 1) is no multiple of threadgroup (48, 1, 1)": {"threadgroup": (48, 1, 1)},
        "a threadgroup of 2048 threads; 1 to 1024 are possible": {"grid": (2048, 1, 1), "threadgroup": (2048, 1, 1)},
        "1 shapes expected, 2 given": {"shapes": [(64,), (64,)]},
    }
    for message, change in bad.items():
        with pytest.raises(KernelError, match=re.escape(message)):
            EmulatorLauncher()(spec, [mx.zeros((64,))], **good | change)


def test_more_threadgroup_memory_than_metal_has_is_refused():
    refuses(
        "32772 bytes of threadgroup memory; Metal has 32768", "threadgroup float s[8193]; s[i] = x[i]; out[i] = s[i];"
    )


def test_a_pool_that_mlx_would_copy_is_refused():
    values, slots = mx.zeros((8, 64)), mx.zeros((8,), mx.int32)
    options = {
        "grid": (512, 1, 1),
        "threadgroup": (64, 1, 1),
        "shapes": [(8,)],
        "dtypes": [mx.uint32],
        "template": [("T", mx.float32)],
    }
    with pytest.raises(KernelError, match="scatter: `pool` is written in place but not row-contiguous"):
        EmulatorLauncher()(SCATTER, [mx.zeros((64, 8)).T, values, slots], **options)


GATHER_STRIDED = KernelSpec(
    "strided",
    """
uint i = thread_position_in_grid.x;
out[i] = float(x[(i / 8) * x_strides[0] + (i % 8) * x_strides[1]]) + y[i];
""",
    "",
    ("x", "y"),
    ("out",),
    strided=("x",),
)
STRIDED = {
    "grid": (64, 1, 1),
    "threadgroup": (64, 1, 1),
    "shapes": [(8, 8)],
    "dtypes": [mx.float32],
    "template": (),
}


def strided(x, source=GATHER_STRIDED.source, y=None, passes=(FORWARD, BACKWARD)):
    y = mx.zeros((64,)) if y is None else y
    spec = replace(GATHER_STRIDED, source=source)
    return EmulatorLauncher(passes)(spec, [x, y], **STRIDED)[0]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_strided_input_comes_as_it_lies(dtype):
    whole = mx.arange(240).reshape(10, 24).astype(dtype)
    for view in (whole[1:9, 8:16], whole.T[3:11, 1:9], mx.broadcast_to(whole[2, 4:12], (8, 8)), whole[:8, ::3]):
        assert mx.array_equal(strided(view), view.astype(mx.float32))


def test_strides_that_are_ignored_and_elements_beside_a_view_are_noticed():
    view = mx.arange(240.0).reshape(10, 24)[1:9, 8:16]
    with pytest.raises(KernelError, match=r"40 of 64 elements of `out` .* come from memory nobody wrote"):
        strided(view, "uint i = thread_position_in_grid.x; out[i] = x[i] + y[i];")
    with pytest.raises(KernelError, match=r"outside `x` at byte 704 .element 176 of 176"):
        strided(view, GATHER_STRIDED.source.replace("% 8)", "% 8 + 1)"), passes=(FORWARD,))


def test_mlx_copies_no_input_of_a_kernel_with_strided_ones():
    view = mx.zeros((8, 24))[:, :8]
    with pytest.raises(KernelError, match="`y` is not row-contiguous, and MLX copies no input beside"):
        strided(view, y=mx.zeros((8, 16))[:, :8])
    with pytest.raises(KernelError, match="`x` has negative strides"):
        strided(mx.zeros((8, 8))[::-1])


def test_one_pass_still_sees_an_unwritten_float():
    refuses(
        "1 of 64 elements of `out` were never written ",
        "if (i != 9) { out[i] = x[i]; }",
        launcher=EmulatorLauncher(passes=(FORWARD,)),
    )
