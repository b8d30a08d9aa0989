"""Listening sockets: taking a port or a path, and saying in one line why it cannot be had. Owns no server and imports
nothing heavy: the parent process of a server uses it."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from contextlib import closing, suppress
from pathlib import Path

from ..errors import ConfigError, MlxpagedError


def listen(host: str, port: int, insecure_no_auth: bool = False) -> list[socket.socket]:
    """Listening sockets, taken before a model is loaded so that a port in use is known at once.

    `localhost` listens on 127.0.0.1 and, where it exists, on ::1; port 0 picks a free one. Raises ConfigError for an
    address that cannot be had or one that would open the server to the network unasked, MlxpagedError for a port in
    use, naming its holder.
    """
    if not insecure_no_auth and not is_loopback(host):
        raise ConfigError(
            f"--host {host} opens the server to the network without a key; "
            "use --host 127.0.0.1, or add --api-key KEY, or --insecure-no-auth"
        )
    first = _bind("127.0.0.1" if host == "localhost" else host, port)
    sockets = [first]
    if host == "localhost" and socket.has_ipv6:
        with suppress(MlxpagedError):
            sockets.append(_bind("::1", first.getsockname()[1]))
    return sockets


def listen_unix(path: Path) -> socket.socket:
    """A listening unix socket that only this user can open. What a dead server left at `path` is removed; anything
    else there is a ConfigError, a live server a MlxpagedError."""
    bound = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            _remove_dead(path)
        before = os.umask(0o177)
        try:
            bound.bind(str(path))
        finally:
            os.umask(before)
        bound.listen(1024)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on --unix-socket {path}: {error.strerror or error}; try another") from error
    except MlxpagedError:
        bound.close()
        raise
    return bound


def _remove_dead(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise MlxpagedError(f"a server listens on {path} already; stop it, or name another --unix-socket")


def url_of(bound: socket.socket) -> str:
    """The base URL of a listening socket, without `/v1`; a unix socket's client calls it localhost."""
    if bound.family == socket.AF_UNIX:
        return "http://localhost"
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
        bound.listen(1024)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise MlxpagedError(
                f"port {port} on {host} is held by {_holder_of(port)}; stop it, or use --port {_free_port(host, port)}"
            ) from error
        raise ConfigError(
            f"cannot listen on --host {host} --port {port}: {error.strerror}; try --host 127.0.0.1"
        ) from error
    return bound


def _holder_of(port: int) -> str:
    """The listening process, as far as this user may see it."""
    import psutil

    for process in psutil.process_iter(["pid", "name"]):
        try:
            found = any(
                held.status == psutil.CONN_LISTEN and held.laddr and held.laddr.port == port
                for held in process.net_connections(kind="tcp")
            )
        except psutil.Error:
            continue
        if found:
            return f"{process.info['name']} (pid {process.info['pid']})"
    return "a process of another user"


def _free_port(host: str, taken: int) -> int:
    """The next port that can be had now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(taken + 1, min(taken + 100, 65536)):
        with closing(socket.socket(family)) as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    return 0
