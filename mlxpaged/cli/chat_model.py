"""The model that a chat talks with: waited for, replaced by another, and said by name. Owns the load under way and what
there is to tell of it; asks the model nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from .keyboard import Keyboard
from .page import Page, ReplyView
from .progress import REDRAW_S, LoadProgress

if TYPE_CHECKING:
    from ..chat.backend import Backend, ModelCard
    from .compose import Opened


class ChatModel:
    """Whoever answers in this chat, from the moment `begin` asks for it; what is told goes to `page`."""

    def __init__(self, opened: Opened, keyboard: Keyboard, page: Page, progress: LoadProgress) -> None:
        self._opened = opened
        self._keyboard = keyboard
        self._page = page
        self._progress = progress
        self._loading: asyncio.Task[ModelCard] | None = None
        self._told_notice = ""
        self._told_name = ""

    def begin(self) -> None:
        """Asks for the model, once the first prompt can be typed at."""
        self._ask(self._opened.ready)

    def begin_again(self) -> None:
        """Asks anew: the server that had it ended, or began anew."""
        self._ask(self._opened.again)

    def backend(self) -> Backend:
        """What answers; there once the model is."""
        return self._opened.backend

    async def card(self) -> ModelCard:
        """Waits until the model can answer. Raises what its load raised."""
        assert self._loading
        return await asyncio.shield(self._loading)

    async def awaited(self, view: ReplyView) -> ModelCard:
        """The same, with the progress of the load shown in `view`; then says what there is to know of the model, so
        that it stands above what that answers."""
        assert self._loading
        try:
            while not self._loading.done():
                view.status(self._progress.in_words())
                await asyncio.wait([self._loading], timeout=REDRAW_S)
        finally:
            view.finish()
        card = self._loading.result()
        self._page.say_kept()
        return card

    @property
    def failure(self) -> BaseException | None:
        """Why the model will never be there; None while that is open."""
        loading = self._loading
        return loading.exception() if loading and loading.done() and not loading.cancelled() else None

    async def switch(self, name: str) -> None:
        """Another model from now on. Where its load fails, which raises what that raised, or where this is cancelled,
        the one before stays."""
        assert self._loading
        before, name_before = self._loading, self._told_name
        self._progress.done = False
        self._ask(lambda: self._opened.switch(name))
        try:
            card = await self.awaited(self._page.reply())
        except BaseException:
            self._loading.cancel()
            self._loading = before
            raise
        before.cancel()  # where it still loads, nobody wants it any more
        if card.name == name_before:
            self._page.say(f"Still with {name_before}.")

    def _ask(self, ready: Callable[[], Awaitable[ModelCard]]) -> None:
        self._loading = asyncio.create_task(self._load(ready))
        self._loading.add_done_callback(self._loaded)

    async def _load(self, ready: Callable[[], Awaitable[ModelCard]]) -> ModelCard:
        await self._keyboard.shown()
        card = await ready()
        self._tell(card)  # here, not once this is done: whoever finds it done finds the words too
        return card

    def _loaded(self, loading: asyncio.Task[ModelCard]) -> None:
        """Nothing is to be shown of the load any more; a failure ends the prompt that may be waiting."""
        self._progress.done = True
        if not loading.cancelled() and (error := loading.exception()):
            self._keyboard.fail(error)

    def _tell(self, card: ModelCard) -> None:
        """Says where answers come from, who answers from now on, and what there is to know of it."""
        if self._opened.notice != self._told_notice and (self._opened.started or not self._page.quiet):
            self._told_notice = self._opened.notice
            self._page.later(self._opened.notice)
        if card.name != self._told_name and not self._page.quiet:
            self._page.later(f"{'Now with' if self._told_name else 'Talking with'} {card.name}.")
            self._told_name = card.name
        for note in card.notes:
            self._page.later(note)
        self._keyboard.above(self._page.say_kept)
