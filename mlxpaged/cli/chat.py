"""`mlxpaged chat`: a conversation in the scrollback."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

from ..config import DEFAULT_MODEL
from . import options
from .options import SamplingFlags
from .progress import LoadProgress

if TYPE_CHECKING:
    from .compose import Opened


def chat(
    model: options.OptionalModelArgument = None,
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
) -> int:
    """Talk with a model; without one, a Mac offers what it finds and Linux takes smollm2."""
    from .compose import opened_locally, opened_remotely

    flags = SamplingFlags(max_tokens, temperature, top_p, top_k, min_p, seed)
    flags.check()
    config = options.engine_config(dtype, ctx, memory_budget, attention=attention)
    progress = LoadProgress()
    opening = opened_remotely(url, model) if url else opened_locally(model or _choice(), config, progress)
    with opening as opened:
        from .conversation import Conversation
        from .keyboard import PipeKeyboard, TerminalKeyboard
        from .page import Page
        from .repl import ChatLoop

        watched = sys.stdin.isatty()
        keyboard = TerminalKeyboard(lambda: _status(opened, progress)) if watched else PipeKeyboard(sys.stdin)
        conversation = Conversation(system, flags.given())
        loop = ChatLoop(opened, conversation, keyboard, Page(quiet=not watched), progress)
        # asyncio would turn the first Ctrl-C into a cancelled task, which a blocking read of a pipe never notices.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        asyncio.run(loop.run())
        return int(loop.failed and not watched)


def _status(opened: Opened, progress: LoadProgress) -> str:
    """The word below the prompt: how far the model is, nothing once it is there."""
    return progress.in_words() if opened.loading and not opened.loading.done() else ""


def _choice() -> str:
    """The model to use when none is named."""
    if sys.platform != "darwin":
        return DEFAULT_MODEL
    from .pick import pick_model

    return pick_model()
