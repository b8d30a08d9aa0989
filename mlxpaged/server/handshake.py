"""The server's proof of itself to this user's own faces. Owns the route's answer; knows no file."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..chat.servers import NONCE_BYTES, proof
from ..errors import BadParameter
from .errors import JsonResponse, Refused


class Handshake:
    """Answers a nonce with the HMAC of `secret` over it; without a secret there is nothing to prove."""

    def __init__(self, secret: str | None) -> None:
        self._secret = secret

    async def answer(self, request: Request) -> Response:
        """GET /handshake?nonce=HEX. Needs no key: it tells nothing to whoever does not know the secret."""
        if self._secret is None:
            raise Refused(404, "this server has no secret to prove")
        nonce = request.query_params.get("nonce", "")
        if len(nonce) != 2 * NONCE_BYTES or not set(nonce) <= set("0123456789abcdef"):
            raise BadParameter(f"nonce must be {NONCE_BYTES} bytes in lower-case hex", param="nonce")
        return JsonResponse({"proof": proof(self._secret, nonce)})
