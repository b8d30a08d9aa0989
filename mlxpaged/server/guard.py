"""Who may speak to a server on this machine, and which spellings of a path mean the same. Owns the Host and Origin
checks and the path's normal form; reads no body.

A web page must not reach a local model: neither by a name that is made to resolve to this machine (Host), nor by a
cross-site request (Origin). Programs send no Origin and are not affected.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ASKED_PATH, refusal

LOCAL_ORIGINS = re.compile(
    r"https?://(localhost|[\w.-]+\.localhost|127\.0\.0\.1|\[::1\])(:\d+)?|(app|file|tauri|vscode-webview)://.*"
)
"""Pages served from this machine and desktop apps. `null` (a sandboxed frame of any site) is not among them."""


class Guard:
    """Answers 403 to a wrong Host or Origin, gives the path its normal form, and echoes x-request-id.

    `check_host`: whether the bind is loopback, so that a foreign name can only come from a page. `allowed_hosts` and
    `cors_origins` extend the lists; an entry of `*` in either lifts that check.
    """

    def __init__(
        self, app: ASGIApp, check_host: bool, allowed_hosts: Sequence[str] = (), cors_origins: Sequence[str] = ()
    ) -> None:
        self._app = app
        self._check_host = check_host and "*" not in allowed_hosts
        self._hosts = {host.lower() for host in allowed_hosts} | {socket.gethostname().lower()}
        self._origins = frozenset(cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        reply_id = headers.get("x-request-id")

        async def send_with_id(message: Message) -> None:
            if reply_id and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = reply_id
            await send(message)

        sending: Send = send_with_id if reply_id else send
        if problem := self._problem(headers):
            await refusal(403, problem, path=normal_path(scope["path"]))(scope, receive, sending)
            return
        paths = {"path": normal_path(scope["path"]), ASKED_PATH: scope["path"]}
        await self._app({**scope, **paths}, receive, sending)

    def _problem(self, headers: Headers) -> str | None:
        host, origin = headers.get("host"), headers.get("origin")
        if self._check_host and host and not self._is_own(host):
            return f"the host {host!r} is not this machine; start the server with --allowed-host to accept it"
        if origin and not self.allows_origin(origin):
            return f"the origin {origin!r} may not use this server; start it with --cors-origin to accept it"
        return None

    def allows_origin(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins or bool(LOCAL_ORIGINS.fullmatch(origin))

    def _is_own(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        if name in self._hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            # A page under an attacker's name never sends an address here: rebinding needs a name.
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def normal_path(path: str) -> str:
    """The path without `/v1`, doubled leading slashes and a trailing slash: both base URLs people paste work."""
    path = "/" + path.strip("/")
    if path == "/v1" or path.startswith("/v1/"):
        path = "/" + path[3:].lstrip("/")
    return path
