"""What widgets say to the screen that holds them. Frozen values posted upwards; nothing here acts."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message


@dataclass
class Send(Message):
    """The person wants this text sent."""

    text: str


@dataclass
class Choose(Message):
    """The person picked a session."""

    session_id: str


@dataclass
class Fork(Message):
    """A new session that starts with everything up to this turn."""

    turn_id: str


@dataclass
class Edit(Message):
    """This turn of the person's is to be written anew."""

    turn_id: str


@dataclass
class Retry(Message):
    """This reply, or the reply to this turn, is to be made again."""

    turn_id: str


@dataclass
class GoOn(Message):
    """A reply that broke off is to be continued."""

    turn_id: str


@dataclass
class CopyText(Message):
    """Text for the clipboard; `what` names it in the confirmation."""

    text: str
    what: str


@dataclass
class Uncovered(Message):
    """No dialog lies over the conversation any more."""


@dataclass
class Tell(Message):
    """A line the person should read once."""

    text: str
    severe: bool = False
