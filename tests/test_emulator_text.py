"""The emulator compiles the very text that MLX would hand to Apple's compiler."""

import re
from dataclasses import dataclass

import mlx.core as mx
import pytest

from mlxpaged.kernels.launch import KernelSpec
from tests.emulator import generate

BODY = """
uint i = thread_position_in_grid.x; // simdgroup_index_in_threadgroup counts, though it stands in a comment
out[i] = T(x[i]) + T(x_shape[0] + x_strides[1] + x_ndim);
"""


@dataclass(frozen=True)
class Case:
    """Inputs as (dtype, shape), outputs as dtypes."""

    name: str
    source: str
    inputs: dict
    outputs: dict
    template: tuple = ()
    header: str = ""


MANY = {"x": (mx.uint8, (2, 4)), "y": (mx.uint16, (3, 3)), "z": (mx.int16, (9,))}
VALUES = (("T", mx.float16), ("N", -3), ("B", True), ("C", False))
FLOAT = (("T", mx.float32),)
CASES = [
    Case("plain", "out[0] = x[0];", {"x": (mx.bool_, (8, 8))}, {"out": mx.bool_}),
    Case("typed", BODY, {"x": (mx.float32, (4, 4))}, {"out": mx.bfloat16}, (("T", mx.bfloat16),)),
    Case("values", BODY, {"x": (mx.float16, (64, 1))}, {"out": mx.float16}, VALUES),
    Case("small", BODY, {"x": (mx.uint32, (7,)), "y": (mx.int64, (8,))}, {"out": mx.int8}, (("T", mx.int8),)),
    Case("scalar", BODY, {"x": (mx.float32, ()), "y": (mx.int32, (0,))}, {"out": mx.float32}, FLOAT),
    Case(
        "many", BODY + "x_shape2 threads_per_grid", MANY, {"out": mx.float32, "token": mx.uint32}, FLOAT, "// first\n"
    ),
    Case("wide", "y_ndim y_strides", {"x": (mx.uint64, (9,)), "y": (mx.complex64, (3, 3))}, {"out": mx.complex64}),
]


def printed_by_mlx(case: Case, folder, capfd) -> str:
    kernel = mx.fast.metal_kernel(case.name, list(case.inputs), list(case.outputs), case.source, case.header)

    def call(*inputs):
        extents = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(8,)] * len(case.outputs)}
        return kernel(
            inputs=list(inputs),
            template=list(case.template),
            output_dtypes=list(case.outputs.values()),
            verbose=True,
            **extents,
        )

    capfd.readouterr()
    mx.export_function(
        str(folder / "function.mlxfn"), call, *(mx.zeros(shape, dtype) for dtype, shape in case.inputs.values())
    )
    found = re.fullmatch(r"Generated source code for `\w+`:\n```\n(.*)\n```\n", capfd.readouterr().out, re.DOTALL)
    assert found, "MLX printed no kernel text while exporting"
    return found[1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_text_equals_what_mlx_prints_byte_for_byte(case, tmp_path, capfd):
    spec = KernelSpec(case.name, case.source, case.header, tuple(case.inputs), tuple(case.outputs))
    kernel = generate(spec, tuple(case.inputs.values()), tuple(case.outputs.values()), case.template)
    assert kernel.text == printed_by_mlx(case, tmp_path, capfd)
