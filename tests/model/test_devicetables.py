"""Block tables that stay on the device: whatever changes, a step sees the tables as the host has them."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.model.devicetables import DeviceTables, with_changes


def seen(device: DeviceTables, tables: list[np.ndarray], most: int = 8) -> list[mx.array]:
    """The tables as a step would see them, lazily, kept for the next one."""
    changes, before = device.changes(tables, most)
    after = [with_changes(table, *map(mx.array, change)) for table, change in zip(before, changes, strict=True)]
    device.keep(tables, after)
    return after


def equal(device: list[mx.array], host: list[np.ndarray]) -> bool:
    return all(np.array_equal(np.array(a), b) for a, b in zip(device, host, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_steps_in_flight_each_see_the_tables_of_their_own_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = [np.zeros((4, 16), np.int32), np.zeros((4, 8), np.int32)]
    device, flying = DeviceTables(), []
    for _ in range(40):
        tables = [table.copy() for table in tables]
        for table in tables:
            places = rng.integers(0, table.size, rng.choice([0, 1, 3, 8, 30]))
            table.reshape(-1)[places] = rng.integers(0, 1000, len(places))
        if rng.random() < 0.1:
            tables = [np.tile(tables[0], (1, 2)), tables[1]] if tables[0].shape[1] < 64 else tables
        flying.append((seen(device, tables), tables))
        if rng.random() < 0.3:
            assert all(equal(*pair) for pair in flying)
            flying.clear()
    assert all(equal(*pair) for pair in flying)


def test_few_changes_are_sent_and_many_send_the_whole_table() -> None:
    device, table = DeviceTables(), np.arange(64, dtype=np.int32).reshape(4, 16)
    first = seen(device, [table])
    few = table.copy()
    few[1, 3], few[0, 0] = 500, 600
    changes, before = device.changes([few], 8)
    assert before[0] is first[0]
    assert changes[0].tolist() == [[0, 19, *[0] * 6], [600, 500, *[600] * 6]]
    many = few + 1
    changes, before = device.changes([many], 8)
    assert before[0] is not first[0] and np.array_equal(np.array(before[0]), many)
    assert changes[0].tolist() == [[0] * 8, [many[0, 0]] * 8]


def test_a_step_that_was_not_built_changes_nothing() -> None:
    device, table = DeviceTables(), np.zeros((2, 8), np.int32)
    seen(device, [table])
    device.changes([table + np.eye(2, 8, dtype=np.int32)], 8)  # and then the step fails
    assert equal(seen(device, [table]), [table])


def test_after_a_reset_nothing_of_before_is_read() -> None:
    device, table = DeviceTables(), np.ones((2, 8), np.int32)
    seen(device, [table])
    device.reset()
    changes, before = device.changes([table], 8)
    assert equal(before, [table]) and len(changes) == 1


def test_a_long_run_of_evaluated_steps_holds_no_chain_of_lazy_updates(tmp_path: Path) -> None:
    device, table, step = DeviceTables(), np.zeros((2, 8), np.int32), mx.compile(lambda *given: [with_changes(*given)])
    for turn in range(5):
        table = table.copy()
        table[1, turn] = turn + 1
        (change,), (before,) = device.changes([table], 8)
        after = step(before, *map(mx.array, change))
        mx.eval(after[0].sum())  # as what reads the tables is, never they themselves
        device.keep([table], after)
        mx.export_to_dot(str(tmp_path / "graph.dot"), after[0])
        assert "Scatter" not in (tmp_path / "graph.dot").read_text()
    assert equal(after, [table])
