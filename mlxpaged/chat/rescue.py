"""Where conversations go that their file could not take: one JSON file elsewhere, for `mlxpaged sessions import`.
Owns the choice of the place."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import paths
from .sessions import new_id


def rescue(records: Sequence[dict[str, Any]], kind: str = "unsaved") -> Path | None:
    """Writes sessions (see `sessions.as_json`) into the first folder that takes them, `kind` in the file's name; the
    file, None when there was nothing to write or no place for it."""
    if not records:
        return None
    text = json.dumps(records, ensure_ascii=False, indent=2)
    for folder in (paths.data_dir(), paths.state_dir(), Path(tempfile.gettempdir())):
        file = folder / f"mlxpaged-{kind}-{new_id().lower()}.json"
        try:
            file.touch(mode=0o600)
            file.write_text(text, encoding="utf-8")
            return file
        except OSError:
            with suppress(OSError):
                file.unlink(missing_ok=True)
    return None
