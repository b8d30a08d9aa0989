"""The small screens over the conversation: a question, a search, the keys. Owns what they ask; acts on nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ..chat.foreign import neutralise
from .commands import COMMANDS
from .keymap import Keys
from .keys import ACTIONS, FIRST_SESSIONS, bound

Hits = Sequence[tuple[str, str, str]]


class Dialog(ModalScreen[str | None]):
    """A box in the middle; Esc closes it without an answer."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "close", show=False)]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (15, "-high")]  # noqa: RUF012 - the base class declares it so


class Question(Dialog):
    """Asks for one line."""

    def __init__(self, title: str, value: str = "") -> None:
        super().__init__()
        self._title, self._value = title, value

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._title, classes="dialog-head", markup=False)
            yield Input(self._value, compact=True)
            yield Static("Enter keeps it · Esc leaves things as they are", classes="dialog-foot")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


class Confirm(Dialog):
    """Asks before something is lost. Enter, the key just pressed, is no answer."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "dismiss('yes')", "yes", show=False)]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._question, classes="dialog-head", markup=False)
            yield Static("y: yes · Esc: no", classes="dialog-foot -needed")


class Search(Dialog):
    """Finds a session by a word in its title or in any of its turns."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "move(1)", show=False, priority=True),
        Binding("up", "move(-1)", show=False, priority=True),
    ]

    def __init__(self, find: Callable[[str], Awaitable[Hits]], text: str = "") -> None:
        super().__init__()
        self._find, self._text = find, text

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -tall"):
            yield Static("Search all sessions", classes="dialog-head")
            yield Input(self._text, placeholder="a word", compact=True)
            yield OptionList(compact=True)
            yield Static("Enter opens · Esc closes", classes="dialog-foot")

    def on_input_changed(self, event: Input.Changed) -> None:
        self.run_worker(self._search(event.value.strip()), exclusive=True)

    def on_input_submitted(self) -> None:
        chosen = self.query_one(OptionList).highlighted_option
        if chosen:
            self.dismiss(chosen.id)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def action_move(self, step: int) -> None:
        """Moves the mark in the list; the input keeps the keys."""
        options = self.query_one(OptionList)
        (options.action_cursor_down if step > 0 else options.action_cursor_up)()

    async def _search(self, text: str) -> None:
        hits = await self._find(text) if text else []
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options(Option(_hit(title, body, text), id=session_id) for session_id, title, body in hits[:50])
        if hits:
            options.highlighted = 0


class Help(Dialog):
    """Every key in force and every command."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bound("help", "dismiss(None)", priority=True),
        Binding("q,enter", "dismiss(None)", show=False),
    ]

    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self._keys = keys

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -tall"):
            yield Static("Keys and commands", classes="dialog-head")
            with VerticalScroll():
                yield Static(_table(_key_lines(self._keys)))
                yield Static("At a marked turn", classes="dialog-part")
                yield Static(_table(_key_lines(self._keys, at_turn=True)))
                yield Static("By name", classes="dialog-part")
                yield Static(_table([(f"/{one.name} {one.takes}", one.about) for one in COMMANDS]))
            foot = "Esc closes · // sends a slash · [keys] in config.toml changes keys"
            yield Static(foot, classes="dialog-foot", markup=False)


def _key_lines(keys: Keys, at_turn: bool = False) -> list[tuple[str, str]]:
    """(keys, what they do) of every action that has one; the numbered sessions are one line where they are as usual."""
    numbered = {f"session_{n}" for n in FIRST_SESSIONS}
    usual = all(keys.by_action[name] == ACTIONS[name].keys for name in numbered)
    lines = []
    for name, action in ACTIONS.items():
        if usual and name == "session_1" and not at_turn:
            lines.append(("Alt+1..9", "go to that session of the list"))
        elif action.at_turn == at_turn and keys.by_action[name] and not (usual and name in numbered):
            lines.append((keys.shown(name), action.about))
    return lines


def _table(rows: Sequence[tuple[str, str]]) -> Content:
    width = max(len(left) for left, _ in rows) + 2
    return Content("\n").join(
        Content.assemble((f"{left:<{width}}", "$primary"), (right, "$foreground")) for left, right in rows
    )


def _hit(title: str, body: str, wanted: str) -> Content:
    """The title and the words around the hit."""
    at = max(body.casefold().find(wanted.casefold()) - 20, 0)
    around = " ".join(neutralise(body[at : at + 120]).split())
    line = Content.assemble((f"{neutralise(title)}\n", "bold"), (f"{'…' * (at > 0)}{around}", "$foreground-muted"))
    return line
