"""The report as one Markdown file. Owns its layout; knows nothing of what was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.report import Section
    from ..model.finding import Finding


def as_markdown(findings: Sequence[Finding], sections: Sequence[Section]) -> str:
    """The whole file: findings, a part a section, and the same once more as JSON."""
    facts = [{"what": one.name, "found": one.value, "advice": one.advice or ""} for one in findings]
    lines = ["# mlxpaged doctor", "", *_table(facts), ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        if section.status != "ok":
            lines += [f"{section.status}: {section.note}", ""]
        elif isinstance(section.data, list):
            lines += [*_table(section.data), ""]
        else:
            lines += [*_bullets(section.data), ""]
    values = {
        section.title: {
            "status": section.status,
            "note": section.note,
            "seconds": section.seconds,
            "data": _finite(section.data),
        }
        for section in sections
    }
    document = json.dumps({"machine": {one.name: one.value for one in findings}, "sections": values})
    return "\n".join([*lines, "## The same as JSON", "", "```json", document, "```", ""])


def _finite(value: Any) -> Any:
    """The same value with infinities, which JSON lacks, as words."""
    match value:
        case dict():
            return {name: _finite(one) for name, one in value.items()}
        case list():
            return [_finite(one) for one in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


def _bullets(data: dict[str, Any]) -> Iterator[str]:
    for name, value in data.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield from (f"{name}:", "", *_table(value), "")
        else:
            yield f"- {name}: {_cell(value if value != [] else 'none')}"


def _table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        yield "nothing was measured"
        return
    yield f"| {' | '.join(rows[0])} |"
    yield f"|{'---|' * len(rows[0])}"
    for row in rows:
        yield f"| {' | '.join(_cell(row.get(name, '')) for name in rows[0])} |"


def _cell(value: Any) -> str:
    text = str(value)
    if isinstance(value, float):
        text = f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
    return " ".join(text.replace("|", "/").split())
