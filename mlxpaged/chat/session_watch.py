"""Whether a file still is the one that was opened, while a database has it open. SQLite goes on with a file that was
moved, removed, cut short or overwritten as if nothing had happened. Owns one descriptor; writes nothing."""

from __future__ import annotations

import os
import sqlite3
import weakref
from pathlib import Path

from .session_pages import MAGIC

_HEADER_LEN = 32


class FileWatch:
    """The file at `path` as it is at this moment, from when a connection has it open.

    `close` comes after the connection's: closing any descriptor of a file gives up every lock that this process holds
    on it, the database's too (fcntl(2)).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY)
        self._size = os.fstat(self._file).st_size
        self.close = weakref.finalize(self, os.close, self._file)
        """Lets go of the file."""
        self.close.atexit = False

    def changed(self) -> str | None:
        """What became of the file, in one line; None: it is the one that was opened, and its start is a database's."""
        opened = os.fstat(self._file)
        try:
            there = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return f"{self._path} was moved or removed while it was open"
        except OSError:
            return None  # a folder that cannot be looked at: whether the file can be written is the database's to say
        if (there.st_dev, there.st_ino) != (opened.st_dev, opened.st_ino):
            return f"{self._path} was moved or replaced while it was open"
        header = os.pread(self._file, _HEADER_LEN, 0)
        before, self._size = self._size, opened.st_size
        # A database grows page by page after its header says so, and shrinks after its header does (VACUUM): cut short
        # is one that is smaller than both.
        if opened.st_size < before and opened.st_size < _length(header):
            return f"{self._path} was cut short while it was open"
        if not header.startswith(MAGIC):
            return f"{self._path} was overwritten while it was open"
        return None


def abandon(connection: sqlite3.Connection) -> None:
    """Lets a connection be until the process ends. Closing the last one of a file writes its log into whatever lies
    there now and deletes the log, which may be another program's by then."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def _length(header: bytes) -> int:
    """The bytes of a database by its header (sqlite.org/fileformat.html); where there is none, more than any file."""
    if not header.startswith(MAGIC) or len(header) < _HEADER_LEN:
        return 1 << 63
    page = int.from_bytes(header[16:18], "big")
    return (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big")
