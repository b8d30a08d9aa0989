"""One pass of one kernel over plain memory: the Python side of runtime.cpp. Knows nothing of arrays or of results."""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .build import load_kernel, load_runtime
from .generate import Kernel

MAX_BUFFERS = 31
MAX_THREADGROUP_BYTES = 32768
_runtime_lock = threading.Lock()  # the runtime keeps its state in globals


class KernelError(Exception):
    """The kernel broke a rule of Metal or of the portable dialect; the message names kernel, buffer and place."""


@dataclass(frozen=True)
class Buffer:
    """One argument: its bytes (uint8, flat), which change where `writable`, and the size of an element."""

    name: str
    data: np.ndarray
    item_bytes: int
    writable: bool = False


@dataclass(frozen=True)
class Pass:
    """One way to run a launch: the order of threads, where buffers meet their guard page, the byte of unset memory."""

    reverse: bool
    at_start: bool
    poison: int


FORWARD = Pass(reverse=False, at_start=False, poison=0xFF)
BACKWARD = Pass(reverse=True, at_start=True, poison=0xA5)


@dataclass(frozen=True)
class Dispatch:
    """Threads of the grid and of a threadgroup, and the processor time the launch may take."""

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    limit_s: float


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("item_bytes", ctypes.c_uint64),
        ("writable", ctypes.c_int32),
    )


class _Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("threadgroup_memory", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("num_buffers", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("reverse", ctypes.c_int32),
        ("at_start", ctypes.c_int32),
        ("poison", ctypes.c_int32),
        ("limit_s", ctypes.c_double),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_uint64),
    )


def run_pass(kernel: Kernel, buffers: Sequence[Buffer], dispatch: Dispatch, way: Pass) -> None:
    """Run all of the grid once. Raises KernelError with the runtime's words; then no buffer has changed."""
    if len(buffers) > MAX_BUFFERS:
        raise KernelError(f"{len(buffers)} buffers; Metal has {MAX_BUFFERS}")
    code = load_kernel(kernel)
    code.threadgroup_memory.restype = _Range
    shared = code.threadgroup_memory()
    if (used := (shared.end or 0) - (shared.begin or 0)) > MAX_THREADGROUP_BYTES:
        raise KernelError(f"{used} bytes of threadgroup memory; Metal has {MAX_THREADGROUP_BYTES}")
    described = [_Buffer(b.name.encode(), b.data.ctypes.data, b.data.nbytes, b.item_bytes, b.writable) for b in buffers]
    message = ctypes.create_string_buffer(512)
    launch = _Launch(
        ctypes.cast(code.entry, ctypes.c_void_p),
        ctypes.cast(code.threadgroup_memory, ctypes.c_void_p),
        (_Buffer * len(buffers))(*described),
        len(buffers),
        dispatch.grid,
        dispatch.threadgroup,
        way.reverse,
        way.at_start,
        way.poison,
        dispatch.limit_s,
        ctypes.cast(message, ctypes.c_char_p),
        len(message),
    )
    with _runtime_lock:
        failed = load_runtime().emulator_run(ctypes.byref(launch))
    if failed:
        raise KernelError(message.value.decode())
