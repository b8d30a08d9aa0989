"""One conversation of `mlxpaged chat`, kept in the store. Owns what a turn, a retry or an edit does to it, its sampling
values and the files that go with the next message; knows nothing of terminals or engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..chat.messages import Messages
from ..chat.reply_draft import ReplyDraft
from ..chat.sessions import CONTINUABLE, Message, Session
from ..chat.store import Store
from ..chat.values import SETTABLE, with_value
from ..errors import ConfigError
from ..sched.requests import SamplingParams
from .options import sampling_values

_THINK = "enable_thinking"
_LARGEST_FILE = 1 << 20


class Conversation:
    """The session a person talks in; `new`, `open` and `fork` change which one that is.

    `standing` values (of the configuration) hold where the session says nothing, `typed` ones (flags of this call) over
    the session's, until `set_value` sets them. Neither is saved.
    """

    def __init__(
        self,
        store: Store,
        session: Session | None = None,
        system: str | None = None,
        standing: Mapping[str, float] | None = None,
        typed: Mapping[str, float] | None = None,
    ) -> None:
        self.store = store
        self._standing = dict(standing or {})
        self._typed = dict(typed or {})
        self.id = (session or store.create(system=system)).id
        self._files: list[tuple[str, str]] = []
        if session and system is not None:
            self.system = system

    # -- what it is --------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """As the store has it now."""
        return self.store.session(self.id)

    @property
    def turns(self) -> list[Message]:
        """The turns that count, first one first."""
        return self.store.messages(self.id)

    @property
    def system(self) -> str | None:
        """The system message."""
        return self.session.system

    @system.setter
    def system(self, text: str | None) -> None:
        self.store.set_system(self.id, text or None)

    @property
    def values(self) -> dict[str, float]:
        """The sampling values asked for, which go over the model's own defaults."""
        own = {name: value for name, value in self.session.params.items() if name != _THINK}
        return {**self._standing, **own, **self._typed}

    @property
    def thinks(self) -> bool | None:
        """Whether the model is asked to think first; None: as its template likes."""
        value = self.session.params.get(_THINK)
        return None if value is None else bool(value)

    @thinks.setter
    def thinks(self, wanted: bool) -> None:
        self.store.set_params(self.id, {**self.session.params, _THINK: float(wanted)})

    # -- turns -------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> None:
        """Adds what the person says, after the files that wait for it; it is on disk when this returns."""
        blocks = [f"{name}:\n```\n{content}\n```" for name, content in self._files]
        self.store.ask(self.id, "\n\n".join([*blocks, text]))
        self._files.clear()

    def begin_reply(self, model: str) -> ReplyDraft:
        """The reply to the last turn, as it comes."""
        self.store.set_model(self.id, model)
        return self.store.reply(self.id, model)

    def take_back(self) -> None:
        """Leaves out the last thing said: it got no answer."""
        last = self.last("user")
        if last:
            self.store.rewind(self.id, last.parent)

    def last(self, role: str) -> Message | None:
        """The last turn of a role."""
        return next((turn for turn in reversed(self.turns) if turn.role == role), None)

    def unanswered(self) -> bool:
        """Whether the last turn is the person's, or a reply without a word."""
        turns = self.turns
        return bool(turns) and (turns[-1].role == "user" or not turns[-1].content)

    def to_continue(self) -> Message | None:
        """The reply that can go on: the last turn, when it was cut short after its first words."""
        turns = self.turns
        return turns[-1] if turns and turns[-1].state in CONTINUABLE and turns[-1].content else None

    def retry(self) -> None:
        """Leaves out the last reply, so that its question is answered anew. Raises ConfigError: nothing was asked."""
        last = self._last_question()
        self.store.rewind(self.id, last.id)

    def undo(self) -> str:
        """Leaves out the last question and its reply; the question. Raises ConfigError: nothing was asked."""
        last = self._last_question()
        self.store.rewind(self.id, last.parent)
        return last.content

    def _last_question(self) -> Message:
        last = self.last("user")
        if last is None:
            raise ConfigError("nothing was asked yet in this conversation")
        return last

    # -- which session -----------------------------------------------------------------------------------------

    def new(self) -> None:
        """Begins another conversation with the same model, system message and values; this one stays saved."""
        old = self.session
        fresh = self.store.create(old.model, old.system, old.params)
        self._go_to(fresh.id)

    def open(self, session: Session) -> None:
        """Goes on with a saved conversation. Raises SessionBusy."""
        self.store.claim(session.id)
        self._go_to(session.id)

    def fork(self) -> None:
        """Goes on in a copy; the session it came from stays as it is."""
        self._last_question()
        self._go_to(self.store.fork(self.id).id)

    def _go_to(self, session_id: str) -> None:
        if session_id != self.id:
            self.store.release(self.id)
            self.id = session_id

    # -- what goes to the model --------------------------------------------------------------------------------

    def attach(self, path: Path) -> int:
        """Puts a text file before the next message; its characters. Raises ConfigError."""
        try:
            if path.stat().st_size > _LARGEST_FILE:
                raise ConfigError(
                    f"{path} has {path.stat().st_size:,} bytes; at most {_LARGEST_FILE:,} go into a message"
                )
            text = path.read_text(encoding="utf-8").rstrip("\n")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeError:
            raise ConfigError(f"{path} is not a text file in UTF-8") from None
        self._files.append((path.name, text))
        return len(text)

    def messages(self, resume: bool = False) -> Messages:
        """The conversation as the backend takes it; `resume`: the model goes on with the last reply."""
        system = ({"role": "system", "content": self.system},) if self.system else ()
        turns = tuple({"role": one.role, "content": one.content} for one in self.turns if one.content)
        extra = {} if self.thinks is None else {_THINK: self.thinks}
        return Messages((*system, *turns), extra, add_generation_prompt=not resume, continue_final_message=resume)

    def sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        """How the next reply is sampled; `defaults` are the model's own values."""
        return SamplingParams(**sampling_values(self.values, defaults))

    def shown_values(self, defaults: Mapping[str, float]) -> str:
        """Every settable value as it stands, one per line."""
        sampling = self.sampling(defaults)
        shown = {name: getattr(sampling, name) for name in SETTABLE}
        return "\n".join(f"{name:18} {'-' if value is None else value}" for name, value in shown.items())

    def set_value(self, name: str, text: str) -> None:
        """Sets one sampling value for this session, or gives it back to the model with `default`; see chat/values.py.
        Raises BadParameter."""
        self.store.set_params(self.id, with_value(self.session.params, name, text, self.values))
        for values in (self._standing, self._typed):
            values.pop(name.removeprefix("--").replace("-", "_"), None)
