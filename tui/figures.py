"""Numbers about replies in words. Owns the line under a reply and how counts are written; computes nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from textual.content import Content

from ..chat.foreign import neutralise
from .keymap import Keys
from .state import SYMBOLS, Phase, Talk, Turn, in_words


def count(number: float) -> str:
    """812, 5.1k, 32k, 1.2M."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            value = number / limit
            return f"{value:.0f}{unit}" if value >= 100 or value == round(value) else f"{value:.1f}{unit}"
    return f"{number:.0f}"


def values_in_words(values: Mapping[str, float]) -> str:
    """Sampling values by name; empty where there are none."""
    return " · ".join(
        f"{name.replace('_', ' ')} {value if isinstance(value, int) else format(value, 'g')}"
        for name, value in values.items()
    )


def status_of(talk: Talk, keys: Keys) -> Content:
    """What is happening to the reply that is being made."""
    phase, progress = talk.phase, talk.progress
    colour = {Phase.WRITING: "$success", Phase.READING: "$warning"}.get(phase, "$foreground-muted")
    words = in_words(talk)
    if phase is Phase.READING and progress:
        words += f" · {progress.computed:,} of {progress.total:,} tokens"
        words += f" · {progress.cached:,} cached" if progress.cached else ""
    elif phase is Phase.WRITING:
        words += f" · {talk.num_tokens:,} tokens · {keys.hint('stop', '/stop')} stops"
    return Content.assemble((f"{SYMBOLS[phase]} ", colour), (words, colour))


def figures_of(turn: Turn, keys: Keys) -> Content | None:
    """How a reply went: its end where that needs a word, then its figures; None for a turn without either."""
    if turn.role != "assistant":
        return None
    parts: list[Content] = []
    retry = keys.hint("retry", "/retry")
    if turn.state == "error":
        reason = neutralise(turn.error or "the reply broke off")
        on = f"/continue goes on, {retry} retries" if turn.text else f"{retry} retries"
        parts.append(Content.assemble((f"! {reason}", "$error"), (f" · {on}", "$foreground-muted")))
    elif turn.state == "interrupted":
        on = f" · /continue goes on, {retry} retries"
        parts.append(Content.assemble(("‖ interrupted", "$warning"), (on, "$foreground-muted")))
    elif turn.state == "stopped":
        parts.append(Content.styled("■ stopped", "$warning"))
    elif turn.state == "cut":
        parts.append(
            Content.assemble(("■ cut at its longest", "$warning"), (" · /continue goes on", "$foreground-muted"))
        )
    if turn.timing and turn.usage:
        usage, timing = turn.usage, turn.timing
        words = [f"ttft {timing.ttft_s:.2f} s"]
        if rate := timing.tokens_per_s(usage.completion_tokens):
            words.append(f"{rate:.0f} tok/s")
        words.append(f"{usage.completion_tokens:,} tokens")
        if usage.cached_tokens:
            words.append(f"{usage.cached_tokens / max(usage.prompt_tokens, 1):.0%} of the prompt cached")
        parts.append(Content.styled(" · ".join(words), "$foreground-muted"))
    return Content.styled(" · ", "$foreground-muted").join(parts) if parts else None
