"""The rows of a SQLite file as they lie in its pages, read without SQLite, which stops at the first damaged page where
this loses that page's rows alone. Changes nothing and knows nothing of what a row means. The format:
sqlite.org/fileformat2.html."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

MAGIC = b"SQLite format 3\x00"

Values = tuple[Any, ...]
"""A row's columns: None, int, float, str or bytes."""

_USUAL_SIZE = 4096
_SIZES = {1 << power for power in range(9, 17)}
_LOG_HEADER_LEN, _FRAME_HEADER_LEN = 32, 24
_TABLE_LEAF, _INDEX_LEAF, _INDEX_INNER = 13, 10, 2
_INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}  # serial type -> bytes


class _Torn(Exception):
    """What lies here is no row."""


class SessionPages:
    """The pages of a file's `content`, those of its `log` (the -wal file) instead where it has newer ones."""

    def __init__(self, content: bytes, log: bytes = b"") -> None:
        self._size = _page_size(content, log)
        whole = len(content) // self._size
        self._pages = {number + 1: self._slice(content, number * self._size) for number in range(whole)}
        self._pages |= self._committed(log)
        first = self._pages.get(1, b"")
        self.is_database = first.startswith(MAGIC)
        """Whether the file says so itself."""
        self._usable = self._size - (first[20] if self.is_database else 0)

    def rows(self) -> Iterator[tuple[int, Values]]:
        """Every row of every table that can be read, as (rowid, values), in no order. Deleted ones are not among
        them."""
        for page in self._in_use():
            for at in _cells(page) if page[0] == _TABLE_LEAF else ():
                try:
                    length, at = _varint(page, at)
                    rowid, at = _varint(page, at)
                    yield rowid, _values(self._payload(page, at, length))
                except (_Torn, IndexError, UnicodeDecodeError):
                    continue

    def keys(self) -> Iterator[Values]:
        """Every entry of every index that can be read and is short: what is indexed, then the rowid."""
        for page in self._in_use():
            for at in _cells(page) if page[0] in {_INDEX_LEAF, _INDEX_INNER} else ():
                try:
                    length, at = _varint(page, at + 4 * (page[0] == _INDEX_INNER))
                    if length <= (self._usable - 12) * 64 // 255 - 23:
                        yield _values(page[at : at + length])
                except (_Torn, IndexError, UnicodeDecodeError):
                    continue

    def _in_use(self) -> Iterator[bytes]:
        """Every page but the first, which has the schema, and the free ones, which still hold what was deleted."""
        free = self._free() | {1}
        return (page for number, page in sorted(self._pages.items()) if number not in free)

    def _free(self) -> set[int]:
        found: set[int] = set()
        at = _int(self._pages[1], 32) if self.is_database else 0
        while at in self._pages and at not in found:
            found.add(at)
            trunk = self._pages[at]
            at, count = _int(trunk, 0), min(_int(trunk, 4), self._usable // 4 - 2)
            found.update(_int(trunk, 8 + 4 * index) for index in range(count))
        return found

    def _payload(self, page: bytes, at: int, length: int) -> bytes:
        """A table row's bytes: on its page and, where it is long, on a chain of others."""
        if length > len(self._pages) * self._size:
            raise _Torn
        most, least = self._usable - 35, (self._usable - 12) * 32 // 255 - 23
        if length <= most:
            return page[at : at + length]
        here = least + (length - least) % (self._usable - 4)
        here = here if here <= most else least
        pieces, missing, following = [page[at : at + here]], length - here, _int(page, at + here)
        while missing > 0:
            if following not in self._pages:
                raise _Torn
            more = self._pages[following][4 : min(self._usable, missing + 4)]
            following = _int(self._pages[following], 0)
            pieces.append(more)
            missing -= len(more)
        return b"".join(pieces)

    def _committed(self, log: bytes) -> dict[int, bytes]:
        """The pages of every finished transaction in the log; frames of an earlier round have other salts."""
        newer: dict[int, bytes] = {}
        unfinished: dict[int, bytes] = {}
        for at in range(_LOG_HEADER_LEN, len(log) - self._size - _FRAME_HEADER_LEN + 1, self._size + _FRAME_HEADER_LEN):
            if log[at + 8 : at + 16] != log[16:24]:
                break
            unfinished[_int(log, at)] = self._slice(log, at + _FRAME_HEADER_LEN)
            if _int(log, at + 4):
                newer |= unfinished
        return newer

    def _slice(self, content: bytes, at: int) -> bytes:
        return content[at : at + self._size]


def _page_size(content: bytes, log: bytes) -> int:
    told = int.from_bytes(content[16:18], "big") if content.startswith(MAGIC) else int.from_bytes(log[8:12], "big")
    told = 65536 if told == 1 else told
    return told if told in _SIZES else _USUAL_SIZE


def _cells(page: bytes) -> list[int]:
    """Where the cells of a page begin."""
    header_len = 12 if page[0] == _INDEX_INNER else 8
    count = min(int.from_bytes(page[3:5], "big"), (len(page) - header_len) // 2)
    return [int.from_bytes(page[at : at + 2], "big") for at in range(header_len, header_len + 2 * count, 2)]


def _values(payload: bytes) -> Values:
    """A record: a header with a type per column, then the columns."""
    at, kinds = 0, []
    header_len, at = _varint(payload, at)
    while at < header_len:
        kind, at = _varint(payload, at)
        kinds.append(kind)
    values: list[Any] = []
    for kind in kinds:
        value_len = _INTEGERS.get(kind, 8 if kind == 7 else max(0, kind - 12) // 2)
        piece = payload[at : at + value_len]
        at += value_len
        if len(piece) < value_len:
            raise _Torn
        values.append(_value(kind, piece))
    return tuple(values)


def _value(kind: int, piece: bytes) -> Any:
    match kind:
        case 0:
            return None
        case 8 | 9:
            return kind - 8
        case 7:
            return struct.unpack(">d", piece)[0]
        case 10 | 11:
            raise _Torn
        case _ if kind in _INTEGERS:
            return int.from_bytes(piece, "big", signed=True)
    return piece.decode() if kind % 2 else piece


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of one to nine bytes, and where the next thing begins."""
    value = 0
    for _ in range(8):
        byte = data[at]
        at += 1
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at
    return value << 8 | data[at], at + 1


def _int(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")
