"""Which cell of the pool's picture belongs to whom."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mlxpaged.engine.events import BlockRun, EngineStats, Progress, RowStats
from mlxpaged.tui.pool import counts_of, owners_of, picture_of
from mlxpaged.tui.state import Phase, Talk


def row(request_id: int, blocks: int, prompt: int = 10, done: int = 0) -> RowStats:
    return RowStats(request_id, "decode", prompt, prompt, done, 0, blocks, 1.0)


def test_counts_become_cells_in_one_order() -> None:
    stats = EngineStats(
        rows=(row(1, 3), row(2, 2)), blocks_total=10, blocks_used=5, blocks_shared=1, blocks_cached=2, blocks_free=3
    )
    assert picture_of(stats, 100).cells == (1, 1, 2, 2, "shared", "cached", "cached", "free", "free", "free")


def test_every_block_is_itself_where_the_engine_tells_its_owner() -> None:
    runs = ((BlockRun("free", 2), BlockRun(7, 1), BlockRun("cached", 1)), (BlockRun("shared", 2),))
    picture = picture_of(EngineStats(blocks_total=6, block_runs=runs), 100)
    assert picture.cells == ("free", "free", 7, "cached", "shared", "shared")
    assert picture.per_cell == 1


def test_what_is_counted_is_what_is_drawn_and_a_shared_block_counts_once() -> None:
    runs = ((BlockRun("shared", 1), BlockRun(1, 8), BlockRun(2, 4)), (BlockRun(1, 2), BlockRun("free", 5)))
    stats = EngineStats(rows=(row(1, 11), row(2, 5)), blocks_total=20, blocks_shared=1, blocks_free=5, block_runs=runs)
    assert counts_of(stats) == {"shared": 1, 1: 10, 2: 4, "free": 5}
    assert counts_of(stats) == Counter(picture_of(stats, 100).cells)


def test_a_large_pool_shares_cells_and_a_reply_goes_over_what_is_free() -> None:
    runs = ((BlockRun("free", 2), BlockRun(7, 1), BlockRun("free", 5), BlockRun("cached", 1)),)
    picture = picture_of(EngineStats(blocks_total=9, block_runs=runs), 3)
    assert picture.per_cell == 3
    assert picture.cells == (7, "free", "free")


def test_no_pool_has_no_picture() -> None:
    assert picture_of(EngineStats(), 50).cells == ()


@given(
    st.lists(st.integers(0, 40), max_size=8),
    st.integers(0, 30),
    st.integers(0, 50),
    st.integers(0, 50),
)
def test_counts_add_up_whatever_the_rows_share(blocks: list[int], alone: int, cached: int, free: int) -> None:
    rows = tuple(row(number, count) for number, count in enumerate(blocks))
    alone = alone if any(blocks) else 0
    stats = EngineStats(
        rows=rows, blocks_total=alone + 3 + cached + free, blocks_used=alone + 3, blocks_shared=3, blocks_cached=cached
    )
    cells = Counter(picture_of(stats, 10_000).cells)
    assert counts_of(stats) == cells
    assert (cells["shared"], cells["cached"], cells["free"]) == (3, cached, free)
    assert sum(cells.values()) == stats.blocks_total


def test_a_row_is_told_by_its_prompt_and_how_far_it_is() -> None:
    near = Talk("a", phase=Phase.WRITING, progress=Progress(10, 10, 0), num_tokens=50)
    far = Talk("b", phase=Phase.WRITING, progress=Progress(10, 10, 0), num_tokens=5)
    quiet = Talk("c", phase=Phase.IDLE)
    rows = (row(1, 1, prompt=10, done=6), row(2, 1, prompt=10, done=49), row(3, 1, prompt=11, done=5))
    assert owners_of(rows, [near, far, quiet]) == {2: "a", 1: "b"}


def test_a_row_whose_prompt_was_never_told_of_is_what_the_others_leave() -> None:
    whole = Talk("a", phase=Phase.WRITING, num_tokens=5)
    told = Talk("b", phase=Phase.WRITING, progress=Progress(10, 10, 0), num_tokens=5)
    waits = Talk("c", phase=Phase.WAITING)
    rows = (row(1, 1, prompt=10, done=5), row(2, 1, prompt=40, done=90), row(3, 1, prompt=20, done=6))
    assert owners_of(rows, [whole, told, waits]) == {1: "b", 3: "a"}
