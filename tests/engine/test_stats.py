"""What a face sees of the pool: every block has one owner, and the counts and the map agree."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np

from mlxpaged.engine.replies import Replies
from mlxpaged.engine.stats import snapshot
from mlxpaged.sched.requests import Request, SamplingParams

from ..model.families import tiny_model
from ..model.rig import Rig


def counts_of(stats) -> Counter:
    counts: Counter = Counter()
    for runs in stats.block_runs:
        for run in runs:
            counts[run.owner] += run.count
    return counts


def test_each_block_of_the_map_is_counted_once_under_its_owner(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    rig = Rig(*tiny_model("llama"), num_blocks=41)
    shared = list(range(50))
    rig.add(1, shared, 40)
    rig.step()
    rig.add(2, [*shared, 3, 2, 1], 40)
    for _ in range(4):
        rig.step()
    stats = snapshot(rig.core, None, Replies(), 0.0)
    counts = counts_of(stats)
    assert sum(counts.values()) == stats.blocks_total == 40
    assert counts["shared"] == stats.blocks_shared == 3
    assert counts["free"] == stats.blocks_free and counts["cached"] == stats.blocks_cached
    assert counts[1] + counts[2] == stats.blocks_used - stats.blocks_shared > 0
    assert [(row.request_id, row.num_blocks, row.state) for row in stats.rows] == [(1, 4, "decode"), (2, 4, "decode")]
    owners = [run.owner for run in stats.block_runs[0]]
    assert all(one != other for one, other in pairwise(owners))
    rig.run()
    counts = counts_of(snapshot(rig.core, None, Replies(), 0.0))
    assert set(counts) == {"cached", "free"} and counts["cached"] >= 8


def test_a_windowed_model_has_a_map_for_each_group(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    rig = Rig(*tiny_model("gpt_oss"), num_blocks=30)
    rig.add(7, list(range(60)), 60)
    for _ in range(30):
        rig.step()
    stats = snapshot(rig.core, None, Replies(), 0.0)
    full, windowed = stats.block_runs
    assert sum(run.count for run in full) == sum(run.count for run in windowed) == 29
    held = [sum(run.count for run in runs if run.owner == 7) for runs in (full, windowed)]
    assert held[0] > held[1] > 0


def test_a_queued_row_says_how_many_go_before_it(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    rig = Rig(*tiny_model("llama"), num_blocks=41, max_rows=1)
    for request_id in (1, 2, 3):
        rig.add(request_id, list(range(10 * request_id)), 40)
    rig.step()
    rows = snapshot(rig.core, None, Replies(), 0.0).rows
    assert [(row.request_id, row.state, row.queue_position) for row in rows] == [
        (1, "decode", None),
        (2, "queued", 0),
        (3, "queued", 1),
    ]


def test_a_rows_rate_counts_from_its_first_token() -> None:
    replies = Replies()

    class Silent:
        end_token_ids = frozenset()

        def detokenizer(self, *_):
            return self

    replies.open(Request(1, np.array([1], np.int32), SamplingParams()), Silent(), lambda delta: None)
    (reply,) = replies.live()
    reply.tokens, reply.first_token = 11, 100.0
    from mlxpaged.engine.stats import _rate

    assert _rate(reply, 102.0) == 5.0 and _rate(None, 1.0) == 0.0
