"""The /commands of `mlxpaged chat`. Owns their names, their help and what each does to the conversation; prints
nothing itself."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .conversation import Conversation
from .listing import session_lines

if TYPE_CHECKING:
    from ..chat.backend import Backend, ModelCard
    from ..engine.events import EngineStats

HELP = """\
/new, /clear            begin another conversation; this one stays saved
/sessions, /load NAME   list the saved conversations, go on with one (by title or id)
/continue               go on with a reply that was stopped, cut, interrupted or broke off
/retry, /undo, /edit    answer the last question anew, take it back, change it and send it again
/fork, /rename TITLE    go on in a copy of this conversation, give it a title
/export [md|json] [FILE]  write this conversation to a file
/copy [N]               the last reply, or its code block N, to the clipboard
/attach FILE            put a text file before the next message
/model [NAME]           what the server holds, or another model from now on
/system [TEXT|off]      show, set or drop the system message
/params [NAME VALUE]... show or set sampling values, as in: /params temperature 0.7 top_p 0.9 (VALUE default: unset)
/set NAME VALUE         the same
/think [on|off]         ask the model to think first, or not to, where its template knows how
/stats                  what the engine holds right now
/help                   this list
/bye                    leave (also Ctrl-D)
Enter sends. Alt-Enter, Ctrl-J or a trailing \\ starts a new line; \"\"\" opens and closes a long text.
Ctrl-C stops a reply and keeps what is there; Ctrl-G opens $EDITOR; // sends a text that starts with /."""

NAMES = tuple(sorted(set(re.findall(r"(?<![\w/])/[a-z]+", HELP))))
_CODE_BLOCK = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)


