"""One question and its reply while it is being made. Owns what has come of it so far; shows and saves nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..chat.backend import ModelCard, Reply
    from ..chat.reply_draft import ReplyDraft
    from ..engine.events import Delta
    from .page import ReplyView


@dataclass
class Exchange:
    """One reply as far as it came. `last` is None when it was torn off before its end."""

    view: ReplyView
    card: ModelCard | None = None
    reply: Reply | None = None
    draft: ReplyDraft | None = None
    asked: bool = True  # the question was put just now; not, when an earlier one is answered anew
    resumed: bool = False
    text: str = ""
    num_tokens: int = 0
    last: Delta | None = None
    interrupts: int = 0

    def stop(self, task: asyncio.Task[None]) -> None:
        """Ctrl-C: the reply is asked to end; at the second one, or before there is a reply, `task` is torn off."""
        self.interrupts += 1
        if self.reply and self.interrupts == 1:
            self.reply.cancel()
        else:
            task.cancel()
