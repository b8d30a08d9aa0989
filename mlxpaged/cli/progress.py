"""What takes a while before the first token. Owns the latest word on a load and its bar on stderr; quiet where
stderr is no terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from .terminal import is_plain

if TYPE_CHECKING:
    from ..model.sources import Progress

Result = TypeVar("Result")

REDRAW_S = 0.1


class LoadProgress:
    """The latest progress of one load: called with it on any thread, read by whoever draws."""

    def __init__(self) -> None:
        self.latest: Progress | None = None
        self.done = False
        """Set by whoever waits for the load, once there is nothing more to say."""

    def __call__(self, progress: Progress) -> None:
        self.latest = progress

    def in_words(self) -> str:
        """One short phrase: what is being done and how far it is; empty once that is done."""
        latest = self.latest
        if self.done:
            return ""
        if latest is None:
            return "loading"
        if not latest.total_bytes:
            return latest.label
        share = min(1.0, latest.done_bytes / latest.total_bytes)
        return f"{latest.label}: {share:.0%} of {latest.total_bytes / 1e6:,.0f} MB"


def wait_with_bar(loading: Future[Result], progress: LoadProgress) -> Result:
    """The result of `loading`, with a bar on stderr until it is there; raises what it raised."""
    with drawn(progress) as redraw:
        while not wait([loading], timeout=REDRAW_S).done:
            redraw()
    return loading.result()


@contextmanager
def drawn(progress: LoadProgress) -> Iterator[Callable[[], None]]:
    """Gives a function that brings the bar up to date, to be called every REDRAW_S; the bar is gone afterwards."""
    if is_plain(sys.stderr, dict(os.environ)):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("loading", total=None)
        label = "loading"

        def redraw() -> None:
            nonlocal label
            if not (latest := progress.latest):
                return
            if latest.label != label:  # a new stage: its speed and remaining time start afresh
                label = latest.label
                bars.reset(task, description=label)
            bars.update(task, completed=latest.done_bytes, total=latest.total_bytes or None)

        yield redraw
