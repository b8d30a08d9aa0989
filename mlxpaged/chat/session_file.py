"""The one SQLite file that holds every session. Owns its place, its permissions, its schema and the migrations; knows
nothing of what a face does with a row."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from .. import paths
from ..errors import MlxpagedError

BUSY_MS = 2000
"""How long a write waits for another process's; theirs take milliseconds."""

MIGRATIONS = (
    """
    CREATE TABLE session (
        id TEXT PRIMARY KEY, title TEXT NOT NULL, model TEXT, system TEXT, params TEXT NOT NULL,
        created REAL NOT NULL, updated REAL NOT NULL, parent TEXT, head TEXT, owner TEXT
    );
    CREATE TABLE message (
        id TEXT PRIMARY KEY, session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE, parent TEXT,
        role TEXT NOT NULL, content TEXT NOT NULL, reasoning TEXT NOT NULL, state TEXT NOT NULL,
        model TEXT, usage TEXT, timing TEXT, error TEXT, created REAL NOT NULL
    );
    CREATE INDEX message_of_session ON message(session);
    CREATE INDEX session_by_time ON session(updated);
    """,
)
"""Script n takes a file from version n to n + 1; a script that was released is never changed."""


class SessionFileError(MlxpagedError):
    """The file cannot be used as it is; the text says why and what to do."""


def session_path() -> Path:
    """Where the sessions of this user are."""
    return paths.data_dir() / "sessions.db"


def open_file(path: Path, create: bool = True) -> sqlite3.Connection | None:
    """A connection to the file at the newest schema; None where there is none and `create` is off.

    Raises SessionFileError when it cannot be made, read, written or understood. Nothing is ever deleted: a file that
    is migrated is copied beside itself first.
    """
    try:
        if not path.exists():
            if not create:
                return None
            if _has_log(path):  # SQLite would delete it with all that is in no other file yet
                raise SessionFileError(_parted(path))
            _make(path)
        connection = _connected(path)
        try:
            _migrate(connection, path)
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise SessionFileError(in_words(error, path)) from error
    return connection


def memory() -> sqlite3.Connection:
    """A database of the newest schema that ends with the process."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _settle(connection)
    for script in MIGRATIONS:
        connection.executescript(script)
    return connection


def in_words(error: Exception, path: Path) -> str:
    """One line: what is wrong with the file, and the way out."""
    reason = str(error) if not isinstance(error, OSError) else error.strerror or str(error)
    text = reason.lower()
    if "full" in text or "no space" in text or "quota" in text or "too large" in text:
        return f"the disk of {path} is full; free some space and saving goes on"
    if getattr(error, "sqlite_errorname", "") == "SQLITE_IOERR_SHORT_READ":
        return _parted(path)  # the -shm file that another process still has open tells of more than there is
    if "i/o error" in text:
        return f"{path} cannot be written ({reason}: is the disk or the quota full?); once it can, saving goes on"
    if "locked" in text or "busy" in text:
        return f"{path} is locked by another program; close that one"
    if "malformed" in text or "not a database" in text or "corrupt" in text or "decode" in text:
        saving = "`mlxpaged sessions rescue` saves what can still be read of it"
        away = "close other chats, then move it away with its -wal and -shm files to start with an empty one"
        return f"{path} is damaged ({reason}); {saving}; {away}"
    if "unable to open" in text:
        return f"{path} cannot be opened ({reason}); MLXPAGED_DATA names another folder"
    if isinstance(error, PermissionError) or "readonly" in text or "read-only" in text:
        return f"{path} cannot be written ({reason}); MLXPAGED_DATA names another folder"
    return f"{path} cannot be used ({reason}); MLXPAGED_DATA names another folder"


def _has_log(path: Path) -> bool:
    log = path.with_name(f"{path.name}-wal")
    return log.exists() and log.stat().st_size > 0


def _parted(path: Path) -> str:
    return (
        f"{path} was moved or removed without its -wal and -shm files; close other chats, then move those after it, or "
        "away where it is gone for good"
    )


def _make(path: Path) -> None:
    """The empty file, for this person only; its -wal and -shm files take over its mode."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def _connected(path: Path) -> sqlite3.Connection:
    if not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists():
        # SQLite wants to make its -wal file even to read; here nobody writes, so it can read the file as it is.
        still = sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True, isolation_level=None, check_same_thread=False)
        _settle(still)
        return still
    connection = sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        _settle(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _settle(connection: sqlite3.Connection) -> None:
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = ON")
    connection.create_function("holds", 2, lambda text, wanted: wanted in (text or "").casefold(), deterministic=True)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    found = _version(connection)
    if found > len(MIGRATIONS):
        raise SessionFileError(
            f"{path} was written by a newer mlxpaged (schema {found}, this one knows {len(MIGRATIONS)}); update "
            "mlxpaged, or set MLXPAGED_DATA to another folder"
        )
    if found == len(MIGRATIONS):
        return
    if found:
        _copy(connection, path.with_name(f"{path.name}.schema{found}"))
    connection.execute("BEGIN IMMEDIATE")
    try:
        for version in range(_version(connection), len(MIGRATIONS)):  # another process may have been faster
            for statement in MIGRATIONS[version].split(";"):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def _copy(connection: sqlite3.Connection, target: Path) -> None:
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o600))
    copy = sqlite3.connect(target)
    try:
        connection.backup(copy)
    finally:
        copy.close()


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])
