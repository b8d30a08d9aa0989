"""The start-up test of skinny_matmul: a right kernel passes, a wrong or broken one is named."""

from __future__ import annotations

import pytest

from mlxpaged.kernels.launch import KernelSpec, Launcher
from mlxpaged.kernels.products import ProductKind, why_not_skinny
from tests.emulator import FORWARD, EmulatorLauncher

from .test_selftest import Patched

KINDS = [ProductKind("bfloat16"), ProductKind("float16", 4, 32), ProductKind("bfloat16", 8, 64)]


def test_a_right_kernel_passes_in_both_orders_of_threads(launch: Launcher) -> None:
    assert why_not_skinny(launch, KINDS) is None


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("base += STRIDE", "base += 2 * STRIDE"),
        ("min(first + 8 * i + row", "min(first + row"),
        ("held[s][i] = ahead[s][i];", ""),
        ("word.w & 0xffff0000u", "word.z & 0xffff0000u"),
        ("2 * pair + e, row / 2", "2 * pair, row / 2"),
    ],
)
def test_a_wrong_kernel_is_named_with_what_it_did(right: str, wrong: str) -> None:
    def fault(text: str) -> str:
        return text.replace(right, wrong)

    why = why_not_skinny(Patched("skinny_matmul", fault), [ProductKind("bfloat16"), ProductKind("bfloat16", 8)])
    assert why is not None and why.startswith("skinny_matmul "), why
    assert "error" in why or "failed" in why


def test_a_kernel_that_does_not_compile_is_a_line_and_no_exception() -> None:
    def launch(spec: KernelSpec, *_: object, **__: object) -> list[object]:
        raise RuntimeError(f"cannot compile {spec.name}\nwith a page of notes")

    why = why_not_skinny(launch, KINDS)
    assert why == "skinny_matmul failed on 2 rows of bfloat16 dense: RuntimeError: cannot compile skinny_matmul"


def test_no_kinds_need_no_test() -> None:
    assert why_not_skinny(EmulatorLauncher(passes=(FORWARD,)), []) is None
