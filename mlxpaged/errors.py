"""Every error a caller may want to tell apart. Owns the tree, each branch's exit code, and how a refused value is told;
knows nothing else.

MlxpagedError
  ConfigError            bad flag, file or environment        exit 2
  ModelNotFound          missing, gated or unreadable model   exit 3, HTTP 404
  UnsupportedModel       mlx-lm cannot load it                exit 3, HTTP 400
  ModelTooLarge          does not fit the memory              exit 1, HTTP 507
  Unreachable            a server or the network              exit 4
  RequestError           the request itself is wrong          HTTP 400
    PromptTooLong, BadParameter
  Overloaded             queue full or draining               HTTP 429 / 503
    ModelLoading         not yet, the model is being loaded
  NoSession, SessionBusy no such session, or it is in use     exit 1
    UnreadableSession    there may be one: the file is damaged or locked
  EngineError            a step failed                        HTTP 500, finish_reason "error"
  LayoutError, InvariantError   our bug; never caught below the service
"""

from __future__ import annotations

import json
from typing import Any


class MlxpagedError(Exception):
    """Base of all errors meant for a person; its text is one line with numbers and a way out."""

    exit_code = 1


class ConfigError(MlxpagedError):
    """A flag, a file or an environment variable holds a value that cannot work."""

    exit_code = 2


class ModelNotFound(MlxpagedError):
    """The named model is not on disk and cannot be fetched, is gated, or its files are damaged."""

    exit_code = 3


class UnsupportedModel(MlxpagedError):
    """The model was found, but no path of ours and none of mlx-lm's can run it."""

    exit_code = 3


class ModelTooLarge(MlxpagedError):
    """The model does not fit this machine's memory, or not with the context that is asked for."""


class Unreachable(MlxpagedError):
    """A server or the network did not answer."""

    exit_code = 4


class NoSession(MlxpagedError):
    """No saved session has that id or name."""


class UnreadableSession(NoSession):
    """Nobody can say whether there is such a session, or what was said in it: the file cannot be read."""


class SessionBusy(MlxpagedError):
    """Another process that still runs has the session open."""


class RequestError(MlxpagedError):
    """One request is wrong; nothing else is affected. `param` names the field at fault."""

    param: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """The prompt does not fit the context or the pool, whatever else runs. `num_tokens` and `context_len`, where known,
    are the numbers by which agents shorten a conversation."""

    num_tokens: int | None = None
    context_len: int | None = None


class BadParameter(RequestError):
    """A sampling or request parameter is out of range."""


class Overloaded(MlxpagedError):
    """The queue is full or the engine is draining; the same request may succeed later."""


class ModelLoading(Overloaded):
    """The model is still being loaded, or about to be."""


class EngineError(MlxpagedError):
    """A step failed on the device; the requests in it end, the engine goes on."""


class LayoutError(MlxpagedError):
    """An array does not have the layout a kernel was promised: our bug."""


class InvariantError(MlxpagedError):
    """A stated invariant does not hold: our bug."""


def shown(value: Any, most: int = 60) -> str:
    """A refused value as its sender wrote it, in JSON, of `most` characters at most."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= most else f"{text[: most - 3]}..."
