"""Where the sessions' turns are shown, one session at a time. Owns which of them keep their widgets."""

from __future__ import annotations

from collections.abc import Container

from textual.containers import Vertical

from .keymap import Keys
from .state import Talk
from .transcript import Transcript

KEPT_TRANSCRIPTS = 6


class Stage(Vertical):
    """The transcripts of the sessions looked at last; the newest is the one that is seen."""

    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self._keys = keys
        self._transcripts: dict[str, Transcript] = {}

    def transcript_of(self, session_id: str) -> Transcript | None:
        """The widget of a session, where it has one."""
        return self._transcripts.get(session_id)

    async def show(self, talk: Talk, known: Container[str]) -> None:
        """Puts a session in front. Those that are not `known` any more lose their widgets."""
        transcript = self._transcripts.pop(talk.id, None) or Transcript(talk, self._keys)
        self._transcripts[talk.id] = transcript
        if transcript.parent is None:
            await self.mount(transcript)
        for other_id, other in self._transcripts.items():
            other.display = other_id == talk.id
        for old in [one for one in self._transcripts if one not in known]:
            await self._transcripts.pop(old).remove()
        while len(self._transcripts) > KEPT_TRANSCRIPTS:
            await self._transcripts.pop(next(iter(self._transcripts))).remove()
