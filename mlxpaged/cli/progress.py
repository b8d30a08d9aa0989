"""What takes a while before the first token. Owns the latest word on a load and its bar on stderr; quiet where
stderr is no terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from ..errors import MlxpagedError
from .exits import complain
from .terminal import is_plain

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ..model.sources import Progress

Result = TypeVar("Result")

REDRAW_S = 0.1


class LoadProgress:
    """The latest progress of one load: called with it on any thread, read by whoever draws."""

    def __init__(self) -> None:
        self.latest: Progress | None = None
        self.done = False
        """Set by whoever waits for the load, once there is nothing more to say."""
        self.abandoned = False
        """Set by whoever no longer wants the load: its next word on progress ends it, and it cleans up after itself."""

    def __call__(self, progress: Progress) -> None:
        if self.abandoned:
            raise MlxpagedError("the load was abandoned")
        self.latest = progress

    def say(self, text: str) -> None:
        """What is waited for now, where there is nothing to count."""
        from ..model.sources import Progress

        self.latest = Progress(text, 0, None)

    def in_words(self) -> str:
        """One short phrase: what is being done and how far it is; empty once that is done."""
        latest = self.latest
        if self.done:
            return ""
        if latest is None:
            return "loading"
        if not latest.total_bytes:
            return latest.label
        share = latest.done_bytes / latest.total_bytes
        return f"{latest.label}: {share:.0%} of {latest.total_bytes / 1e6:,.0f} MB" if share < 1 else "loading"


def wait_with_bar(loading: Future[Result], progress: LoadProgress) -> Result:
    """The result of `loading`, with a bar on stderr until it is there; raises what it raised."""
    from concurrent.futures import wait

    with drawn(progress) as redraw:
        while not wait([loading], timeout=REDRAW_S).done:
            redraw()
    return loading.result()


@contextmanager
def told() -> Iterator[Callable[[str], None]]:
    """Gives a function that says on stderr what is waited for now: in the bar, or in a line whenever that changes."""
    progress = LoadProgress()
    with drawn(progress) as redraw:

        def tell(text: str) -> None:
            if is_plain(sys.stderr, dict(os.environ)) and text != progress.in_words():
                complain(text)
            progress.say(text)
            redraw()

        yield tell


@contextmanager
def drawn(progress: LoadProgress) -> Iterator[Callable[[], None]]:
    """Gives a function that brings the bar up to date, to be called every REDRAW_S; the bar is gone afterwards."""
    if is_plain(sys.stderr, dict(os.environ)):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    with Bars(BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("loading", total=None)

        def redraw() -> None:
            latest = progress.latest
            known = latest.total_bytes if latest and latest.done_bytes < (latest.total_bytes or 0) else None
            bars.update(
                task, description=progress.in_words(), total=known, completed=latest.done_bytes if latest else 0
            )

        yield redraw
