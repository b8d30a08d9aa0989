"""skinny_matmul at start-up: a right kernel passes, a wrong or broken one is named, and the faster way wins."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlxpaged.kernels.launch import KernelSpec, Launcher
from mlxpaged.kernels.products import (
    ROWS,
    Product,
    ProductChoice,
    ProductKind,
    ProductTime,
    by_mlx,
    by_skinny,
    product_chain,
    remembered_choice,
    time_products,
    why_not_skinny,
)
from tests.emulator import FORWARD, EmulatorLauncher, require_tools

from .test_selftest import Patched

BELOW_NOTHING = (
    '{"times": [{"rows": 8, "outputs": 48, "width": 64, "bits": 0, "group_size": 0, "skinny_s": -1, "mlx_s": 1}]}'
)
KINDS = [ProductKind("bfloat16"), ProductKind("float16", 4, 32), ProductKind("bfloat16", 8, 64)]
DENSE, PACKED = Product(ProductKind("bfloat16"), 48, 64), Product(ProductKind("bfloat16", 4), 64, 128)


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
    case = "2 rows of bfloat16 dense, 1 tiles"
    assert why == f"skinny_matmul failed on {case}: RuntimeError: cannot compile skinny_matmul"


def test_no_kinds_need_no_test() -> None:
    assert why_not_skinny(EmulatorLauncher(passes=(FORWARD,)), []) is None


def weights() -> dict[Product, list[list[mx.array]]]:
    mx.random.seed(0)
    whole = [mx.random.normal((48, 64)).astype(mx.bfloat16) for _ in range(2)]
    packed = mx.quantize(mx.random.normal((64, 128)).astype(mx.bfloat16), group_size=64, bits=4)
    return {DENSE: [[one] for one in whole], PACKED: [list(packed)]}


def at_once(run: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """The emulator cannot be compiled."""
    return run


def ticking(seconds: Callable[[], float]) -> Callable[[], float]:
    """A clock that goes on by so much at each look."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += seconds()
        return now

    return clock


def test_every_product_is_timed_at_every_number_of_rows_the_largest_first() -> None:
    require_tools()
    choice = time_products(
        EmulatorLauncher(passes=(FORWARD,)), weights(), clock=ticking(lambda: 0.001), compiled=at_once
    )
    assert [(time.rows, time.outputs, time.width, time.bits, time.group_size) for time in choice.times] == [
        *((rows, 48, 64, 0, 0) for rows in ROWS),
        *((rows, 64, 128, 4, 64) for rows in ROWS),
    ]
    calls = [2, 2, 2, 1, 1, 1]  # two layers are of the first kind, so that a call takes half a tick
    assert [round(time.skinny_s, 6) for time in choice.times] == [0.001 / count for count in calls]
    assert choice.wins == 0, "a tie is MLX's"


@pytest.mark.parametrize("product", [DENSE, PACKED])
def test_both_ways_are_the_same_product_and_a_chain_of_them_is_replayed(product: Product) -> None:
    require_tools()
    (weight, *_), calls = weights()[product], list[int]()
    rows = mx.random.normal((3, product.width)).astype(mx.bfloat16)
    by_launch, by_stock = by_skinny(EmulatorLauncher(passes=(FORWARD,)), product.kind), by_mlx(product.kind)
    expected = by_stock(rows, *weight)
    assert mx.abs(by_launch(rows, *weight) - expected).max() <= 0.05 * mx.abs(expected).max()

    def counted(rows: mx.array, *weight: mx.array) -> mx.array:
        calls.append(len(rows))
        return by_stock(rows, *weight)

    run = product_chain(counted, product, 5, [weight, weight])
    run()
    run()
    assert calls == [5, 5], "traced once, replayed afterwards"


def test_timing_ends_with_its_budget_and_the_first_size_is_always_timed() -> None:
    require_tools()
    choice = time_products(
        EmulatorLauncher(passes=(FORWARD,)), weights(), budget_s=0, clock=ticking(lambda: 1.0), compiled=at_once
    )
    assert len(choice.times) == 1


def test_the_faster_way_wins_for_as_many_rows_as_one_compilation_serves() -> None:
    few, more, most = (8, 48, 64, 0, 0), (16, 48, 64, 0, 0), (32, 48, 64, 4, 32)
    choice = ProductChoice((ProductTime(*few, 1.0, 2.0), ProductTime(*more, 2.0, 1.0), ProductTime(*most, 1.0, 2.0)))
    assert choice.wins == 2
    assert all(choice.faster(rows, 48, 64, 0, 0) for rows in range(2, 9))
    assert not any(choice.faster(rows, 48, 64, 0, 0) for rows in range(9, 33))
    assert [choice.faster(rows, 48, 64, 4, 32) for rows in (16, 17, 32)] == [False, True, True]
    assert not choice.faster(8, 48, 128, 0, 0) and not choice.faster(32, 48, 64, 4, 64), "they were not timed"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"times": 3}', '{"times": [{"rows": 8}]}', BELOW_NOTHING])
def test_times_are_remembered_until_they_cannot_be_read(damage: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    numbers = itertools.count(1)

    def find() -> ProductChoice:
        return ProductChoice((ProductTime(8, 48, 64, 0, 0, float(next(numbers)), 9.0),))

    launch = EmulatorLauncher(passes=(FORWARD,))
    first = remembered_choice(launch, "X", weights(), find)
    assert first == remembered_choice(launch, "X", weights(), find)
    assert remembered_choice(launch, "Y", weights(), find) != first
    (path, _) = sorted((tmp_path / "kernels").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    path.write_text(damage)
    assert remembered_choice(launch, "X", weights(), find) not in (None, first)


def test_what_was_not_found_out_is_not_remembered(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    launch = EmulatorLauncher(passes=(FORWARD,))
    assert remembered_choice(launch, "X", weights(), lambda: None) is None
    assert remembered_choice(launch, "X", weights(), ProductChoice) == ProductChoice()
