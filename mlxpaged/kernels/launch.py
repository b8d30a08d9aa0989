"""What a kernel is and how one is started. Owns KernelSpec, the Launcher protocol and its two GPU launchers.

A kernel's text lies in metal/ and is read once. Every kernel that touches a pool takes a token and gives one: the
order of writes and reads is stated by data, since MLX believes that a kernel's inputs never change. Never decides which
kernel runs, and never allocates a pool.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..errors import LayoutError

SIMD_WIDTH = 32
"""Threads of a simdgroup; also metal/simd.h."""

SMALLEST_DEVICE_INPUT = 8
"""MLX passes an input of fewer elements in `constant` memory: another signature, so another compilation."""

LARGEST_POOL = 16 << 32
"""Bytes: kernels count a pool array's 16-byte words in 32 bits."""

Template = Sequence[tuple[str, Any]]
Extent = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel: its text and its arguments' names. `inplace` names the inputs that it writes, `strided` those that
    may have any strides. Where there are such, MLX makes no input contiguous: all others must be so by construction."""

    name: str
    source: str
    header: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    inplace: tuple[str, ...] = ()
    strided: tuple[str, ...] = ()


class Launcher(Protocol):
    """Starts a kernel: `template` are its compile-time names and values, `grid` counts threads in whole threadgroups,
    `shapes` and `dtypes` are the outputs'. Lazy, as all of MLX; raises LayoutError before anything is built."""

    def __call__(
        self,
        spec: KernelSpec,
        inputs: Sequence[mx.array],
        *,
        template: Template,
        grid: Extent,
        threadgroup: Extent,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]: ...


def metal_text(file_name: str) -> str:
    """A file of metal/ without its comments: MLX hashes the whole text at every call, and takes a thread attribute's
    name for a use of it even in a comment."""
    text = files("mlxpaged.metal").joinpath(file_name).read_text(encoding="utf-8")
    lines = (re.sub(r"\s*//.*", "", line) for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def kernel_spec(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    headers: Sequence[str] = (),
    inplace: Sequence[str] = (),
    strided: Sequence[str] = (),
) -> KernelSpec:
    """The kernel whose body is metal/<name>.metal, compiled behind `headers`, in that order."""
    header = "".join(map(metal_text, headers))
    names = (tuple(inputs), tuple(outputs), tuple(inplace), tuple(strided))
    return KernelSpec(name, metal_text(f"{name}.metal"), header, *names)


class _CompilingLauncher:
    """What the GPU launchers share: one compiled kernel object per spec."""

    def __init__(self) -> None:
        self._kernels: dict[KernelSpec, Callable[..., list[mx.array]]] = {}

    def __call__(
        self,
        spec: KernelSpec,
        inputs: Sequence[mx.array],
        *,
        template: Template,
        grid: Extent,
        threadgroup: Extent,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        self._check(spec, inputs)
        if spec not in self._kernels:
            self._kernels[spec] = self._compile(spec)
        return self._kernels[spec](
            inputs=inputs,
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=shapes,
            output_dtypes=dtypes,
        )

    def _check(self, spec: KernelSpec, inputs: Sequence[mx.array]) -> None:
        """Raises LayoutError when a pool's layout is wrong."""

    def _compile(self, spec: KernelSpec) -> Any:
        raise NotImplementedError


class MetalLauncher(_CompilingLauncher):
    """Starts kernels through mx.fast.metal_kernel."""

    def __init__(self) -> None:
        super().__init__()
        self._checked: dict[int, weakref.ref[mx.array]] = {}

    def _check(self, spec: KernelSpec, inputs: Sequence[mx.array]) -> None:
        # MLX would copy a pool of any other layout without a word, and the kernel would write into the copy.
        for name, array in zip(spec.input_names, inputs, strict=True):
            if name.endswith("_pool"):
                known = self._checked.get(id(array))
                if known is None or known() is not array:
                    require_row_contiguous(name, array)
                    self._checked[id(array)] = weakref.ref(array)

    def _compile(self, spec: KernelSpec) -> Any:
        names = (spec.input_names, spec.output_names)
        return mx.fast.metal_kernel(spec.name, *names, spec.source, spec.header, not spec.strided)


class CudaLauncher(_CompilingLauncher):
    """Starts the same text through mx.fast.cuda_kernel, behind metal/cuda.h. Pool layouts are taken on trust: looking
    at an array's strides would move it to the host."""

    def _compile(self, spec: KernelSpec) -> Any:
        header = metal_text("cuda.h") + spec.header
        names = (spec.input_names, spec.output_names)
        return mx.fast.cuda_kernel(spec.name, *names, spec.source, header, not spec.strided)


def require_row_contiguous(name: str, array: mx.array) -> None:
    """Raises LayoutError unless `array` (evaluated, in host-visible memory) lies row after row without gaps."""
    buffer: Any = array  # MLX's stubs do not know its buffer protocol
    if not memoryview(buffer).c_contiguous:
        raise LayoutError(f"{name} of shape {array.shape} is not row-contiguous; pools are never transposed or sliced")


def require_pools(key_pool: mx.array, value_pool: mx.array) -> None:
    """Raises LayoutError unless both are pools [num_blocks, block_size, num_kv_heads, width] of one dtype that differ
    in width only, the widths multiples of 8 up to 256."""
    keys, values = key_pool.shape, value_pool.shape
    if len(keys) != 4 or keys[:3] != values[:3] or key_pool.dtype != value_pool.dtype:
        raise LayoutError(
            f"pools are {keys} {key_pool.dtype} and {values} {value_pool.dtype}; "
            "both must be [num_blocks, block_size, num_kv_heads, width] of one dtype"
        )
    if any(width % 8 or not 8 <= width <= 256 for width in (keys[3], values[3])):
        raise LayoutError(f"K and V are {keys[3]} and {values[3]} wide; kernels take multiples of 8 up to 256")
    if max(key_pool.nbytes, value_pool.nbytes) >= LARGEST_POOL:
        raise LayoutError(f"pools of {key_pool.nbytes} and {value_pool.nbytes} bytes; kernels take {LARGEST_POOL}")


def require_metadata(name: str, array: mx.array, entries: int) -> None:
    """Raises LayoutError unless `array` is int32 and has at least `entries` (one or more) entries and 8 elements."""
    if entries < 1:
        raise LayoutError(f"{name} is for {entries} entries; a kernel starts for at least one")
    if array.dtype != mx.int32 or array.shape[0] < entries or array.size < SMALLEST_DEVICE_INPUT:
        raise LayoutError(
            f"{name} is {array.shape} {array.dtype}; it must be int32 with at least {entries} entries "
            f"and {SMALLEST_DEVICE_INPUT} elements (see padded)"
        )


def padded(values: np.ndarray) -> mx.array:
    """Host integers [n] or [n, m] as an int32 array of at least 8 elements; what is added is 0: the null block, an
    empty row, a skipped slot."""
    missing = SMALLEST_DEVICE_INPUT - values.size
    if missing > 0:
        width = values.shape[-1] if values.ndim > 1 else 1
        added = np.zeros((-(-missing // max(width, 1)), *values.shape[1:]), values.dtype)
        values = np.concatenate([values, added])
    return mx.array(values.astype(np.int32, copy=False))


def new_token() -> mx.array:
    """The first token of a chain: uint32 [8]."""
    return mx.zeros((8,), mx.uint32)


@cache
def floats(*values: float) -> mx.array:
    """Model constants for a kernel, float32, padded to 8 elements; one array per set of values."""
    return mx.array([*values, *[0.0] * (SMALLEST_DEVICE_INPUT - len(values))], mx.float32)