class Leave(Exception):
    """The person wants to go."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command leaves to whoever runs the loop: `text` to say; `answer`: the last turn is to be answered;
    `resume`: the last reply is to go on; `prefill`: what the next prompt begins with; `clipboard`: a text for it;
    `model`: another model is wanted; `recap`: show where the conversation stands."""

    text: str = ""
    answer: bool = False
    resume: bool = False
    prefill: str = ""
    clipboard: str = ""
    model: str | None = None
    recap: bool = False


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
    """Carries out the /commands on one conversation. `card` waits for the model; `backend` may be called after it."""

    def __init__(
        self, conversation: Conversation, card: Callable[[], Awaitable[ModelCard]], backend: Callable[[], Backend]
    ) -> None:
        self._conversation = conversation
        self._card = card
        self._backend = backend

    async def run(self, line: str) -> Outcome:
        """What is left to do. Raises Leave for /bye, ConfigError for wrong use."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/model":
                return Outcome(model=rest) if rest else Outcome(await self._models())
            case "/params" | "/set":
                return Outcome(await self._params(rest.replace("=", " ").split()))
            case "/stats":
                await self._card()
                return Outcome(in_lines(await self._backend().stats()))
            case "/help" | "/?" | "/":
                return Outcome(HELP)
            case "/bye" | "/exit" | "/quit":
                raise Leave
        return self._on_turns(name, rest)

    def _on_turns(self, name: str, rest: str) -> Outcome:
        """The commands about what was said."""
        talk = self._conversation
        match name:
            case "/retry":
                talk.retry()
                return Outcome(answer=True)
            case "/continue":
                return self._continue()
            case "/undo":
                return Outcome(f"Taken back: {_shortened(talk.undo())}")
            case "/edit":
                return Outcome("Change it and send it again.", prefill=talk.undo())
            case "/copy":
                return self._copy(rest)
            case "/attach":
                count = talk.attach(Path(_needed(rest, "/attach FILE")).expanduser())
                return Outcome(f"{count:,} characters go with the next message.")
            case "/system":
                return Outcome(self._system(rest))
            case "/think":
                return Outcome(self._think(rest))
        return self._on_sessions(name, rest)

    def _on_sessions(self, name: str, rest: str) -> Outcome:
        """The commands about which conversation this is."""
        talk = self._conversation
        match name:
            case "/new" | "/clear":
                talk.new()
                return Outcome("A new conversation; the last one stays saved.")
            case "/sessions":
                return Outcome("\n".join(session_lines(talk.store.sessions()[:20])) or "No saved conversations.")
            case "/load":
                talk.open(talk.store.find(_needed(rest, "/load NAME")))
                return Outcome(recap=True)
            case "/fork":
                talk.fork()
                return Outcome(f"Now in a copy: {talk.session.title}")
            case "/rename":
                talk.store.rename(talk.id, _needed(rest, "/rename TITLE"))
                return Outcome(f"This conversation is called {talk.session.title}.")
            case "/export" | "/save":
                return Outcome(self._export(rest.split(maxsplit=1)))
        raise ConfigError(f"there is no {name}; /help lists the commands, // sends a text that starts with /")

    def _continue(self) -> Outcome:
        if self._conversation.to_continue():
            return Outcome(resume=True)
        if self._conversation.unanswered():
            self._conversation.retry()
            return Outcome(answer=True)
        raise ConfigError("the last reply is whole; /retry answers the question anew")

    def _copy(self, number: str) -> Outcome:
        last = self._conversation.last("assistant")
        if last is None:
            raise ConfigError("there is no reply yet")
        if not number:
            return Outcome("The last reply is in the clipboard.", clipboard=last.content)
        blocks = [match[2] for match in _CODE_BLOCK.finditer(last.content)]
        if not number.isdecimal() or not 1 <= int(number) <= len(blocks):
            raise ConfigError(f"the last reply has {len(blocks)} code blocks; write /copy or /copy 1")
        return Outcome(f"Code block {number} is in the clipboard.", clipboard=blocks[int(number) - 1])

    def _export(self, words: list[str]) -> str:
        kind = words.pop(0) if words and words[0] in {"md", "json"} else "md"
        talk = self._conversation
        file = Path(words[0]).expanduser() if words else Path(f"{_file_name(talk.session.title)}.{kind}")
        try:
            with file.open("x", encoding="utf-8") as out:
                out.write(talk.store.export(talk.id, kind))
        except FileExistsError:
            raise ConfigError(f"{file} exists already; write /export {kind} and another name") from None
        except OSError as error:
            raise ConfigError(
                f"cannot write {file}: {error.strerror}; write /export {kind} and another place"
            ) from error
        return f"Written to {file}."

    def _system(self, text: str) -> str:
        if text:
            self._conversation.system = None if text == "off" else text
        system = self._conversation.system
        return f"System message: {system}" if system else "No system message."

    def _think(self, word: str) -> str:
        if word not in {"", "on", "off"}:
            raise ConfigError(f"/think is {word!r}; write /think on or /think off")
        if word:
            self._conversation.thinks = word == "on"
        thinks = self._conversation.thinks
        return f"Thinking: {'as the model likes' if thinks is None else 'on' if thinks else 'off'}."

    async def _models(self) -> str:
        here = await self._card()
        lines = []
        for card in await self._backend().models():
            context = f"context {card.context_len:,}" if card.context_len else ""
            lines.append(f"{'*' if card.name == here.name else ' '} {card.name}  {card.state}  {context}".rstrip())
        return "\n".join(lines)

    async def _params(self, words: list[str]) -> str:
        if len(words) % 2:
            raise ConfigError(f"{words[-1]} has no value; write /params NAME VALUE, as in: /params temperature 0.7")
        for name, value in zip(words[::2], words[1::2], strict=True):
            self._conversation.set_value(name, value)
        return self._conversation.shown_values((await self._card()).defaults)


def _needed(text: str, usage: str) -> str:
    if not text:
        raise ConfigError(f"something is missing; write {usage}")
    return text


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


def _file_name(title: str) -> str:
    return re.sub(r"[^\w-]+", "-", title).strip("-").lower()[:50] or "conversation"


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
            f"K/V       {stats.memory_bytes / 2**20:,.0f} MiB",
            f"memory    {stats.memory_active_bytes / 2**20:,.0f} MiB in arrays of MLX, the weights and K/V among them",
        )
    )
