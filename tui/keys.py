"""What keys do, by name. Owns the table that bindings, the help page and config.toml's [keys] share, and how a key is
written; knows nothing of what a person has changed, and imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual.binding import Binding

FIRST_SESSIONS = range(1, 10)


@dataclass(frozen=True, slots=True)
class KeyAction:
    """`name` in config.toml, `keys` by default as Textual names them, `about` for the help page. `at_turn`: works only
    while a turn is marked, so that a letter may be its key."""

    name: str
    keys: tuple[str, ...]
    about: str
    at_turn: bool = False


ACTIONS: Mapping[str, KeyAction] = {
    action.name: action
    for action in (
        KeyAction("send", ("enter",), "send"),
        KeyAction("new_line", ("alt+enter", "ctrl+j", "shift+enter"), "new line; so does \\ Enter"),
        KeyAction("stop", ("escape",), "stop the reply; back to the prompt"),
        KeyAction("interrupt", ("ctrl+c",), "copy what is selected, stop or clear"),
        KeyAction("new_session", ("ctrl+n",), "new session"),
        KeyAction("close_session", ("ctrl+w",), "off the list, when nothing is written"),
        KeyAction("next_session", ("ctrl+pagedown",), "the next session"),
        KeyAction("previous_session", ("ctrl+pageup",), "the session before"),
        *(KeyAction(f"session_{n}", (f"alt+{n}",), f"session {n} of the list") for n in FIRST_SESSIONS),
        KeyAction("commands", ("ctrl+p",), "every command by name"),
        KeyAction("sessions", ("ctrl+b",), "the list of sessions"),
        KeyAction("engine", ("f2",), "the engine from inside"),
        KeyAction("search", ("ctrl+f",), "search in all sessions"),
        KeyAction("retry", ("ctrl+r",), "make the last reply again"),
        KeyAction("copy_code", ("ctrl+y",), "copy the last code block"),
        KeyAction("thinking", ("ctrl+t",), "open or close thinking"),
        KeyAction("editor", ("ctrl+g",), "write in $EDITOR"),
        KeyAction("open_pasted", ("ctrl+o",), "open what was pasted as a chip"),
        KeyAction("mark_up", ("ctrl+up",), "mark the turn above"),
        KeyAction("mark_down", ("ctrl+down",), "mark the turn below"),
        KeyAction("page_up", ("pageup",), "scroll up"),
        KeyAction("page_down", ("pagedown",), "scroll down"),
        KeyAction("help", ("f1",), "keys and commands"),
        KeyAction("leave", ("ctrl+q",), "leave"),
        KeyAction("leave_empty", ("ctrl+d",), "leave, when nothing is written"),
        KeyAction("turn_up", ("up", "k"), "mark the turn above", at_turn=True),
        KeyAction("turn_down", ("down", "j"), "mark the turn below", at_turn=True),
        KeyAction("turn_first", ("home", "g"), "to the beginning", at_turn=True),
        KeyAction("turn_last", ("end", "G"), "to the end, and on with it", at_turn=True),
        KeyAction("turn_fork", ("f",), "a new session with the turns up to this one", at_turn=True),
        KeyAction("turn_retry", ("r",), "make this reply again", at_turn=True),
        KeyAction("turn_edit", ("e",), "write this turn anew", at_turn=True),
        KeyAction("turn_copy", ("c",), "copy this turn", at_turn=True),
        KeyAction("turn_continue", ("o",), "go on with a reply that broke off", at_turn=True),
    )
}

_WORDS = {"escape": "Esc", "pageup": "PgUp", "pagedown": "PgDn", "delete": "Del", "insert": "Ins"}


def in_words(key: str) -> str:
    """A key as a person reads it: Ctrl+PgDn, F2, Alt+1, ?"""
    *modifiers, last = key.split("+")
    if len(last) == 1:
        shown = last.upper() if modifiers else last
    else:
        shown = sign_of(last) or _WORDS.get(last, last.capitalize())
    return "+".join([*(modifier.capitalize() for modifier in modifiers), shown])


def sign_of(name: str) -> str | None:
    """The visible sign that Textual calls `name`, as in question_mark; None where that is no sign."""
    from textual.keys import REPLACED_KEYS, key_to_character

    sign = key_to_character(REPLACED_KEYS.get(name, name)) if name else None
    return sign if sign and sign.isprintable() and not sign.isspace() else None


def bound(name: str, action: str, label: str = "", priority: bool = False) -> Binding:
    """The binding of an action of the table; `label` puts it into the footer."""
    from textual.binding import Binding

    about = ACTIONS[name]
    return Binding(
        ",".join(about.keys), action, label or about.about, show=bool(label), priority=priority, id=about.name
    )
