"""What a person can ask for by name. Owns the table that /commands, the palette and the help page share; does none of
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textual.command import DiscoveryHit, Hit, Hits, Provider

if TYPE_CHECKING:
    from .chat_screen import ChatScreen


@dataclass(frozen=True, slots=True)
class Command:
    """`name` as it is typed after the slash, `takes` what may follow it, `key` the name of the action whose keys do the
    same, `action` what the screen does (given the words after the name)."""

    name: str
    takes: str
    about: str
    key: str = ""

    @property
    def action(self) -> str:
        """The screen's method that does it."""
        return f"do_{self.name}"


COMMANDS = (
    Command("new", "", "open a new session", "new_session"),
    Command("fork", "", "a new session with the turns up to the marked one", "turn_fork"),
    Command("retry", "", "make the last reply again", "retry"),
    Command("undo", "", "take the last exchange back into the prompt"),
    Command("edit", "", "write your last turn anew", "turn_edit"),
    Command("continue", "", "go on with a reply that broke off", "turn_continue"),
    Command("stop", "", "stop the reply", "stop"),
    Command("clear", "", "forget this session's turns"),
    Command("rename", "[TITLE]", "give the session a title"),
    Command("delete", "", "delete the session for good"),
    Command("close", "", "take the session off the list", "close_session"),
    Command("system", "[TEXT|off]", "show, set or drop the system message"),
    Command("params", "[NAME VALUE]...", "show or set sampling values"),
    Command("copy", "", "copy the last code block", "copy_code"),
    Command("export", "[md|json]", "write the session to a file in this folder"),
    Command("search", "[TEXT]", "find a session by what was said in it", "search"),
    Command("stats", "", "show or hide the engine from inside", "engine"),
    Command("sessions", "", "show or hide the list of sessions", "sessions"),
    Command("think", "", "open or close the thinking of replies", "thinking"),
    Command("theme", "", "choose the colours"),
    Command("help", "", "keys and commands", "help"),
    Command("bye", "", "leave", "leave"),
)

_BY_NAME = {command.name: command for command in COMMANDS} | {
    other: next(command for command in COMMANDS if command.name == name)
    for other, name in {"exit": "bye", "quit": "bye", "?": "help", "rm": "delete", "set": "params"}.items()
}


def is_command(text: str) -> bool:
    """Whether a text is meant for us: one line that starts with one slash and is no path."""
    if not text.startswith("/") or text.startswith("//") or "\n" in text:
        return False
    word = text.split()[0]
    return "/" not in word[1:] and (word == "/" or not Path(word).exists())


def unescaped(text: str) -> str:
    """The text that is sent: `//x` stands for `/x`."""
    return text[1:] if text.startswith("//") else text


def command_of(text: str) -> tuple[Command, str] | None:
    """The command a line names and what follows it; None for a name there is not."""
    name, _, rest = text[1:].partition(" ")
    command = _BY_NAME.get(name or "help")
    return (command, rest.strip()) if command else None


def matching(text: str) -> list[Command]:
    """The commands a line that is still being typed may become."""
    if not text.startswith("/") or text.startswith("//") or any(sign in text[1:] for sign in " /\n"):
        return []
    return [command for command in COMMANDS if command.name.startswith(text[1:])]


class PaletteCommands(Provider):
    """The same commands in the palette, and every session by its title."""

    @property
    def _chat(self) -> ChatScreen:
        from .chat_screen import ChatScreen

        assert isinstance(self.screen, ChatScreen)
        return self.screen

    async def discover(self) -> Hits:
        """All of them, before anything is typed."""
        for name, about, run in self._offered():
            yield DiscoveryHit(name, run, help=about)

    async def search(self, query: str) -> Hits:
        """Those that fit what was typed."""
        matcher = self.matcher(query)
        for name, about, run in self._offered():
            if (score := matcher.match(f"{name} {about}")) > 0:
                yield Hit(score, matcher.highlight(name), run, help=about)

    def _offered(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        for command in COMMANDS:
            key = self._chat.keys.shown(command.key) if command.key else ""
            about = f"{command.about}{f' · {key}' if key else ''}"
            yield command.name.capitalize(), about, partial(self._chat.do, command, "")
        for talk in self._chat.talks:
            yield f"Go to: {talk.name}", "session", partial(self._chat.show_session, talk.id)
