"""What a saved conversation is: its values as faces see them, and its text as a file. Owns no storage."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

from ..engine.events import Timing, Usage
from ..errors import ConfigError

State = Literal["streaming", "done", "cut", "stopped", "error", "interrupted"]
"""streaming: some process is making this reply now. cut: it came to the limit of its tokens. interrupted: that process
ended before the reply did."""

CONTINUABLE = frozenset({"interrupted", "stopped", "cut", "error"})
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_TITLE_LEN = 60


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation. `title` is what its owner called it, or the start of its first message. `parent` is the session
    it was forked from. Times are Unix seconds. `last_state`: how its last turn stands. `busy`: another live process has
    it open."""

    id: str
    title: str = ""
    model: str | None = None
    system: str | None = None
    params: Mapping[str, float] = field(default_factory=dict)
    created: float = 0.0
    updated: float = 0.0
    parent: str | None = None
    head: str | None = None
    num_messages: int = 0
    busy: bool = False
    last_state: State = "done"

    @property
    def interrupted(self) -> bool:
        """Whether its process died before the last turn was done."""
        return self.last_state == "interrupted"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `parent` is the turn before it, None at the start; `error` is why a reply broke off."""

    id: str
    session: str
    role: str
    content: str
    parent: str | None = None
    reasoning: str = ""
    state: State = "done"
    model: str | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    error: str | None = None
    created: float = 0.0


def new_id() -> str:
    """A ULID: sorts by time, 26 characters that can be read aloud."""
    value = (int(time.time() * 1000) << 80) | secrets.randbits(80)
    return "".join(_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5))


def short_id(session_id: str) -> str:
    """The id as people see it: its last letters, for the first ones are the time and nearly alike."""
    return session_id[-8:].lower()


def title_of(text: str) -> str:
    """A title from a first message: its first line, shortened at a word."""
    line = " ".join(text.split("\n", 1)[0].split())
    if len(line) <= _TITLE_LEN:
        return line
    return line[: _TITLE_LEN - 1].rsplit(" ", 1)[0] + "…"


def owner_name() -> str:
    """This process, told apart from a later one of the same id, and from another store in it."""
    return f"{os.getpid()}:{started_at(os.getpid())}:{secrets.token_hex(4)}"


def is_alive(owner: str | None) -> bool:
    """Whether the process that `owner_name` described still runs."""
    if not owner:
        return False
    pid, _, rest = owner.partition(":")
    return pid.isdecimal() and (start := started_at(int(pid))) is not None and str(start) == rest.partition(":")[0]


def started_at(pid: int) -> int | None:
    """When a process began, in Unix seconds; None where there is none."""
    import psutil

    try:
        return int(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def as_json(session: Session, messages: Sequence[Message]) -> dict[str, Any]:
    """A session as one JSON object, with all that is known of it."""
    about = asdict(session)
    for name in ("head", "busy", "last_state", "num_messages"):
        about.pop(name)
    return {"format": "mlxpaged-session", "version": 1, **about, "messages": [_message_json(one) for one in messages]}


def from_json(record: Any) -> tuple[Session, list[Message]]:
    """A session and its turns from what `as_json` made. Raises ConfigError for anything else."""
    if not isinstance(record, dict) or record.get("format") != "mlxpaged-session":
        raise ConfigError("it holds no conversation of mlxpaged; `mlxpaged sessions export --format json` makes one")
    if record.get("version") != 1:
        raise ConfigError(f"it is of version {record.get('version')}, this mlxpaged reads version 1; update mlxpaged")
    about = {name: value for name, value in record.items() if name not in {"format", "version", "messages"}}
    try:
        session = msgspec.convert(about, Session)
        turns = [msgspec.convert({"session": session.id, **turn}, Message) for turn in record["messages"]]
        return session, turns
    except (msgspec.ValidationError, LookupError, TypeError) as error:
        raise ConfigError(f"a conversation in it is damaged ({error})") from error


def as_markdown(session: Session, messages: Sequence[Message]) -> str:
    """A session to read or to paste elsewhere."""
    lines = [f"# {session.title or 'Untitled'}", ""]
    about = [f"model {session.model}"] if session.model else []
    about.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(session.created)))
    lines += [f"_{', '.join(about)}_", ""]
    if session.system:
        lines += ["## System", "", session.system, ""]
    for message in messages:
        remark = "" if message.state == "done" else f" ({message.state})"
        lines += [f"## {message.role.capitalize()}{remark}", "", message.content, ""]
    return "\n".join(lines)


def _message_json(message: Message) -> dict[str, Any]:
    """`content` is always there, the others where there is something to say."""
    about = {name: value for name, value in asdict(message).items() if name != "session" and value not in (None, "")}
    return {"content": "", **about}
