"""What keys and commands do on the chat screen. Owns one method per command; draws nothing itself."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.screen import Screen

from ..chat.sessions import short_id, title_of
from ..chat.values import SETTABLE, with_value
from ..errors import BadParameter, MlxpagedError
from .commands import COMMANDS, Command
from .dialogs import Confirm, Help, Question, Search
from .figures import values_in_words

if TYPE_CHECKING:
    from .keymap import Keys
    from .prompt import Prompt
    from .state import Talk
    from .tracker import Tracker
    from .transcript import Transcript


class Deeds(Screen[None]):
    """The half of the chat screen that acts."""

    tracker: Tracker
    chosen: str
    editing: str | None
    keys: Keys

    if TYPE_CHECKING:

        @property
        def talks(self) -> list[Talk]: ...
        @property
        def talk(self) -> Talk: ...
        @property
        def prompt(self) -> Prompt: ...
        @property
        def transcript(self) -> Transcript: ...
        async def show_session(self, session_id: str) -> None: ...
        def toggle(self, pane: str) -> None: ...

    def do(self, command: Command, words: str) -> None:
        """Carries out a command, given what followed its name."""
        getattr(self, command.action)(words)

    def action_do(self, name: str) -> None:
        """The same for a key."""
        self.do(next(command for command in COMMANDS if command.name == name), "")

    def tell(self, text: str, severe: bool = False) -> None:
        """A line to read once."""
        self.notify(text, severity="error" if severe else "information", timeout=6, markup=False)

    def attempt(self, deed: Coroutine[Any, Any, object]) -> None:
        """Runs something that may be refused; the refusal is told."""

        async def told() -> None:
            try:
                await deed
            except MlxpagedError as error:
                self.tell(str(error), severe=True)

        self.run_worker(told(), group="deeds")

    # -- commands ----------------------------------------------------------------------------------------------

    def do_new(self, words: str) -> None:
        self.attempt(self.show_session(self._another().id))

    def _another(self) -> Talk:
        """An empty session that the model of the one on the screen answers."""
        return self.tracker.new(self.tracker.connection_of(self.talk).model)

    def do_fork(self, words: str) -> None:
        self.transcript.action_fork()

    async def fork_at(self, turn_id: str) -> None:
        """A session of its own up to a turn, on the screen."""
        talk = await self.tracker.fork(self.chosen, turn_id)
        await self.show_session(talk.id)
        self.prompt.focus()  # what is typed next is for it, not for the turns

    def do_retry(self, words: str) -> None:
        self.attempt(self.tracker.retry(self.chosen))

    def do_undo(self, words: str) -> None:
        self.attempt(self._undo())

    async def _undo(self) -> None:
        text = await self.tracker.take_back(self.chosen)
        if text:
            self.prompt.put(text)

    def do_edit(self, words: str) -> None:
        self.transcript.action_edit()

    def begin_edit(self, turn_id: str) -> None:
        """Puts a turn's text into the prompt; sending it replaces the turn."""
        self.editing = turn_id
        self.prompt.put(self.talk.turn(turn_id).text)
        self.prompt.focus()

    def do_continue(self, words: str) -> None:
        self.transcript.action_go_on()

    def do_stop(self, words: str) -> None:
        self.tracker.stop(self.chosen)

    def do_clear(self, words: str) -> None:
        self.attempt(self.tracker.clear(self.chosen))

    def do_rename(self, words: str) -> None:
        def given(title: str | None) -> None:
            if title and title.strip():
                self.attempt(self.tracker.rename(self.chosen, title))

        if words:
            given(words)
        else:
            self.app.push_screen(Question("Rename the session", self.talk.title), given)

    def do_delete(self, words: str) -> None:
        session_id = self.chosen

        def given(answer: str | None) -> None:
            if answer == "yes":
                self.attempt(self._leave_for_good(session_id, self.tracker.remove))

        self.app.push_screen(Confirm(f"Delete “{title_of(self.talk.name)}” for good?"), given)

    def do_close(self, words: str) -> None:
        self.attempt(self._leave_for_good(self.chosen, self.tracker.put_away))

    async def _leave_for_good(self, session_id: str, part: Callable[[str], Awaitable[None]]) -> None:
        """Another session on the screen first, then `part` with the old one."""
        if session_id == self.chosen:
            ids = [talk.id for talk in self.talks]
            at = ids.index(session_id)
            await self.show_session((ids[at + 1 :] or ids[:at][-1:] or [self._another().id])[0])
        await part(session_id)

    def do_system(self, words: str) -> None:
        if words:
            self.attempt(self.tracker.set_system(self.chosen, None if words == "off" else words))
        self.tell(f"System message: {words or self.talk.system}" if words or self.talk.system else "No system message.")

    def do_params(self, words: str) -> None:
        try:
            params = _set(dict(self.talk.params), words.replace("=", " ").split(), self.tracker.given.params)
        except BadParameter as error:
            self.tell(str(error), severe=True)
            return
        if words:
            self.attempt(self.tracker.set_params(self.chosen, params))
        parts = (("In this session", params), ("As mlxpaged was started", self.tracker.given.params))
        shown = [f"{head}: {values_in_words(values)}." for head, values in parts if values]
        self.tell(" ".join(shown) or f"The model's own values. Settable: {', '.join(SETTABLE)}; VALUE default unsets.")

    def do_copy(self, words: str) -> None:
        code = self.transcript.last_code()
        if code is None:
            self.tell("There is no code block on the screen.")
            return
        self.app.copy_to_clipboard(code)
        self.tell(f"Copied the last code block, {code.count(chr(10)) + 1} lines.")

    def do_export(self, words: str) -> None:
        kind = words or "md"
        if kind not in {"md", "json"}:
            self.tell("write /export md or /export json", severe=True)
            return
        file = Path(f"mlxpaged-{short_id(self.chosen)}.{kind}")
        try:
            file.write_text(self.tracker.export(self.chosen, kind), encoding="utf-8")
        except OSError as error:
            self.tell(f"{file} cannot be written: {error.strerror}", severe=True)
        else:
            self.tell(f"Wrote {file.resolve()}.")

    def do_search(self, words: str) -> None:
        def given(session_id: str | None) -> None:
            if session_id:
                self.attempt(self.show_session(session_id))

        self.app.push_screen(Search(self.tracker.search, words), given)

    def do_stats(self, words: str) -> None:
        self.toggle("details")

    def do_sessions(self, words: str) -> None:
        self.toggle("sidebar")

    def do_think(self, words: str) -> None:
        self.transcript.toggle_thinking()

    def do_theme(self, words: str) -> None:
        self.app.search_themes()

    def do_help(self, words: str) -> None:
        self.app.push_screen(Help(self.keys))

    def do_bye(self, words: str) -> None:
        self.app.run_worker(self.app.action_quit())

    # -- keys --------------------------------------------------------------------------------------------------

    def action_escape(self) -> None:
        """Stops, or goes back: whichever is nearest."""
        if self.editing:
            self.editing = None
            self.prompt.put("")
        elif self.focused is not self.prompt:
            self.transcript.action_follow()
            self.prompt.focus()
        elif self.talk.phase.is_live:
            self.tracker.stop(self.chosen)
        else:
            self.clear_selection()

    def action_interrupt(self) -> None:
        """Copies what is selected, else stops the reply, else clears the prompt, else says how to leave."""
        if selected := self.get_selected_text() or self.prompt.selected_text:
            self.app.copy_to_clipboard(selected)
            self.clear_selection()
            self.tell("Copied.")
        elif self.talk.phase.is_live:
            self.tracker.stop(self.chosen)
        elif self.prompt.text:
            self.prompt.put("")
        else:
            ways = [self.keys.hint(name, "") for name in ("leave", "leave_empty")]
            self.tell(f"{' or '.join(way for way in ways if way) or '/bye'} leaves.")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that leave something behind do so only while nothing is written; else they are the prompt's."""
        return not (action in {"close_if_empty", "leave_if_empty"} and self.is_mounted and self.prompt.text)

    def action_close_if_empty(self) -> None:
        self.do_close("")

    def action_leave_if_empty(self) -> None:
        self.do_bye("")

    def action_step(self, step: int) -> None:
        """The next or the previous session of the list."""
        ids = [talk.id for talk in self.talks]
        self.attempt(self.show_session(ids[(ids.index(self.chosen) + step) % len(ids)]))

    def action_go(self, number: int) -> None:
        """The session of that number, counted from 1."""
        if number <= len(self.talks):
            self.attempt(self.show_session(self.talks[number - 1].id))

    async def action_mark(self, step: int) -> None:
        """Marks a turn, whose keys then work."""
        self.transcript.focus()
        await self.transcript.action_mark(step)

    def action_page(self, step: int) -> None:
        """Scrolls the transcript, wherever the cursor is."""
        if step < 0:
            self.transcript.scroll_page_up(animate=False)
        else:
            self.transcript.scroll_page_down(animate=False)

    def action_open_chips(self) -> None:
        """Shows pasted text in full."""
        self.prompt.open_chips()

    def action_editor(self) -> None:
        """Hands the prompt to $EDITOR."""
        editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
        with tempfile.NamedTemporaryFile("w+", suffix=".md", encoding="utf-8") as file:
            file.write(self.prompt.written)
            file.flush()
            try:
                with self.app.suspend():
                    subprocess.run([*editor, file.name], check=False)
            except OSError as error:
                self.tell(f"{editor[0]} cannot be run ({error.strerror}); set EDITOR to one that can", severe=True)
                return
            self.prompt.put(Path(file.name).read_text(encoding="utf-8").rstrip("\n"))


def _set(params: dict[str, float], words: list[str], others: Mapping[str, float]) -> dict[str, float]:
    """`params` with NAME VALUE pairs applied; `others` hold where they say nothing. Raises BadParameter."""
    if len(words) % 2:
        raise BadParameter(f"{words[-1]} has no value; write /params NAME VALUE, as in: /params temperature 0.7")
    for name, text in zip(words[::2], words[1::2], strict=True):
        params = with_value(params, name, text, others)
    return params
