"""Every failure as an error body, in OpenAI's shape or, for Anthropic's endpoints, in theirs. Owns the mapping from our
errors to status, type and code; raises nothing and logs only what nobody expected."""

from __future__ import annotations

import logging
import secrets
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..errors import (
    EngineError,
    MlxpagedError,
    ModelLoading,
    ModelNotFound,
    ModelTooLarge,
    Overloaded,
    PromptTooLong,
    RequestError,
    UnsupportedModel,
)

_log = logging.getLogger(__name__)

_KINDS: tuple[tuple[type[MlxpagedError], int, str, str | None], ...] = (
    (PromptTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (RequestError, 400, "invalid_request_error", None),
    (ModelNotFound, 404, "not_found_error", "model_not_found"),
    (UnsupportedModel, 400, "invalid_request_error", "model_not_supported"),
    (ModelTooLarge, 507, "server_error", "model_too_large"),
    (ModelLoading, 503, "unavailable_error", "loading"),
    (Overloaded, 503, "unavailable_error", "overloaded"),
    (EngineError, 500, "server_error", None),
)
ASKED_PATH = "mlxpaged.asked_path"
"""Where the guard leaves, in a request's scope, the path as the client wrote it."""

_STATUSES = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("not_found_error", None),
    413: ("invalid_request_error", "request_too_large"),
}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Refused(Exception):
    """A request that is turned away for its wrapping (size, type, origin), not for what it asks."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class JsonResponse(Response):
    """A JSON body by msgspec, which writes no NaN."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """`{"error": {...}}` with all four keys, which client packages take apart without asking."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: MlxpagedError) -> tuple[int, dict[str, Any]]:
    """(status, body) of one of our errors; the body also serves as the event of a stream that breaks."""
    for kind, status, name, code in _KINDS:
        if isinstance(error, kind):
            body = error_body(str(error), name, getattr(error, "param", None), code)
            if isinstance(error, PromptTooLong) and error.num_tokens:
                # llama.cpp's two numbers, by which agents compact a conversation.
                body["error"] |= {"n_prompt_tokens": error.num_tokens, "n_ctx": error.context_len}
            return status, body
    return 500, error_body(str(error), "server_error")


def for_path(path: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """The body in the shape that the clients of `path` read."""
    if path != "/messages" and not path.startswith("/messages/"):
        return body
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": body["error"]["message"]}
    return {"type": "error", "error": error, "request_id": f"req_{secrets.token_hex(12)}"}


async def answer_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, MlxpagedError)
    status, body = body_of(error)
    headers: dict[str, str] = {}
    if status == 503:
        headers["Retry-After"] = "1"
    if status == 500:
        headers["x-should-retry"] = "false"  # the request that broke a step is not worth sending twice more
    return JsonResponse(for_path(request.scope["path"], status, body), status, headers)


async def answer_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return refusal(error.status, str(error), path=request.scope["path"])


async def answer_http(request: Request, error: Exception) -> Response:
    """Starlette's own: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    path, method = request.scope["path"], request.method
    asked = _shorter(request.scope.get(ASKED_PATH, path))
    match error.status_code:
        case 404:
            message = f"there is nothing at {asked}; try /v1/models, /v1/chat/completions, /v1/messages or /health"
        case 405:
            message = f"{method} is not a method of {asked}; use {(error.headers or {}).get('Allow', 'another')}"
        case _:
            message = error.detail
    return refusal(error.status_code, message, error.headers, path)


async def answer_unexpected(request: Request, error: Exception) -> Response:
    """A bug of ours: logged with its trace, told without it."""
    _log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
    body = error_body(f"the server failed on this request: {type(error).__name__}", "server_error")
    return JsonResponse(for_path(request.scope["path"], 500, body), 500, {"x-should-retry": "false"})


def _shorter(path: str) -> str:
    return path if len(path) <= 100 else f"{path[:97]}..."


def refusal(status: int, message: str, headers: Any = None, path: str = "/") -> Response:
    """An error body for a bare status."""
    kind, code = _STATUSES.get(status, ("invalid_request_error", None))
    body = for_path(path, status, error_body(message, kind, code=code))
    return JsonResponse(body, status, dict(headers or {}))
