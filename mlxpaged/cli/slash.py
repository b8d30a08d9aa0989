"""The /commands of `mlxpaged chat`. Owns their names, their help and what each does to the conversation; prints
nothing itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .conversation import Conversation

if TYPE_CHECKING:
    from ..chat.backend import ModelCard
    from ..engine.events import EngineStats

HELP = """\
/system [TEXT|off]      show, set or drop the system message
/params [NAME VALUE]... show or set sampling values, as in: /params temperature 0.7 top_p 0.9 (VALUE default: unset)
/clear                  forget the conversation; the system message and the values stay
/stats                  what the engine holds right now
/help                   this list
/bye                    leave (also Ctrl-D)
Enter sends. Alt-Enter, Ctrl-J or a trailing \\ starts a new line; \"\"\" opens and closes a long text.
Ctrl-C stops a reply and keeps what is there; Ctrl-G opens $EDITOR; // sends a text that starts with /."""

NAMES = ("/system", "/params", "/clear", "/stats", "/help", "/bye")


class Leave(Exception):
    """The person wants to go."""


def is_command(line: str) -> bool:
    """Whether a line is meant for us: it starts with one slash and is not a path or a text of several lines."""
    if not line.startswith("/") or line.startswith("//") or "\n" in line:
        return False
    word = line.split()[0]
    return "/" not in word[1:] and (word == "/" or not Path(word).exists())


def unescaped(line: str) -> str:
    """The text that is sent: `//x` stands for `/x`."""
    return line[1:] if line.startswith("//") else line


class Commands:
    """Carries out the /commands on one conversation. `card` and `stats` reach the model once it is there."""

    def __init__(
        self,
        conversation: Conversation,
        card: Callable[[], Awaitable[ModelCard]],
        stats: Callable[[], Awaitable[EngineStats]],
    ) -> None:
        self._conversation = conversation
        self._card = card
        self._stats = stats

    async def run(self, line: str) -> str:
        """What to tell the person. Raises Leave for /bye, ConfigError for wrong use."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/system":
                return self._system(rest)
            case "/params":
                return await self._params(rest.replace("=", " ").split())
            case "/clear":
                self._conversation.clear()
                return "The conversation is forgotten."
            case "/stats":
                return in_lines(await self._stats())
            case "/help" | "/?" | "/":
                return HELP
            case "/bye" | "/exit" | "/quit":
                raise Leave
        raise ConfigError(f"there is no {name}; /help lists the commands, // sends a text that starts with /")

    def _system(self, text: str) -> str:
        if text:
            self._conversation.system = None if text == "off" else text
        system = self._conversation.system
        return f"System message: {system}" if system else "No system message."

    async def _params(self, words: list[str]) -> str:
        if len(words) % 2:
            raise ConfigError(f"{words[-1]} has no value; write /params NAME VALUE, as in: /params temperature 0.7")
        for name, value in zip(words[::2], words[1::2], strict=True):
            self._conversation.set_value(name, value)
        return self._conversation.shown_values((await self._card()).defaults)


def in_lines(stats: EngineStats) -> str:
    """A snapshot of the engine for a person."""
    return "\n".join(
        (
            f"model     {stats.model or '-'}",
            f"requests  {stats.num_running} running, {stats.num_waiting} waiting",
            f"blocks    {stats.blocks_used} used ({stats.blocks_shared} shared), {stats.blocks_cached} cached, "
            f"{stats.blocks_free} free of {stats.blocks_total}",
            f"tokens    {stats.prompt_tokens:,} prompt ({stats.cached_tokens:,} cached), "
            f"{stats.generated_tokens:,} generated in {stats.steps:,} steps",
            f"memory    {stats.memory_bytes / 2**20:,.0f} MiB",
        )
    )
