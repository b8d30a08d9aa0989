"""The lines above and below the conversation. Owns their words; knows no session's turns."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content

from ..chat.foreign import neutralise
from .commands import Command, matching
from .details import NEARLY_FULL
from .keymap import Keys
from .state import Phase, Talk
from .steady import Steady

HINTED = 7


class TitleBar(Horizontal):
    """Left the session, right what answers and how much it does."""

    def compose(self) -> ComposeResult:
        yield Steady(id="title-left")
        yield Steady(id="title-right")

    def show(self, talk: Talk, talks: Sequence[Talk], model: str | None, note: str, failed: bool) -> None:
        """Draws both sides."""
        name = " ".join(neutralise(talk.name).split())
        left = Content.assemble(("▞ mlxpaged", "bold $primary"), ("  │  ", "$foreground-disabled"), (name, "bold"))
        self.query_one("#title-left", Steady).say(left)
        self.query_one("#title-right", Steady).say(self._right(talks, model, note, failed))

    @staticmethod
    def _right(talks: Sequence[Talk], model: str | None, note: str, failed: bool) -> Content:
        if note:
            return Content.styled(
                f"! {neutralise(note)}" if failed else f"◌ {neutralise(note)}", "$error" if failed else "$warning"
            )
        live = [talk for talk in talks if talk.phase.is_live]
        rate = sum(talk.rate.per_s for talk in live)
        writing = sum(talk.phase is Phase.WRITING for talk in live)
        counts = [
            f"{number} {word}" for number, word in ((writing, "writing"), (len(live) - writing, "waiting")) if number
        ]
        words = ", ".join(counts) + (f" · {rate:.0f} tok/s" if writing else "")
        parts = [Content.styled(words, "$success")] if live else []
        parts += [Content.styled(neutralise(model), "$foreground-muted")] if model else []
        return Content.styled("  │  ", "$foreground-disabled").join(parts)


class HintBar(Steady):
    """One or a few lines above the prompt; gone when there is nothing to say."""

    def show(self, content: Content | None) -> None:
        """Draws `content`, or nothing."""
        self.display = content is not None
        self.say(content or Content(""))


def hint_of(talk: Talk, text: str, editing: bool, context_len: int | None, keys: Keys) -> Content | None:
    """What the person should know while `text` is in the prompt; None: nothing. `editing`: it replaces an earlier turn.
    `context_len`: tokens that the model takes, where that is known."""
    share = talk.context_used / context_len if context_len else 0.0
    if found := matching(text):
        return _command_hint(found, keys)
    if editing:
        send, leave = keys.hint("send", "/retry"), keys.hint("stop", "clearing the prompt")
        return Content.styled(f"writing an earlier turn anew · {send} sends it · {leave} leaves it", "$warning")
    if talk.busy:
        return Content.styled("this session is open in another mlxpaged; /fork makes one of your own", "$warning")
    if share > NEARLY_FULL:
        mark, fork = keys.hint("mark_up", "click"), keys.hint("turn_fork", "/fork")
        words = f"the context is {share:.0%} full · /clear, or fork an earlier turn ({mark}, {fork})"
        return Content.styled(words, "$warning")
    return None


def _command_hint(commands: Sequence[Command], keys: Keys) -> Content:
    """The commands that a line may become."""
    lines = []
    for number, command in enumerate(commands[:HINTED]):
        name = f"/{command.name} {command.takes}".rstrip()
        lines.append(
            Content.assemble(
                (f"{name:<23}", "bold $primary" if number == 0 else "$primary"),
                (command.about, "$foreground-muted"),
                (f"  {keys.shown(command.key)}" if command.key else "", "$foreground-disabled"),
                ("  ⇥ Tab" if number == 0 else "", "$foreground-disabled"),
            )
        )
    if len(commands) > HINTED:
        lines.append(Content.styled(f"and {len(commands) - HINTED} more: /help", "$foreground-disabled"))
    return Content("\n").join(lines)
