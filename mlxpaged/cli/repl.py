"""The loop of `mlxpaged chat`: read, answer, again. Owns what Ctrl-C stops and what becomes of an interrupted reply;
how words are read and shown is the keyboard's and the page's business, which model answers `chat_model`'s."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from ..errors import MlxpagedError, Overloaded, Unreachable
from ..sched.requests import FinishReason
from .chat_model import ChatModel
from .conversation import Conversation
from .exchange import Exchange
from .interrupts import Interrupts
from .keyboard import Keyboard
from .logs import logged_to
from .page import Page, figures, progress_words
from .progress import LoadProgress
from .slash import Commands, Leave, Outcome, is_command, unescaped
from .terminal import copy_to_clipboard

if TYPE_CHECKING:
    from ..chat.reply_draft import ReplyDraft
    from ..chat.sessions import State
    from .compose import Opened

_NEARLY_FULL = 0.85
_REFRESH_S = 0.05
_STATES: dict[FinishReason, State] = {
    FinishReason.CANCELLED: "stopped",
    FinishReason.LENGTH: "cut",
    FinishReason.ERROR: "error",
}
_ENDINGS = {FinishReason.CANCELLED: " · stopped", FinishReason.LENGTH: " · cut at its longest; /continue goes on"}


class ChatLoop:
    """One chat from the first prompt to the last; `run` ends when the person leaves or the input does."""

    def __init__(
        self, opened: Opened, conversation: Conversation, keyboard: Keyboard, page: Page, progress: LoadProgress
    ) -> None:
        self._model = ChatModel(opened, keyboard, page, progress)
        self._conversation = conversation
        self._keyboard = keyboard
        self._page = page
        self._commands = Commands(conversation, self._model.card, self._model.backend)
        self._prefill = ""
        self._told_problem: str | None = None
        self._interrupts: Interrupts | None = None  # None behind a pipe: there, Ctrl-C ends the program
        self.failed = False
        """Whether a message went wrong: a script behind a pipe wants to know."""

    async def run(self) -> None:
        """Raises what loading the model raised; everything later is told and survived."""
        if self._page.quiet:
            # asyncio would make the first Ctrl-C a cancelled task, which a blocking read of a pipe never notices.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        else:
            self._interrupts = Interrupts()
        with logged_to(self._page.later):
            await self._converse()

    async def _converse(self) -> None:
        self._model.begin()
        self._page.recap(self._conversation.session, self._conversation.turns)
        try:
            self._tell_problem()
            while (text := await self._read()) is not None:
                self._page.say_kept()
                if is_command(text):
                    await self._obey(text)
                elif text:
                    self._conversation.ask(unescaped(text))
                    await self._answer()
                self._tell_problem()
                self._page.say_kept()
                self._page.gap()
            if self._page.quiet:
                await self._model.card()  # a script that has nothing to say still learns that there is no such model
        except Leave:
            return
        finally:
            self._keyboard.close()
            if self._interrupts:
                self._interrupts.end()

    async def _obey(self, line: str) -> None:
        task = asyncio.create_task(self._commands.run(line))
        try:
            with self._stoppable(task.cancel):
                await asyncio.wait([task])
            self._page.say_kept()  # of the model, which the command may have waited for
            if task.cancelled():
                self._page.say("Stopped.")
            else:
                await self._follow(task.result())
        except MlxpagedError as error:
            if self._model.failure:
                raise
            self._warn(str(error))

    async def _follow(self, outcome: Outcome) -> None:
        """What a command left to do."""
        if outcome.clipboard:
            copy_to_clipboard(outcome.clipboard)
        if outcome.text:
            self._page.say(outcome.text)
        self._prefill = outcome.prefill
        if outcome.recap:
            self._page.recap(self._conversation.session, self._conversation.turns)
        if outcome.model:
            await self._switch(outcome.model)
        if outcome.answer or outcome.resume:
            await self._answer(asked=False, resume=outcome.resume)

    async def _switch(self, model: str) -> None:
        """Another model from now on; where that fails, the one before."""
        switching = asyncio.create_task(self._model.switch(model))
        with self._stoppable(switching.cancel):
            await asyncio.wait([switching])
        if switching.cancelled():
            self._page.say("Stopped; the model before stays.")
        elif error := switching.exception():
            if not isinstance(error, MlxpagedError):
                raise error
            self._warn(str(error))

    async def _read(self) -> str | None:
        while True:
            if self._interrupts:
                self._interrupts.forget()
            try:
                prefill, self._prefill = self._prefill, ""
                return await self._keyboard.read(prefill)
            except KeyboardInterrupt:
                if self._page.quiet:
                    raise
                self._page.say("Ctrl-D or /bye leaves; Ctrl-C stops a reply.")

    def tell_instead(self, wanted: str) -> None:
        """Says that the conversation asked for cannot be read, so that a new one begins; before `run`."""
        self._told_problem = problem = self._conversation.store.problem
        self._page.warn(
            f"{wanted} cannot be read: {problem}. A new conversation begins in memory; /export writes it out."
        )

    def _tell_problem(self) -> None:
        """Says when saving stops, and when it goes on."""
        problem = self._conversation.store.problem
        if problem != self._told_problem:
            self._page.warn(
                f"not saved: {problem}. The conversation goes on in memory; /export writes it out."
                if problem
                else "Everything is saved again."
            )
            self._told_problem = problem

    async def _answer(self, asked: bool = True, resume: bool = False) -> None:
        """Answers the last turn, which was `asked` just now or earlier, or goes on with the last reply."""
        exchange = Exchange(self._page.reply(), asked=asked, resumed=resume)
        task = asyncio.create_task(self._hear(exchange))
        with self._stoppable(lambda: exchange.stop(task)):
            while not task.done():
                await asyncio.wait([task], timeout=_REFRESH_S)
                exchange.view.refresh()
                if exchange.draft:
                    exchange.draft.tick()
            error = None if task.cancelled() else task.exception()
            exchange.view.finish()
        if error is None:
            self._keep(exchange)
            return
        if self._model.failure:
            self._without_reply(exchange)
            raise error
        if not isinstance(error, MlxpagedError):
            raise error
        self._warn(f"{error} ({self._without_reply(exchange)})")

    def _without_reply(self, exchange: Exchange) -> str:
        """No word came: the conversation is as before; what that means, in words."""
        if exchange.resumed:
            if exchange.draft:
                exchange.draft.finish("stopped")
            return "the reply stays as it was"
        if exchange.draft:
            exchange.draft.drop()
        if not exchange.asked:
            return "/retry asks again"
        self._conversation.take_back()
        return "your message was taken back"

    def _warn(self, text: str) -> None:
        self.failed = True
        self._page.warn(text)

    def _stoppable(self, stop: Callable[[], object]) -> AbstractContextManager[None]:
        return self._interrupts.doing(stop) if self._interrupts else nullcontext()

    async def _hear(self, exchange: Exchange) -> None:
        """From the question to the last delta; `exchange` holds whatever came when this is cut short."""
        exchange.card = card = await self._model.awaited(exchange.view)
        sampling = self._conversation.sampling(card.defaults)
        messages = self._conversation.messages(exchange.resumed)
        try:
            exchange.reply = await self._model.backend().start(messages, sampling)
        except (Unreachable, Overloaded):  # the server ended or began anew since: wait for the one that answers now
            self._model.begin_again()
            exchange.card = card = await self._model.awaited(exchange.view)
            exchange.reply = await self._model.backend().start(messages, sampling)
        exchange.draft = self._draft(exchange.resumed, card.name)
        async for delta in exchange.reply:
            exchange.last = delta
            exchange.num_tokens += len(delta.token_ids)
            if delta.text:
                exchange.text += delta.text
                exchange.draft.feed(delta.text)
                exchange.view.feed(delta.text)
            elif delta.progress and not exchange.text:
                exchange.view.status(progress_words(delta.progress))

    def _draft(self, resumed: bool, model: str) -> ReplyDraft:
        going_on = self._conversation.to_continue() if resumed else None
        return self._conversation.store.resume(going_on.id) if going_on else self._conversation.begin_reply(model)

    def _keep(self, exchange: Exchange) -> None:
        """Keeps the reply, or the part of it that came, and tells its figures."""
        last = exchange.last
        finish = last.finish if last and last.finish else FinishReason.CANCELLED
        if finish is FinishReason.ERROR:
            way_on = "; /continue goes on with it" if exchange.text and not self._page.quiet else ""
            self._warn(f"the reply broke off: {last.error if last and last.error else 'no reason given'}{way_on}")
        if not exchange.text and finish in {FinishReason.ERROR, FinishReason.CANCELLED}:
            self._page.say(f"No reply came; {self._without_reply(exchange)}.")
            return
        if exchange.draft:
            usage, timing, error = (last.usage, last.timing, last.error) if last else (None, None, None)
            exchange.draft.finish(_STATES.get(finish, "done"), usage, timing, error)
        self._tell_figures(exchange, finish)

    def _tell_figures(self, exchange: Exchange, finish: FinishReason) -> None:
        last, context_len = exchange.last, exchange.card.context_len if exchange.card else None
        if last and last.usage:
            self._page.say(figures(last.usage, last.timing, context_len) + _ENDINGS.get(finish, ""))
            used = last.usage.prompt_tokens + last.usage.completion_tokens
            if context_len and used > _NEARLY_FULL * context_len:
                self._page.say(f"The context is {used / context_len:.0%} full; /new starts afresh.")
        elif finish is FinishReason.CANCELLED:
            count = f" after {exchange.num_tokens:,} tokens" if exchange.num_tokens else ""
            self._page.say(f"Stopped{count}; what is there stays in the conversation.")
