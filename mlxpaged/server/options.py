"""What a person may set about the server. Frozen values; imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

OnSwitch = Literal["wait", "retry"]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """`loopback`: the server is reachable from this machine only, so a foreign Host header can only come from a web
    page. `insecure_no_auth`: listening for other machines without a key is wanted. `api_keys`: whoever asks must know
    one of them. `on_switch`: a request for a model that is not in memory waits for it, or is told to come back.
    `shutdown_s`: how long replies may still run after the first signal. `secret`: what this user's faces know the
    server by. `idle_exit_s`: the server ends itself after this long without a request."""

    loopback: bool = True
    insecure_no_auth: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    on_switch: OnSwitch = "wait"
    max_body_bytes: int = 32 * 2**20
    keep_alive_s: float = 10.0
    shutdown_s: float = 10.0
    secret: str | None = field(default=None, repr=False)
    idle_exit_s: float | None = None
