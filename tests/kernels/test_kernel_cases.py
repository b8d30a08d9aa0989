"""The kernels against their float64 references: all moves of K and V, the base variants, a fifth of the paired cases.

scripts/check_kernels.py runs the whole grid, on a GPU too.
"""

from __future__ import annotations

import itertools

import pytest

from mlxpaged.kernels.launch import Launcher
from tests.kernels.cases import (
    PAIRED,
    Case,
    OrderCase,
    all_cases,
    base_cases,
    move_cases,
    paired_cases,
    rope_cases,
    skinny_cases,
)

CASES: list[Case] = [
    OrderCase(layers=2, steps=4),
    *move_cases(),
    *rope_cases(),
    *skinny_cases(),
    *base_cases(),
    *list(paired_cases())[::5],
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_equals_its_reference(case: Case, launch: Launcher) -> None:
    assert case.run(launch) <= case.tolerance


def test_every_pair_of_values_meets_in_some_case() -> None:
    met = set()
    for case in paired_cases():
        values = [(name, getattr(case, name)) for name in PAIRED]
        met |= set(itertools.combinations(values, 2))
    for (a, left), (b, right) in itertools.combinations(PAIRED.items(), 2):
        for pair in itertools.product(left, right):
            assert ((a, pair[0]), (b, pair[1])) in met


def test_the_whole_grid_stays_affordable_and_its_names_are_unique() -> None:
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names))
    assert len(names) <= 300
