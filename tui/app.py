"""The full-screen app. Owns its beginning and end, the themes and the clipboard; what is on the screen is the chat
screen's."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, ClassVar

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.app import App
from textual.notifications import SeverityLevel
from textual.screen import ModalScreen

from .. import paths
from ..chat.store import Store
from ..errors import ConfigError, MlxpagedError
from .changes import Change
from .chat_screen import ChatScreen
from .commands import PaletteCommands
from .connection import Connect, Link
from .keymap import Keys, keys_from
from .keys import bound
from .messages import Uncovered
from .state import Given
from .themes import NIGHT, THEMES
from .tracker import Tracker


class TuiApp(App[None]):
    """Several live sessions over one engine.

    `session`: what to open first, by id or title; None: a new one. `theme`: one of Textual's or ours; None: the one
    used last. `given`: system message and sampling values. `keys`: a person's own keys, by action.
    `models`: where there are several, a new session is opened for each (`session` stands for the first one's).
    """

    CSS_PATH: ClassVar = ["chat_screen.tcss", "sidebar.tcss", "transcript.tcss", "details.tcss", "dialogs.tcss"]
    COMMANDS: ClassVar = {PaletteCommands}
    BINDINGS: ClassVar = [
        bound("leave", "quit", priority=True),
        bound("commands", "command_palette", priority=True),
    ]
    ENABLE_COMMAND_PALETTE = True
    TITLE = "mlxpaged"

    def __init__(
        self,
        store: Store,
        connect: Connect,
        session: str | None = None,
        theme: str | None = None,
        given: Given | None = None,
        keys: Mapping[str, object] | None = None,
        models: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.keys = keys_from(keys or {})
        _teach_alt_keys(self.keys)
        self._told: Link | None = None  # whose notice was shown
        self._held: list[Callable[[], None]] = []  # notices for when no dialog is open
        self.tracker = Tracker(store, connect, self._changed, models, given)
        self.rescued: str | None = None
        """A file that took what could not be saved; known once the app has ended."""
        self._first = store.find(session).id if session else None
        self._chat: ChatScreen | None = None
        self._left = False
        for one in THEMES:
            self.register_theme(one)
        if theme and theme not in self.available_themes:
            raise ConfigError(f"--theme is {theme!r}; it must be one of {', '.join(sorted(self.available_themes))}")
        self._asked_theme = theme

    async def on_mount(self) -> None:
        self.theme = self._asked_theme or _remembered_theme(self.available_themes)
        self.theme_changed_signal.subscribe(self, lambda theme: _remember_theme(theme.name))
        await self.tracker.load()
        first = await self._open_sessions()
        self.set_keymap(self.keys.keymap)
        self._chat = ChatScreen(self.tracker, first, self.keys)
        await self.push_screen(self._chat)
        for line in self.keys.complaints:
            self.notify(line, title="[keys] of config.toml", severity="warning", timeout=15, markup=False)
        self.run_worker(self._greet())

    async def _open_sessions(self) -> str:
        """New sessions in the order of the models, each with its own, and one for each text that was left half written;
        the id of the one to show."""
        first, others = self.tracker.connections.first, self.tracker.connections.others
        for one in reversed(others):
            self.tracker.new(one.model)
        model = first.model if others else None
        half_written = await self.tracker.take_up(model)
        return self._first or (half_written or self.tracker.new(model)).id

    async def action_quit(self) -> None:
        """Stops what runs, saves, leaves."""
        if self._chat:
            self._chat.write_down()
        self._left = True
        self.rescued = await self.tracker.close()
        self.exit()

    async def run_async(self, **how: Any) -> None:
        """Textual's; what runs when the app ends in another way, by a bug or with its terminal, was interrupted."""
        try:
            await super().run_async(**how)
        finally:
            self._chat = None
            if not self._left:
                self.rescued = await self.tracker.close("interrupted")

    @property
    def broken(self) -> Exception | None:
        """The bug that ended the app, for whoever runs it to tell."""
        return self._exception

    def _fatal_error(self) -> None:
        """Textual's would print a hundred kilobytes: the traceback with every local."""
        self._close_messages_no_wait()

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = True,
    ) -> None:
        """Textual's, but never over a dialog, which it would cover: what comes meanwhile waits until that is closed."""
        tell = partial(super().notify, message, title=title, severity=severity, timeout=timeout, markup=markup)
        if self._covered:
            self._held.append(tell)
        else:
            tell()

    def on_uncovered(self, event: Uncovered) -> None:
        while self._held and not self._covered:  # one dialog may follow another
            self._held.pop(0)()

    @property
    def _covered(self) -> bool:
        return any(isinstance(one, ModalScreen) for one in self.screen_stack)

    def _tell_where(self) -> None:
        """Says once of each server that answers where it is: also of one that took a dead one's place."""
        engine = self.tracker.connections.first.engine
        if engine and engine.link is not self._told:
            self._told = engine.link
            if engine.link.notice:
                self.notify(engine.link.notice, timeout=8, markup=False)

    async def _greet(self) -> None:
        """Reaches the engine while the person may already write."""
        with suppress(MlxpagedError):
            await self.tracker.connections.first.ready()
        for one in self.tracker.connections.others:
            if not one.engine and not one.note:  # nobody has asked it yet
                try:
                    await one.look()
                except MlxpagedError as error:
                    self.notify(
                        f"{error}", title=f"{one.model} is not there", severity="error", timeout=15, markup=False
                    )

    def _changed(self, session_id: str, change: Change) -> None:
        if change is Change.ENGINE:
            self._tell_where()
        if self._chat:
            self._chat.frames.changed(session_id, change)


class _AltKeys(Enum):
    ENTER = "alt+enter"


def _teach_alt_keys(keys: Keys) -> None:
    """Textual reads Escape and a digit as the sign that Option and the digit type on a US Mac keyboard, "™" for Alt+2,
    and Escape and Enter as Enter. Here both are keys with Alt; a typed "™" stays a sign, for it comes alone. Escape and
    f is a word to the right, unless a person took Alt+F for something."""
    table: dict[str, object] = ANSI_SEQUENCES_KEYS  # type: ignore[assignment]
    own = {key.removeprefix("alt+") for taken in keys.by_action.values() for key in taken if key.startswith("alt+")}
    for sign in own | set("123456789"):
        table.pop(f"\x1b{sign}", None)
    table["\x1b\r"] = (_AltKeys.ENTER,)


def _remembered_theme(known: Container[str]) -> str:
    with suppress(OSError, ValueError, LookupError, TypeError):
        name = json.loads((paths.state_dir() / "tui.json").read_text(encoding="utf-8"))["theme"]
        if name in known:
            return str(name)
    return NIGHT.name


def _remember_theme(name: str) -> None:
    with suppress(OSError):
        paths.state_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
        (paths.state_dir() / "tui.json").write_text(json.dumps({"theme": name}), encoding="utf-8")
