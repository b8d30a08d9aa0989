"""`mlxpaged chat`: a conversation in the scrollback."""

from __future__ import annotations

import asyncio
import sys

from ..config import DEFAULT_MODEL
from . import options
from .options import SamplingFlags
from .progress import LoadProgress


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
    from .conversation import Conversation
    from .keyboard import PipeKeyboard, TerminalKeyboard
    from .page import Page
    from .repl import ChatLoop

    flags = SamplingFlags(max_tokens, temperature, top_p, top_k, min_p, seed)
    flags.check()
    config = options.engine_config(dtype, ctx, memory_budget, attention=attention)
    progress = LoadProgress()
    opening = opened_remotely(url, model) if url else opened_locally(model or _choice(), config, progress)
    watched = sys.stdin.isatty()
    with opening as opened:
        page = Page(quiet=not watched)
        keyboard = TerminalKeyboard(progress.in_words) if watched else PipeKeyboard(sys.stdin)
        loop = ChatLoop(opened, Conversation(system, flags.given()), keyboard, page, progress)
        asyncio.run(loop.run())
        return int(loop.failed and not watched)


def _choice() -> str:
    """The model to use when none is named."""
    if sys.platform != "darwin":
        return DEFAULT_MODEL
    from .pick import pick_model

    return pick_model()
