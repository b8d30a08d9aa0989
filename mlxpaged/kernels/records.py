"""What was found out about the kernels on this machine, kept between starts. Owns the files under
paths.cache_dir()/kernels; a file that cannot be read or understood is as good as none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from .. import __version__
from ..paths import cache_dir
from . import block_copy, draw, kv_gather, kv_write, paged_decode, rope_write
from .launch import metal_text
from .question import CaseResult
from .selftest import SelfTestReport
from .template import KernelTemplate
from .timing import BucketTime, PathChoice

T = TypeVar("T")

SPECS = (
    kv_write.SPEC,
    rope_write.SPEC,
    block_copy.SPEC,
    kv_gather.SPEC,
    paged_decode.SPEC,
    paged_decode.REDUCE_SPEC,
    draw.PARTS_SPEC,
    draw.SPEC,
)


@dataclass(frozen=True, slots=True)
class Record:
    """A self-test and the times measured after it."""

    selftest: SelfTestReport
    choice: PathChoice

    def to_json(self) -> dict[str, Any]:
        return {
            "selftest": [asdict(result) for result in self.selftest.results],
            "times": [asdict(time) for time in self.choice.times],
        }

    @staticmethod
    def from_json(value: Any) -> Record:
        """Raises TypeError, ValueError or KeyError for anything but what to_json gives."""
        report = SelfTestReport(tuple(CaseResult(**result) for result in value["selftest"]))
        times = tuple(BucketTime(**time) for time in value["times"])
        if not report.results or report.failure or report.spared:  # compares the numbers, so they are numbers
            raise ValueError("only a passed test is kept")
        for time in times:
            if min(time.rows, time.context) < 1 or not min(time.kernel_s, time.gather_s) >= 0:
                raise ValueError(f"times are {time}")
        return Record(report, PathChoice(times))


def record_path(launcher: str, device: str, templates: Sequence[KernelTemplate]) -> Path:
    """The file for these very versions, device, kernel texts and templates."""
    texts = [(spec.name, spec.header, spec.source) for spec in SPECS]
    return record_file("", [launcher, device, texts, [asdict(one) for one in templates]])


def read_record(path: Path) -> Record | None:
    """What `path` holds; None where it is missing or damaged."""
    return read_json(path, Record.from_json)


def write_record(path: Path, record: Record) -> None:
    write_json(path, record.to_json())


def record_file(kind: str, key: Any) -> Path:
    """The file for what was found out of that `kind` with these very versions about `key`, JSON."""
    known = [version("mlx"), __version__, metal_text("cuda.h"), key]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]
    return cache_dir() / "kernels" / f"{kind}{'-' * bool(kind)}{digest}.json"


def read_json(path: Path, parse: Callable[[Any], T]) -> T | None:
    """What `parse` makes of the file; None where it is missing or damaged."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Put the whole file in place at once; a folder that cannot be written costs a repeated test, no more."""
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(value), encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
