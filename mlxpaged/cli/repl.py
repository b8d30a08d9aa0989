"""The loop of `mlxpaged chat`: read, answer, again. Owns what Ctrl-C means and what becomes of an interrupted reply;
how words are read and shown is the keyboard's and the page's business."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import MlxpagedError
from ..sched.requests import FinishReason
from .conversation import Conversation
from .keyboard import Keyboard
from .logs import logged_to
from .page import Page, ReplyView, figures
from .progress import REDRAW_S, LoadProgress
from .slash import Commands, Leave, is_command, unescaped
from .terminal import silent_keyboard

if TYPE_CHECKING:
    from ..chat.backend import ModelCard, Reply
    from ..engine.events import Delta
    from .compose import Opened

_NEARLY_FULL = 0.85
_REFRESH_S = 0.05
_ENDINGS = {FinishReason.CANCELLED: " · stopped", FinishReason.LENGTH: " · cut at its longest"}


@dataclass
class _Exchange:
    """One reply as far as it came. `last` is None when it was torn off before its end."""

    view: ReplyView
    card: ModelCard | None = None
    reply: Reply | None = None
    text: str = ""
    last: Delta | None = None
    interrupts: int = 0

    def stop(self, task: asyncio.Task[None]) -> None:
        """Ctrl-C: the reply is asked to end; at the second one, or before there is a reply, `task` is torn off."""
        self.interrupts += 1
        if self.reply and self.interrupts == 1:
            self.reply.cancel()
        else:
            task.cancel()


class ChatLoop:
    """One chat from the first prompt to the last; `run` ends when the person leaves or the input does."""

    def __init__(
        self, opened: Opened, conversation: Conversation, keyboard: Keyboard, page: Page, progress: LoadProgress
    ) -> None:
        self._opened = opened
        self._conversation = conversation
        self._keyboard = keyboard
        self._page = page
        self._progress = progress
        self._commands = Commands(conversation, self._card, opened.backend.stats)
        self._loading: asyncio.Task[ModelCard] | None = None
        self._interrupts: _Interrupts | None = None  # None behind a pipe: there, Ctrl-C ends the program
        self.failed = False
        """Whether a message went wrong: a script behind a pipe wants to know."""

    async def run(self) -> None:
        """Raises what loading the model raised; everything later is told and survived."""
        if self._page.quiet:
            # asyncio would make the first Ctrl-C a cancelled task, which a blocking read of a pipe never notices.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        else:
            self._interrupts = _Interrupts()
        with logged_to(self._page.later):
            await self._converse()

    async def _converse(self) -> None:
        self._loading = asyncio.create_task(self._load())
        self._loading.add_done_callback(self._loaded)
        try:
            while (text := await self._read()) is not None:
                self._page.say_kept()
                if is_command(text):
                    await self._obey(text)
                elif text:
                    await self._answer(unescaped(text))
                self._page.say_kept()
                self._page.gap()
        except Leave:
            return
        finally:
            if self._interrupts:
                self._interrupts.end()

    async def _obey(self, line: str) -> None:
        task = asyncio.create_task(self._commands.run(line))
        try:
            with self._stoppable(task.cancel):
                await asyncio.wait([task])
            self._page.say("Stopped." if task.cancelled() else task.result())
        except MlxpagedError as error:
            if self._load_error():
                raise
            self._warn(str(error))

    async def _read(self) -> str | None:
        while True:
            if self._interrupts:
                self._interrupts.forget()
            try:
                return await self._keyboard.read()
            except KeyboardInterrupt:
                if self._page.quiet:
                    raise
                self._page.say("Ctrl-D or /bye leaves; Ctrl-C stops a reply.")

    async def _load(self) -> ModelCard:
        await self._keyboard.shown()
        return await self._opened.ready()

    def _loaded(self, loading: asyncio.Task[ModelCard]) -> None:
        """Keeps what there is to know of the model; a failure ends the prompt that may be waiting."""
        self._progress.done = True
        if loading.cancelled():
            return
        if error := loading.exception():
            self._keyboard.fail(error)
        else:
            for note in loading.result().notes:
                self._page.later(note)

    async def _card(self) -> ModelCard:
        assert self._loading
        return await asyncio.shield(self._loading)

    async def _answer(self, text: str) -> None:
        self._conversation.ask(text)
        exchange = _Exchange(self._page.reply())
        task = asyncio.create_task(self._hear(exchange))
        with silent_keyboard(), self._stoppable(lambda: exchange.stop(task)):
            while not task.done():
                await asyncio.wait([task], timeout=_REFRESH_S)
                exchange.view.refresh()
            exchange.view.finish()
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._keep(exchange)
            return
        self._conversation.take_back()
        if not isinstance(error, MlxpagedError) or self._load_error():
            raise error
        self._warn(f"{error} (your message was taken back)")

    def _load_error(self) -> BaseException | None:
        """Why the model will never be there; None while that is open."""
        loading = self._loading
        return loading.exception() if loading and loading.done() and not loading.cancelled() else None

    def _warn(self, text: str) -> None:
        self.failed = True
        self._page.warn(text)

    def _stoppable(self, stop: Callable[[], object]) -> AbstractContextManager[None]:
        return self._interrupts.doing(stop) if self._interrupts else nullcontext()

    async def _hear(self, exchange: _Exchange) -> None:
        """From the question to the last delta; `exchange` holds whatever came when this is cut short."""
        exchange.card = card = await self._model(exchange.view)
        sampling = self._conversation.sampling(card.defaults)
        exchange.reply = await self._opened.backend.start(self._conversation.messages(), sampling)
        async for delta in exchange.reply:
            exchange.last = delta
            if delta.text:
                exchange.text += delta.text
                exchange.view.feed(delta.text)
            elif delta.progress and not exchange.text:
                exchange.view.status(f"reading: {delta.progress.computed:,} of {delta.progress.total:,} tokens")

    async def _model(self, view: ReplyView) -> ModelCard:
        assert self._loading
        while not self._loading.done():
            view.status(self._progress.in_words())
            await asyncio.wait([self._loading], timeout=REDRAW_S)
        return self._loading.result()

    def _keep(self, exchange: _Exchange) -> None:
        """Puts the reply, or the part of it that came, into the conversation and tells its figures."""
        last = exchange.last
        finish = last.finish if last and last.finish else FinishReason.CANCELLED
        if finish is FinishReason.ERROR:
            self._warn(f"the reply broke off: {last.error if last and last.error else 'no reason given'}")
        if not exchange.text and finish in {FinishReason.ERROR, FinishReason.CANCELLED}:
            self._conversation.take_back()
            self._page.say("No reply came; your message was taken back.")
            return
        self._conversation.answer(exchange.text)
        context_len = exchange.card.context_len if exchange.card else None
        if last and last.usage:
            self._page.say(figures(last.usage, last.timing, context_len) + _ENDINGS.get(finish, ""))
            used = last.usage.prompt_tokens + last.usage.completion_tokens
            if context_len and used > _NEARLY_FULL * context_len:
                self._page.say(f"The context is {used / context_len:.0%} full; /clear starts afresh.")
        elif finish is FinishReason.CANCELLED:
            self._page.say("Stopped; what is there stays in the conversation.")


class _Interrupts:
    """Ctrl-C between prompts (inside one the line editor takes it as a key).

    `call` is what it does now. One that comes before there is anything to stop stops the next thing. Set as a plain
    signal handler, which the line editor puts back when it is done; a handler of the loop it would remove.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._call: Callable[[], object] | None = None
        self._early = False
        self._before = signal.signal(signal.SIGINT, lambda *_: self._loop.call_soon_threadsafe(self._interrupt))

    def forget(self) -> None:
        """A new prompt begins: what was pressed before it no longer counts."""
        self._early = False

    @contextmanager
    def doing(self, call: Callable[[], object]) -> Iterator[None]:
        """Inside, Ctrl-C does `call`."""
        self._call = call
        if self._early:
            self._interrupt()
        try:
            yield
        finally:
            self._call = None

    def end(self) -> None:
        """Ctrl-C is what it was before."""
        signal.signal(signal.SIGINT, self._before)

    def _interrupt(self) -> None:
        self._early = self._call is None
        if self._call:
            self._call()
