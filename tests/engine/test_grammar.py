"""Replies under a grammar: only allowed ids, also one step ahead, and one row's fault ends one row."""

from __future__ import annotations

import numpy as np
import pytest

from mlxpaged.engine.core import EngineCore
from mlxpaged.sched.requests import FinishReason

from ..model.families import tiny_model
from ..model.rig import Rig


class Digits:
    """Allows `count` digits (byte ids), then nothing more."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.seen: list[int] = []

    def fill(self, mask: np.ndarray) -> None:
        for token in range(48, 58):
            mask[token // 32] |= np.uint32(1 << (token % 32))

    def advance(self, token_id: int) -> bool:
        self.seen.append(token_id)
        self.left -= 1
        return self.left == 0


class Broken(Digits):
    def fill(self, mask: np.ndarray) -> None:
        raise RuntimeError("no such rule")


class Deaf(Digits):
    def advance(self, token_id: int) -> bool:
        raise RuntimeError("no such token")


class Stuck(Digits):
    def fill(self, mask: np.ndarray) -> None:
        """Nothing may follow."""


@pytest.fixture
def rig(monkeypatch, tmp_path) -> Rig:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    return Rig(*tiny_model("llama"))


@pytest.mark.parametrize("ahead", [0, 1])
def test_only_allowed_ids_come_and_the_end_is_the_grammars(rig, ahead) -> None:
    rig.core = EngineCore(rig.core.scheduler, rig.core.runner, ahead=ahead)
    grammars = [Digits(5), Digits(9)]
    for index, grammar in enumerate(grammars):
        rig.add(index, [1, 2, 3], 50, temperature=1.0, seed=index, grammar=grammar)
    rig.add(9, [1, 2, 3], 12)
    replies = rig.run()
    assert [len(replies[index]) for index in (0, 1)] == [5, 9]
    assert all(48 <= token < 58 for index in (0, 1) for token in replies[index])
    assert rig.ends[0] is FinishReason.STOP and len(replies[9]) == 12
    assert [grammar.seen for grammar in grammars] == [replies[0], replies[1]]


@pytest.mark.parametrize("kind", [Broken, Deaf, Stuck])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_grammar_that_raises_ends_its_row_alone(rig, kind, ahead) -> None:
    rig.core = EngineCore(rig.core.scheduler, rig.core.runner, ahead=ahead)
    rig.add(0, [1, 2, 3], 8, grammar=kind(3))
    rig.add(1, [1, 2, 3], 8, grammar=Digits(8))
    replies = rig.run()
    assert rig.ends[0] is FinishReason.ERROR and replies.get(0, []) == []
    assert len(replies[1]) == 8


def test_a_neighbour_without_grammar_gives_the_same_reply(rig) -> None:
    rig.add(0, [5, 6, 7], 10)
    alone = rig.run()[0]
    rig.add(1, [5, 6, 7], 10)
    rig.add(2, [5, 6, 7], 10, grammar=Digits(10))
    assert rig.run()[1] == alone
