"""`mlxpaged chat`: a conversation in the scrollback, answered by a server, kept in the store."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import DEFAULT_MODEL
from ..errors import ConfigError, UnreadableSession
from . import options
from .exits import complain
from .options import SamplingFlags
from .progress import LoadProgress

if TYPE_CHECKING:
    from ..chat.sessions import Session
    from ..chat.store import Store
    from .conversation import Conversation

Continue = Annotated[bool, typer.Option("-c", "--continue", help="Go on with the last conversation.")]
SessionName = Annotated[
    str | None,
    typer.Option("--session", envvar="MLXPAGED_SESSION", help="Go on with this conversation (its title or id)."),
]
Ephemeral = Annotated[
    bool, typer.Option("--ephemeral", envvar="MLXPAGED_EPHEMERAL", help="Save nothing of this conversation.")
]
Files = Annotated[
    list[Path] | None,
    typer.Option("-f", "--file", envvar="MLXPAGED_FILE", help="A text file before the first message."),
]


def chat(
    context: typer.Context,
    model: options.OptionalModelArgument = None,
    continues: Continue = False,
    session: SessionName = None,
    ephemeral: Ephemeral = False,
    file: Files = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    dtype: options.DtypeFlag = "auto",
    ctx: options.ContextFlag = None,
    memory_budget: options.MemoryBudget = None,
    attention: options.AttentionFlag = "auto",
    url: options.Url = None,
    api_key: options.ApiKey = None,
) -> int:
    """Talk with a model.

    Without MODEL: the one a running server holds, else a Mac offers what it finds and Linux takes smollm2. Answers
    come from a server that chats share; one is started in the background where none runs. What is said in a terminal
    is saved (see `mlxpaged sessions`).
    """
    import asyncio

    from . import compose
    from .conversation import Conversation
    from .keyboard import PipeKeyboard, TerminalKeyboard
    from .page import Page
    from .repl import ChatLoop

    flags = SamplingFlags(max_tokens, temperature, top_p, top_k, min_p, seed)
    flags.check()
    options.engine_config(dtype, ctx, memory_budget, attention=attention)
    server_flags = options.as_flags(dtype=dtype, ctx=ctx, memory_budget=memory_budget, attention=attention)
    watched = sys.stdin.isatty()
    wanted = continues or session is not None
    if ephemeral and wanted:
        raise ConfigError("--ephemeral saves nothing, so there is nothing to go on with; leave out one of the two")
    store = _store(ephemeral or not (watched or wanted))
    try:
        busy = _open_elsewhere(store) if continues and session is None else None
        found = _found(store, session) if wanted else None
        conversation = Conversation(store, found, system, *options.by_source(context, flags))
        for path in file or ():
            conversation.attach(path)
        progress = LoadProgress()
        model = _model(model, url, conversation)
        with compose.opened_for_chat(model, url, api_key, server_flags, progress) as opened:
            page = Page(quiet=not watched)
            keyboard = TerminalKeyboard(progress.in_words, not ephemeral) if watched else PipeKeyboard(sys.stdin)
            loop = ChatLoop(opened, conversation, keyboard, page, progress)
            if found and busy:
                page.warn(f"{(busy.title or busy.id)!r} is open elsewhere; this is the one before it.")
            if wanted and not found:
                loop.tell_instead(f"{session!r}" if session else "the last conversation")
            asyncio.run(loop.run())
            return int(loop.failed and not watched)
    finally:
        if rescued := store.close():
            complain(f"{store.problem}; this conversation is in {rescued}; `mlxpaged sessions import` takes it in")


def _store(ephemeral: bool) -> Store:
    from ..chat.store import Store

    return Store(None) if ephemeral else Store.open()


def _found(store: Store, name: str | None) -> Session | None:
    """The conversation to go on with, opened; ConfigError where there is none yet. None: it cannot be read, which
    `store.problem` says, so a new one begins in memory."""
    try:
        found = store.latest() if name is None else store.find(name)
        if found is None and not store.problem:
            raise ConfigError("there is no conversation to continue yet; leave out --continue")
        return found and store.claim(found.id)
    except UnreadableSession:
        return None


def _open_elsewhere(store: Store) -> Session | None:
    """The last conversation, where another process has it open."""
    last = next(iter(store.sessions()), None)
    return last if last and last.busy else None


def _model(named: str | None, url: str | None, conversation: Conversation) -> str | None:
    """The model to ask for; None: whichever the server holds."""
    from ..chat.servers import records

    if named or url:
        return named
    if conversation.session.model:
        return conversation.session.model
    if records():
        return None
    if sys.platform != "darwin":
        return DEFAULT_MODEL
    from .pick import pick_model

    return pick_model()
