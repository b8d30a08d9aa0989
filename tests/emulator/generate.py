"""The Metal text that MLX 0.32 would hand to Apple's compiler for one `mx.fast.metal_kernel` call.

Owns the rules by which MLX turns a kernel body and its arguments into a signature; a test holds the result against
what MLX itself prints, byte for byte. Never compiles and never runs anything.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from mlxpaged.kernels.launch import KernelSpec

SMALL_INPUT = 8  # inputs with fewer elements live in Metal's `constant` address space

TYPES = {
    mx.bool_: "bool", mx.uint8: "uint8_t", mx.uint16: "uint16_t", mx.uint32: "uint32_t", mx.uint64: "uint64_t",
    mx.int8: "int8_t", mx.int16: "int16_t", mx.int32: "int32_t", mx.int64: "int64_t", mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t", mx.float32: "float", mx.float64: "double", mx.complex64: "complex64_t",
}  # fmt: skip

# In the order in which MLX looks for them; a name is used when it occurs anywhere in the body, also in a comment.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint", "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3", "grid_origin": "uint3", "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint", "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint", "simdgroups_per_threadgroup": "uint", "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint", "thread_index_in_simdgroup": "uint", "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3", "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3", "threadgroups_per_grid": "uint3", "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint", "threads_per_threadgroup": "uint3",
}  # fmt: skip

Template = tuple[tuple[str, int | bool | mx.Dtype], ...]
Input = tuple[mx.Dtype, tuple[int, ...]]  # dtype and shape


@dataclass(frozen=True)
class Argument:
    """One buffer of the signature: the data, shape, strides or ndim (`part`) of the input or output `name`."""

    name: str
    part: str
    type: str  # as declared, e.g. "const device float*"

    @property
    def declaration(self) -> str:
        return f"{self.type} {self.name}" + ("" if self.part == "data" else f"_{self.part}")

    @property
    def value(self) -> str:
        """A cast to this type, to be applied to a plain pointer: `*(const constant int*)` for a reference."""
        return f"*({self.type[:-1]}*)" if self.type.endswith("&") else f"({self.type})"


@dataclass(frozen=True)
class Kernel:
    """A generated kernel: `text` is what MLX prints, `symbol` the C++ name of the instance it asks for."""

    symbol: str
    definition: str
    instantiation: str
    arguments: tuple[Argument, ...]
    attributes: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.definition + self.instantiation


@cache
def generate(
    spec: KernelSpec,
    inputs: tuple[Input, ...],
    outputs: tuple[mx.Dtype, ...],
    template: Template = (),
) -> Kernel:
    """Metal text for inputs of these (dtype, shape), outputs of these dtypes and these template values."""
    values = "<" + ", ".join(_template_value(value) for _, value in template) + ">" if template else ""
    name = f"custom_kernel_{spec.name}"
    if template:
        name += "_" + values.replace(", ", "_").translate(str.maketrans("<>-", "___"))[:-1]
    for dtype, shape in inputs:
        name += f"_{TYPES[dtype]}" + ("s" if not shape else "c" if _is_small(shape) else "")
    name += "".join(f"_{TYPES[dtype]}" for dtype in outputs)

    arguments = [*_input_arguments(spec, inputs)]
    arguments += [Argument(n, "data", f"device {TYPES[t]}*") for n, t in zip(spec.output_names, outputs, strict=True)]
    attributes = tuple(a for a in ATTRIBUTES if a in spec.source)
    lines = [f"  {a.declaration} [[buffer({i})]]" for i, a in enumerate(arguments)]
    lines += [f"  {ATTRIBUTES[a]} {a} [[{a}]]" for a in attributes]
    parameters = ", ".join(f"{_template_kind(value)} {n}" for n, value in template)
    definition = spec.header + (f"template <{parameters}>\n" if template else "")
    definition += f"[[kernel]] void {name}(\n" + ",\n".join(lines) + f") {{\n{spec.source}\n}}\n"
    symbol = name + values
    instance = f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({symbol}) {symbol};\n' if template else ""
    return Kernel(symbol, definition, instance, tuple(arguments), attributes)


def _input_arguments(spec: KernelSpec, inputs: Iterable[Input]) -> Iterable[Argument]:
    for name, (dtype, shape) in zip(spec.input_names, inputs, strict=True):
        space = "constant" if _is_small(shape) else "device"
        yield Argument(name, "data", f"const {space} {TYPES[dtype]}" + ("*" if shape else "&"))
        if shape:  # a 0-d input has none of these, even where the body names them
            for part, type_ in (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&")):
                if f"{name}_{part}" in spec.source:
                    yield Argument(name, part, f"const constant {type_}")


def _is_small(shape: tuple[int, ...]) -> bool:
    count = 1
    for extent in shape:
        count *= extent
    return count < SMALL_INPUT


def _template_kind(value: int | bool | mx.Dtype) -> str:
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "typename"


def _template_value(value: int | bool | mx.Dtype) -> str:
    return str(int(value)) if isinstance(value, int) else TYPES[value]
