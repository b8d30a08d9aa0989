"""API keys: who may ask at all. Owns the comparison and which paths need no key; stores and logs none."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import refusal

OPEN_PATHS = frozenset({"/", "/health", "/handshake"})
"""They tell nothing that a key protects. A preflight (OPTIONS) needs none either."""

_LOCAL_PATHS = frozenset({"/metrics"})
"""Open as well where only this machine can ask."""

CONTROL_PATHS = frozenset({"/models/load", "/models/unload"})
"""They change what runs here: a key, or a server that only this machine can reach."""


class Keys:
    """Answers 401 to whoever knows none of `keys`; without keys everybody is let in, but not to the control paths of a
    server that is open to other machines."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], loopback: bool) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._problem(scope)):
            status, message = problem
            headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
            await refusal(status, message, headers, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> tuple[int, str] | None:
        path = scope["path"]
        if scope["method"] == "OPTIONS" or path in OPEN_PATHS or (self._loopback and path in _LOCAL_PATHS):
            return None
        if not self._keys:
            if path in CONTROL_PATHS and not self._loopback:
                return 403, "this server is open to other machines; start it with --api-key to control it over HTTP"
            return None
        given = given_key(Headers(scope=scope))
        if given is None:
            return 401, "this server needs an API key; send it as Authorization: Bearer KEY or as x-api-key"
        # Every key is compared, in constant time: neither which one nor how much of one matched can be measured.
        matches = [hmac.compare_digest(given.encode(), key) for key in self._keys]
        return None if any(matches) else (401, "the API key is not one of this server's")


def given_key(headers: Headers) -> str | None:
    """The key a request carries; a bearer token comes first, since clients send a made-up x-api-key beside it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or None
