"""What a JSON schema may demand: words that no grammar here enforces are found by name and place. Owns their list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import BadParameter
from .schema_branches import Branches, target


def refuse_unenforced(schema: Mapping[str, Any], place: str) -> None:
    """Raises BadParameter for the first keyword under `place` that demands something no grammar here enforces: text
    that breaks it would come back as if it did not. Annotations, unknown words and values that demand nothing pass."""
    branches = Branches(schema)
    for inner, path in _schemas(schema):
        where = f" at {path[:200]}" if path else ""
        for keyword in inner:
            if keyword in UNENFORCED and not _demands_nothing(keyword, inner):
                raise BadParameter(
                    f'{place} uses "{keyword}"{where}, which cannot be enforced; '
                    "leave it out and check the reply for it",
                    param=place,
                )
        if both := branches.not_apart(inner):
            raise BadParameter(
                f'{place} uses "oneOf"{where}, and a value may fit its branches {both[0]} and {both[1]} at once, which '
                "is not ruled out; give them different types, or a required property with different constants, or use "
                "anyOf",
                param=place,
            )


UNENFORCED = frozenset(
    {"contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"}
    | {"propertyNames", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties"}
    | {"not", "if", "then", "else", "$dynamicRef", "$recursiveRef"}
)
"""Keywords that the library refuses, or ignores where it is told to be lenient."""

_NEEDS = {"minContains": ("contains",), "maxContains": ("contains",), "then": ("if",), "else": ("if",)}
_ONE_SCHEMA = ("items", "additionalItems", "additionalProperties")
_MANY_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("items", "prefixItems", "anyOf", "oneOf", "allOf")


def _demands_nothing(keyword: str, schema: Mapping[str, Any]) -> bool:
    if keyword == "if":
        return "then" not in schema and "else" not in schema
    if keyword in {"not", "contains"}:
        return keyword == "not" and schema[keyword] is False
    if keyword == "uniqueItems":
        return not schema[keyword]
    return schema[keyword] in (True, {}) or not all(needed in schema for needed in _NEEDS.get(keyword, ()))


def _schemas(schema: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Every schema inside and the way to it: not what only looks like one, as in an enum or an example."""
    waiting: list[tuple[Any, str]] = [(schema, "")]
    seen: set[int] = set()
    while waiting:
        item, path = waiting.pop()
        if not isinstance(item, Mapping) or id(item) in seen:
            continue
        seen.add(id(item))
        yield item, path
        before = f"{path}." if path else ""
        inner: list[tuple[Any, str]] = []
        for key in _MANY_SCHEMAS:
            if isinstance(found := item.get(key), Mapping):
                inner += [(child, f"{before}{key}.{name}") for name, child in found.items()]
        for key in _LISTS:
            if isinstance(found := item.get(key), list):
                inner += [(child, f"{before}{key}[{index}]") for index, child in enumerate(found)]
        inner += [(item.get(key), f"{before}{key}") for key in _ONE_SCHEMA]
        if isinstance(reference := item.get("$ref"), str) and reference.startswith("#"):
            inner.append((target(schema, reference), reference))  # definitions may stand anywhere
        waiting.extend(reversed(inner))
