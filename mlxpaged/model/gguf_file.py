"""One GGUF file's header, checked. Owns reading it within the file's bounds; decodes no tensor, knows no model.

`mx.load` trusts a header: it decodes Q4_K silently wrong, drops kinds it does not know and crashes on absurd counts.
So every count, length and offset is checked here by the gguf package's own reader, made to refuse what lies outside.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

from ..errors import ModelNotFound, UnsupportedModel

MAX_ENTRIES = 100_000
"""More metadata keys or tensors than any real model has; each entry costs the reader about a kilobyte."""
MAX_STRINGS = 1 << 22
"""More strings than any real vocabulary or merge list has."""
_MAX_DIMS = 4
_UNKNOWN_KIND = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as stored. `shape` is row-major, outermost first; `kind` is the ggml name, such as "Q4_K";
    `data` is uint8 [bytes], a view of the mapped file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray


class GgufFile:
    """A checked header: typed metadata by key, tensors by name.

    Raises ModelNotFound, one line naming the file, where the file is missing, damaged, cut short or not GGUF 2 or 3
    in little-endian order; UnsupportedModel for a kind of tensor that the gguf package does not know.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with np.errstate(all="ignore"):
                self._reader = _BoundedReader(path)
                self.tensors = {tensor.name: tensor for tensor in self._checked_tensors()}
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            raise ModelNotFound(f"cannot read {path}: {error.strerror}") from error
        except Exception as error:  # the reader raises whatever the damaged bytes lead it to
            if found := _UNKNOWN_KIND.search(str(error)):
                raise UnsupportedModel(
                    f"{path.name} holds tensors of kind {found[1]}, which the gguf package does not know; "
                    "update it (pip install -U gguf), or give a file of another kind"
                ) from error
            reason = str(error.args[0] if isinstance(error, KeyError) else error) or type(error).__name__
            raise ModelNotFound(f"{path} is not a whole GGUF file: {reason}; fetch it again") from error

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value as int, float, bool, str or a list of them; `default` where the key is missing."""
        field = self._reader.get_field(key)
        if field is None:
            return default
        try:
            if field.types == [GGUFValueType.ARRAY, GGUFValueType.STRING]:
                return [str(field.parts[at], "utf-8") for at in field.data]  # twice as fast as contents()
            return field.contents()
        except UnicodeDecodeError as error:
            raise ModelNotFound(f"{self.path} is damaged: {key} is not UTF-8; fetch it again") from error

    def number(self, key: str, default: float | None = None) -> float | None:
        """A metadata value that must be one finite number."""
        value = self.value(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise ModelNotFound(f"{self.path} is damaged: {key} is {str(value)[:40]!r}, not a number; fetch it again")
        return value

    def text(self, key: str) -> str | None:
        """A metadata value that must be a string."""
        value = self.value(key)
        if value is not None and not isinstance(value, str):
            raise ModelNotFound(f"{self.path} is damaged: {key} is not a text; fetch it again")
        return value

    def _checked_tensors(self) -> list[GgufTensor]:
        checked, size = [], 0
        for tensor in self._reader.tensors:
            dims = [int(dim) for dim in tensor.field.parts[3]]
            elements = 1
            for dim in dims:
                elements *= dim
            if not 1 <= len(dims) <= _MAX_DIMS or elements < 1 or elements != tensor.n_elements:
                raise ValueError(f"tensor {tensor.name} has the shape {dims}")
            data = tensor.data.reshape(-1).view(np.uint8)
            size += data.nbytes
            checked.append(GgufTensor(tensor.name, tensor.tensor_type.name, tuple(reversed(dims)), data))
        if size > self._reader.data.size:
            raise ValueError(f"its tensors claim {size} bytes, the file has {self._reader.data.size}")
        return checked


class _BoundedReader(GGUFReader):
    """The gguf package's reader, refusing to look past the end, and reading arrays in one piece (20 times faster:
    a vocabulary of 150 thousand tokens took 7 s)."""

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if offset < 0 or end > self.data.size:
            raise ValueError(f"it ends at byte {self.data.size}, its header points to byte {end}")
        return super()._get(offset, dtype, count, override_order)

    def _build_fields(self, offs: int, count: Any) -> int:
        if self.byte_order == "S":
            raise ValueError("it is big-endian")
        self._bound("metadata keys", int(count), MAX_ENTRIES)
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs: int, count: Any) -> Any:
        self._bound("tensors", int(count), MAX_ENTRIES)
        return super()._build_tensor_info(offs, count)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if int(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind, count, start = GGUFValueType(int(item[0])), int(length[0]), orig_offs + 12
        types = [GGUFValueType.ARRAY, kind]
        if kind == GGUFValueType.STRING:
            self._bound("strings in one list", count, MAX_STRINGS)
            strings, end = self._strings(start, count)
            return end - orig_offs, [item, length, *strings], list(range(2, 2 + count)), types
        if kind not in self.gguf_scalar_to_np:
            raise ValueError(f"it holds a list of {kind.name}, which GGUF models do not use")
        values = self._get(start, self.gguf_scalar_to_np[kind], count)
        return 12 + values.nbytes, [item, length, values], [2], types

    def _strings(self, start: int, count: int) -> tuple[list[memoryview], int]:
        data, size, strings = memoryview(self.data), self.data.size, []
        for _ in range(count):
            begin = start + 8
            end = begin + int.from_bytes(data[start:begin], "little")
            if end > size:
                raise ValueError(f"it ends at byte {size}, its header points to byte {end}")
            strings.append(data[begin:end])
            start = end
        return strings, start

    @staticmethod
    def _bound(what: str, count: int, most: int) -> None:
        if count > most:
            raise ValueError(f"it claims {count} {what}")
