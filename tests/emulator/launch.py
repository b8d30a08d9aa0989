"""Runs kernels on the emulator: the tests' `Launcher`, and a stand-in for `mx.fast.metal_kernel`.

Owns the passes that every launch makes and the judgement of their results. Knows Metal only through generate.py and
the machine only through machine.py.

A launch runs twice. First threads go forward, buffers end at a guard page and memory is poisoned with ones (NaN in
every float type); then threads go backward, buffers begin at a guard page and the poison is another. Results must be
equal, bit by bit: what differs depends on the order of threads (a missing barrier) or on memory nobody wrote.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import mlx.core as mx
import numpy as np

from mlxpaged.kernels.launch import Extent, KernelSpec

from .generate import SMALL_INPUT, Argument, Kernel, Template, generate
from .machine import BACKWARD, FORWARD, Buffer, Dispatch, KernelError, Pass, run_pass

MAX_THREADS = 1024  # of a threadgroup


@dataclass(frozen=True)
class EmulatorLauncher:
    """The tests' launcher: eager, so inputs are evaluated, the kernel runs at once, and its results are plain arrays.

    `passes=(FORWARD,)` halves the time; then only floating outputs are searched for elements nobody wrote.
    """

    passes: tuple[Pass, ...] = (FORWARD, BACKWARD)
    limit_s: float = 60.0  # processor time of one pass

    def __call__(
        self,
        spec: KernelSpec,
        inputs: Sequence[mx.array],
        *,
        template: Sequence[tuple[str, int | bool | mx.Dtype]],
        grid: Extent,
        threadgroup: Extent,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Results of `spec`; an input that `spec.inplace` names is written into the given array's own memory.

        Raises KernelError, and CompileError where the text itself is wrong; then no array has changed.
        """
        mx.eval(inputs)
        call = _Call(spec, list(inputs), tuple(template), tuple(shapes), tuple(dtypes))
        dispatch = Dispatch(grid, threadgroup, self.limit_s)
        try:
            call.check()
            _check_extents(dispatch)
            results = [call.run(dispatch, way) for way in self.passes]
            for name, dtype in zip(spec.output_names, dtypes, strict=True):
                if len(self.passes) > 1 or mx.issubdtype(dtype, mx.floating):
                    _check_written(name, dtype.size, [r[name] for r in results], self.passes)
            for name in results[0]:
                _check_agreement(name, call.items[name], [r[name] for r in results])
            outputs = call.outputs(results[0])
        except KernelError as error:
            raise KernelError(f"{spec.name}: {error}") from None
        for name in spec.inplace:
            call.memory[name][:] = results[0][name]
        return outputs


@dataclass(frozen=True)
class _Call:
    """One call of a kernel: evaluated inputs, and what the outputs shall be. Never writes an input."""

    spec: KernelSpec
    inputs: list[mx.array]
    template: Template
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]

    @cached_property
    def arrays(self) -> dict[str, mx.array]:
        return dict(zip(self.spec.input_names, self.inputs, strict=True))

    @cached_property
    def memory(self) -> dict[str, np.ndarray]:
        """Bytes of every input that lies row after row."""
        return {name: _memory(array) for name, array in self.arrays.items() if name not in self.spec.strided}

    @cached_property
    def items(self) -> dict[str, int]:
        """Bytes of an element, by argument."""
        outputs = dict(zip(self.spec.output_names, self.dtypes, strict=True))
        return {name: array.dtype.size for name, array in self.arrays.items()} | {n: d.size for n, d in outputs.items()}

    @cached_property
    def kernel(self) -> Kernel:
        return generate(self.spec, tuple((a.dtype, a.shape) for a in self.inputs), self.dtypes, self.template)

    def check(self) -> None:
        """Raises KernelError for what MLX would refuse, and for pools it would copy or hold in constant memory."""
        spec = self.spec
        names = {"inputs": spec.input_names, "shapes": spec.output_names, "dtypes": spec.output_names}
        for what, expected in names.items():
            if len(expected) != len(getattr(self, what)):
                raise KernelError(f"{len(expected)} {what} expected, {len(getattr(self, what))} given")
        if unknown := set(spec.inplace) - set(spec.input_names):
            raise KernelError(f"inplace names no input: {sorted(unknown)}")
        if unknown := set(spec.strided) - (set(spec.input_names) - set(spec.inplace)):
            raise KernelError(f"strided names no input that is only read: {sorted(unknown)}")
        for name in spec.input_names if spec.strided else ():
            if name in spec.strided and min(_view(self.arrays[name]).strides, default=0) < 0:
                raise KernelError(f"`{name}` has negative strides, which the emulator does not know")
            if name not in spec.strided and not _view(self.arrays[name]).flags.c_contiguous:
                raise KernelError(f"`{name}` is not row-contiguous, and MLX copies no input beside strided ones")
        for name in spec.inplace:
            if not _view(self.arrays[name]).flags.c_contiguous:
                raise KernelError(f"`{name}` is written in place but not row-contiguous: MLX would write a copy")
            if self.arrays[name].size < SMALL_INPUT:
                raise KernelError(f"`{name}` is written in place but too small for device memory")

    def run(self, dispatch: Dispatch, way: Pass) -> dict[str, np.ndarray]:
        """Bytes of everything the kernel may write, after one pass."""
        written = {name: self.memory[name].copy() for name in self.spec.inplace}
        for name, shape in zip(self.spec.output_names, self.shapes, strict=True):
            written[name] = np.full(prod(shape) * self.items[name], way.poison, np.uint8)
        strided = {name: _spread(_view(self.arrays[name]), way.poison) for name in self.spec.strided}
        data = self.memory | strided | written
        buffers = [
            Buffer(a.name, data[a.name], self.items[a.name], a.name in written)
            if a.part == "data"
            else _shape_buffer(a, self.arrays[a.name], a.name in self.spec.strided)
            for a in self.kernel.arguments
        ]
        run_pass(self.kernel, buffers, dispatch, way)
        return written

    def outputs(self, written: dict[str, np.ndarray]) -> list[mx.array]:
        """The outputs as arrays; raises KernelError where one holds a NaN that no input explains."""
        outputs = []
        for name, shape, dtype in zip(self.spec.output_names, self.shapes, self.dtypes, strict=True):
            data = written[name]
            output = mx.array(data).view(dtype).reshape(shape) if data.size else mx.zeros(shape, dtype)
            if (count := _num_nan(output)) and not any(map(_num_nan, self.inputs)):
                raise KernelError(f"{count} of {output.size} elements of `{name}` are NaN though no input is")
            outputs.append(output)
        return outputs


