"""Which servers of this user run on this machine. Owns the files that name them and the proof that the one who answers
is the one who wrote the file; starts and stops nothing.

`serve` writes one file, readable by this user only, with its address, its process id and a random secret, and removes
it at its end. A face believes a file only once the address has answered a fresh nonce with the secret's HMAC over it:
a port that somebody else took over since cannot.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .. import paths

if TYPE_CHECKING:
    # Slow to import, and most callers only want to know whether there is a file.
    import httpx
    import psutil

HANDSHAKE = "/handshake"
NONCE_BYTES = 32
_ANSWER_S = 3.0
_PURPOSE = b"mlxpaged handshake 1\n"
_KEY_PURPOSE = b"mlxpaged key 1\n"


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """One server as its file names it. `url` is without `/v1`; `socket` is the path of its unix socket, where it
    listens on one; `idle_exit_s`: it ends itself after this long without a request, None: never."""

    pid: int
    url: str
    secret: str = field(repr=False)
    started: float
    socket: str | None = None
    idle_exit_s: float | None = None

    def transport(self) -> httpx.AsyncBaseTransport | None:
        """How httpx reaches it; None: by its url."""
        import httpx

        return httpx.AsyncHTTPTransport(uds=self.socket) if self.socket else None

    def key(self) -> str:
        """The API key that the server takes from this user's own faces."""
        return key_of(self.secret)


def new_secret() -> str:
    """32 random bytes, as hex."""
    return secrets.token_hex(32)


def proof(secret: str, nonce: str) -> str:
    """What a server that knows `secret` answers to `nonce`."""
    return hmac.new(bytes.fromhex(secret), _PURPOSE + nonce.encode(), "sha256").hexdigest()


def key_of(secret: str) -> str:
    """An API key for whoever can read the secret; the secret itself never travels."""
    return hmac.new(bytes.fromhex(secret), _KEY_PURPOSE, "sha256").hexdigest()


def folder() -> Path:
    """Where the files are."""
    return paths.state_dir() / "servers"


@contextmanager
def registered(record: ServerRecord) -> Iterator[None]:
    """Inside, the server can be found by its file. Raises OSError where it cannot be written."""
    folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder() / f"{record.pid}.json"
    temporary = file.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump(asdict(record), out)
    temporary.replace(file)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def records() -> list[ServerRecord]:
    """Servers whose file is ours alone and whose process runs, the youngest first; files of dead ones are removed.
    They may still be impostors: see `proven`."""
    found = []
    for file in folder().glob("*.json"):
        record = _read(file)
        if record is None:
            continue
        if _runs(record.pid):
            found.append(record)
        else:
            with suppress(OSError):
                file.unlink(missing_ok=True)
    return sorted(found, key=lambda record: record.started, reverse=True)


async def proven() -> list[ServerRecord]:
    """Those of `records` that prove themselves, the youngest first."""
    found = records()
    answers = await asyncio.gather(*(proves_itself(record) for record in found))
    return [record for record, good in zip(found, answers, strict=True) if good]


async def proves_itself(record: ServerRecord) -> bool:
    """Whether the address answers, and with the secret's HMAC over a nonce of our own."""
    import httpx

    nonce = secrets.token_hex(NONCE_BYTES)
    async with httpx.AsyncClient(
        base_url=record.url, transport=record.transport(), timeout=_ANSWER_S, trust_env=False
    ) as client:
        try:
            answer = await client.get(HANDSHAKE, params={"nonce": nonce})
            given = answer.json()["proof"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False
    return isinstance(given, str) and hmac.compare_digest(given.encode(), proof(record.secret, nonce).encode())


def processes_of(record: ServerRecord) -> list[psutil.Process]:
    """The server's process and those below it: one of them serves. To be asked before the server is told to end."""
    import psutil

    with suppress(psutil.Error):
        first = psutil.Process(record.pid)
        return [first, *first.children(recursive=True)]
    return []


async def gone(record: ServerRecord, processes: Sequence[psutil.Process], within_s: float) -> bool:
    """Waits until all of the server's processes have ended and it no longer answers at its address, which is free
    then; False when something of it is still there after a while."""
    deadline = time.monotonic() + within_s
    while any(_lives(process) for process in processes) or await proves_itself(record):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


def _lives(process: psutil.Process) -> bool:
    """A zombie holds nothing any more: only its own parent has yet to ask how it ended."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _read(file: Path) -> ServerRecord | None:
    """None for what is not ours, may be read by others, or is no record."""
    try:
        about = file.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
            return None
        record = ServerRecord(**json.loads(file.read_text(encoding="utf-8")))
        bytes.fromhex(record.secret)
        return record if isinstance(record.pid, int) and isinstance(record.url, str) else None
    except (OSError, ValueError, TypeError):
        return None


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
