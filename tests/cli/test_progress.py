"""What is said while a model loads."""

from __future__ import annotations

import io
import sys
from concurrent.futures import Future

import pytest

from mlxpaged.cli.progress import LoadProgress, wait_with_bar
from mlxpaged.errors import MlxpagedError
from mlxpaged.model.sources import Progress


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (None, "loading"),
        (Progress("smollm2", 46_000_000, 92_000_000), "smollm2: 50% of 92 MB"),
        (Progress("smollm2", 92_000_000, 92_000_000), "loading"),
        (Progress("waiting for another process", 0, None), "waiting for another process"),
    ],
)
def test_a_load_in_words(progress: Progress | None, words: str) -> None:
    load = LoadProgress()
    if progress:
        load(progress)
    assert load.in_words() == words
    load.done = True
    assert load.in_words() == ""


def test_an_abandoned_load_is_ended_by_its_next_word() -> None:
    load = LoadProgress()
    load.abandoned = True
    with pytest.raises(MlxpagedError, match="abandoned"):
        load(Progress("smollm2", 1, 2))


def test_without_a_terminal_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    future: Future[str] = Future()
    future.set_result("here")
    assert wait_with_bar(future, LoadProgress()) == "here"
    assert sys.stderr.getvalue() == ""