def _check_extents(dispatch: Dispatch) -> None:
    grid, threadgroup = dispatch.grid, dispatch.threadgroup
    if prod(threadgroup) > MAX_THREADS or min(threadgroup) < 1:
        raise KernelError(f"a threadgroup of {prod(threadgroup)} threads; 1 to {MAX_THREADS} are possible")
    if min(grid) < 1 or any(g % t for g, t in zip(grid, threadgroup, strict=True)):
        # Metal cuts the last threadgroups short, CUDA runs them whole.
        raise KernelError(f"grid {grid} is no multiple of threadgroup {threadgroup}")


def _view(array: mx.array) -> np.ndarray:
    """An evaluated array's own memory, writable; bfloat16, which numpy lacks, as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def _memory(array: mx.array) -> np.ndarray:
    """The bytes of an evaluated array, flat; a copy only of an array that is not row-contiguous."""
    return np.ascontiguousarray(_view(array)).reshape(-1).view(np.uint8)


def _spread(view: np.ndarray, poison: int) -> np.ndarray:
    """The bytes from a view's first element to its last, flat; poison where other views' elements lie between."""
    size = sum((extent - 1) * stride for extent, stride in zip(view.shape, view.strides, strict=True)) + view.itemsize
    data = np.full(size if view.size else 0, poison, np.uint8)
    np.ndarray(view.shape, view.dtype, data, strides=view.strides)[...] = view
    return data


def _shape_buffer(argument: Argument, array: mx.array, strided: bool) -> Buffer:
    """What MLX passes as `x_shape`, `x_strides` (in elements; of an input that is not `strided`, those of its
    row-contiguous copy) or `x_ndim`."""
    match argument.part:
        case "shape":
            values = np.array(array.shape, np.int32)
        case "strides" if strided:
            view = _view(array)
            values = np.array(view.strides, np.int64) // view.itemsize
        case "strides":
            values = np.array([prod(array.shape[axis + 1 :]) for axis in range(array.ndim)], np.int64)
        case _:
            values = np.array([array.ndim], np.int32)
    return Buffer(f"{argument.name}_{argument.part}", values.view(np.uint8), values.itemsize)


def _check_written(name: str, item: int, results: list[np.ndarray], passes: Sequence[Pass]) -> None:
    """Raises KernelError for elements that hold the poison of every pass."""
    untouched = np.ones(results[0].size // item, bool)
    for result, way in zip(results, passes, strict=True):
        untouched &= (result.reshape(-1, item) == way.poison).all(axis=1)
    if untouched.any():
        raise KernelError(
            f"{untouched.sum()} of {untouched.size} elements of `{name}` were never written or come from memory nobody "
            f"wrote, the first is {untouched.argmax()}"
        )


def _check_agreement(name: str, item: int, results: list[np.ndarray]) -> None:
    for other in results[1:]:
        differs = (results[0] != other).reshape(-1, item).any(axis=1)
        if differs.any():
            raise KernelError(
                f"{differs.sum()} of {differs.size} elements of `{name}`, the first is {differs.argmax()}, depend on "
                "the order of threads or on memory nobody wrote: is a barrier missing?"
            )


def _num_nan(array: mx.array) -> int:
    return int(np.isnan(np.array(array.astype(mx.float32))).sum()) if mx.issubdtype(array.dtype, mx.floating) else 0


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, str] | None = None,
    *,
    inplace: Sequence[str] = (),
    launcher: EmulatorLauncher | None = None,
) -> Callable[..., list[mx.array]]:
    """As `mx.fast.metal_kernel`, run on the emulator. `inplace` names inputs that the kernel writes.

    Raises ValueError for what the portable dialect leaves out: atomic outputs, initial values.
    """
    if atomic_outputs:
        raise ValueError("the emulator knows plain outputs only")
    strided = () if ensure_row_contiguous else tuple(name for name in input_names if name not in inplace)
    spec = KernelSpec(name, source, header, tuple(input_names), tuple(output_names), tuple(inplace), strided)
    run = launcher or EmulatorLauncher()

    def call(
        *,
        inputs: Sequence[mx.array | bool | int | float],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Extent,
        threadgroup: Extent,
        template: Sequence[tuple[str, int | bool | mx.Dtype]] = (),
        init_value: float | None = None,
        verbose: bool = False,
        stream: mx.Stream | mx.Device | None = None,
    ) -> list[mx.array]:
        if init_value is not None:
            raise ValueError("the emulator's outputs begin as poison; write every element instead of init_value")
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        return run(
            spec,
            arrays,
            template=template or (),
            grid=grid,
            threadgroup=threadgroup,
            shapes=output_shapes,
            dtypes=output_dtypes,
        )

    return call
