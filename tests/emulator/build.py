"""Compiles generated Metal text with clang into objects that the emulator's runtime can run, cached by content.

Owns the compiler's flags, the cache folder and the rule against casts between address spaces. Never runs a kernel.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from .generate import ATTRIBUTES, Kernel

HERE = Path(__file__).parent
OLDEST_CLANG = 19  # the oldest this was tried with
CACHE_VARIABLE = "MLXPAGED_EMULATOR_CACHE"

# Rules of the dialect that clang can tell: doubles do not exist, and nothing turns into a bfloat unasked.
RULES = ["double-promotion", "implicit-float-conversion", "uninitialized", "sometimes-uninitialized", "return-type"]
FLAGS = [
    *("-O2", "-g0", "-fPIC", "-shared", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti"),
    # float16 and bfloat16 round after every operation, as on the GPU; without these clang keeps float in between.
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
]
SANITIZE = "-fsanitize=array-bounds,shift,integer-divide-by-zero,float-cast-overflow"
# Locals that were never set hold NaN (floats) or 0xAA bytes.
KERNEL_FLAGS = [
    *(
        "-std=c++17",
        SANITIZE,
        "-ftrivial-auto-var-init=pattern",
        "-fstack-clash-protection",
        "-Wno-unknown-attributes",
        "-Wno-psabi",
    ),
    *(f"-Werror={rule}" for rule in RULES),
    "-Wno-implicit-int-float-conversion",
]


class CompileError(Exception):
    """The text is no Metal of the portable dialect; the message is the compiler's, with lines of the generated text."""


@cache
def find_clang() -> str | None:
    """Path of the newest usable clang++, or None."""
    names = [f"clang++-{version}" for version in range(24, OLDEST_CLANG - 1, -1)] + ["clang++"]
    for path in filter(None, map(shutil.which, names)):
        version = re.search(
            r"clang version (\d+)", subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        )
        if version and int(version[1]) >= OLDEST_CLANG:
            return path
    return None


def missing_tool() -> str | None:
    """What this machine lacks to run the emulator, in words for a skipped test; None when nothing."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return "the Metal emulator runs on Linux, x86-64 or aarch64"
    if find_clang() is None:
        return f"the Metal emulator needs clang++ {OLDEST_CLANG} or newer (apt install clang-19)"
    return None


def cache_dir() -> Path:
    """Where compiled objects lie: $MLXPAGED_EMULATOR_CACHE, else a private folder in the system's temporary one."""
    chosen = os.environ.get(CACHE_VARIABLE)
    folder = Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"mlxpaged-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():  # we load code from it
        raise PermissionError(f"{folder} belongs to another user; set {CACHE_VARIABLE} to a folder of your own")
    return folder


@cache
def load_runtime() -> ctypes.CDLL:
    """The runtime, with its symbols visible to the kernels loaded after it."""
    path = _compiled(["-std=c++20"], (HERE / "runtime.cpp").read_text())
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@cache
def load_kernel(kernel: Kernel) -> ctypes.CDLL:
    """The kernel with the entry `entry(void** buffers, const Thread&)`.

    Raises CompileError, also where the text casts a pointer from one address space to another.
    """
    load_runtime()
    # The explicit instantiation carries attributes where C++ allows none; the entry instantiates the same kernel.
    text = f'#include "metal.h"\n#line 1 "generated.metal"\n{kernel.definition}{_entry(kernel)}'
    return ctypes.CDLL(str(_compiled(KERNEL_FLAGS, text, check=_forbid_space_casts)))


def _entry(kernel: Kernel) -> str:
    values = [f"{a.value}buffers[{i}]" for i, a in enumerate(kernel.arguments)]
    for name in kernel.attributes:
        axes = f"(t.{name}[0], t.{name}[1], t.{name}[2])" if ATTRIBUTES[name] == "uint3" else f"(t.{name})"
        values.append(ATTRIBUTES[name] + axes)
    return f'extern "C" void entry(void** buffers, const Thread& t) {{\n  {kernel.symbol}({", ".join(values)});\n}}\n'


def _compiled(flags: list[str], text: str, check: Callable[[str], None] | None = None) -> Path:
    """Path of the object compiled from `text`, found by the hash of compiler, flags, headers and text."""
    compiler = find_clang()
    if compiler is None:
        raise CompileError(missing_tool())
    flags = FLAGS + (["-mf16c"] if platform.machine() == "x86_64" else []) + flags
    headers = [path.read_text() for path in sorted(HERE.glob("*.h"))]
    key = hashlib.sha256("\0".join([_version(compiler), *flags, *headers, text]).encode()).hexdigest()
    flags = [*flags, f"-I{HERE}"]
    target = cache_dir() / f"{key[:40]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / "built.so"
            _clang([compiler, *flags, "-x", "c++", "-", "-o", str(built), "-lm"], text)
            if check:
                check(_clang([compiler, *flags, "-x", "c++", "-", "-fsyntax-only", "-Xclang", "-ast-dump"], text))
            built.rename(target)  # whole or not at all, also with several test processes
    return target


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


def _clang(command: list[str], text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr)
    return done.stdout


def _forbid_space_casts(tree: str) -> None:
    """C++ lets a C-style cast change the address space, Metal does not. The entry's own casts come from plain void*."""
    body = tree.split(" entry 'void (void **, const Thread &)'")[0]
    for line in body.splitlines():
        if "<AddressSpaceConversion>" in line:
            raise CompileError("a cast from one address space to another: " + line.strip(" |`-"))
