"""Whether the branches of a JSON schema's oneOf exclude one another, so that a grammar, which knows only anyOf, means
the same. Says so only where types, constants or properties prove it; reads no value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any

MAX_COMPARISONS = 50_000
"""For one schema: three hundred branches. What was not compared counts as not told apart."""

_MAX_LEVELS = 4
"""Properties of properties and choices of choices that are looked at; references may go in a circle."""

_NUMBERS = frozenset({"integer", "number"})


class Branches:
    """What the oneOfs of one `schema` tell apart."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._left = MAX_COMPARISONS

    def not_apart(self, one_of: Mapping[str, Any]) -> tuple[int, int] | None:
        """The places of two branches of its oneOf that one value may fit; None: there are none."""
        branches = one_of.get("oneOf")
        if not isinstance(branches, list):
            return None
        around = {key: value for key, value in one_of.items() if key != "oneOf"}
        demands = [_Demands([around, *self._all_of(branch)]) for branch in branches]
        pairs = combinations(range(len(demands)), 2)
        return next(((one, other) for one, other in pairs if not self._apart(demands[one], demands[other])), None)

    def _all_of(self, schema: Any) -> list[Any]:
        """A schema and what it refers to: a value has to fit all of them."""
        found = [schema]
        while isinstance(found[-1], Mapping) and isinstance(reference := found[-1].get("$ref"), str):
            further = target(self._schema, reference) if reference.startswith("#") else None
            if any(further is one for one in found):
                break
            found.append(further)
        return found

    def _apart(self, one: _Demands, other: _Demands, level: int = 0) -> bool:
        """Whether no value fits both."""
        self._left -= 1
        if self._left < 0 or level > _MAX_LEVELS:
            return False
        if one.kinds is not None and other.kinds is not None and one.kinds.isdisjoint(other.kinds):
            return True
        if one.values is not None and other.values is not None:
            self._left -= min(len(one.values), len(other.values)) // 8
            if one.values.isdisjoint(other.values):
                return True
        only_objects = {"object"} in (one.kinds, other.kinds)
        return (only_objects and self._told_by_property(one, other, level)) or self._told_by_choice(one, other, level)

    def _told_by_property(self, one: _Demands, other: _Demands, level: int) -> bool:
        """Whether a property that one of them demands is another one, or forbidden, in the other."""
        for name in one.required | other.required:
            if one.forbids(name) or other.forbids(name):
                return True
            here, there = self._property(one, name), self._property(other, name)
            if here and there and self._apart(here, there, level + 1):
                return True
        return False

    def _told_by_choice(self, one: _Demands, other: _Demands, level: int) -> bool:
        """Whether one of them is a choice of which each part is told from the other."""
        return any(
            all(self._apart(_Demands(self._all_of(choice)), against, level + 1) for choice in choices)
            for side, against in ((one, other), (other, one))
            for choices in side.choices
        )

    def _property(self, demands: _Demands, name: str) -> _Demands | None:
        if name not in demands.properties:
            found = [one for schema in demands.of_property(name) for one in self._all_of(schema)]
            demands.properties[name] = _Demands(found) if found else None
        return demands.properties[name]


class _Demands:
    """What `schemas` ask of a value that fits all of them."""

    def __init__(self, schemas: Sequence[Any]) -> None:
        self._impossible = any(schema is False for schema in schemas)
        self._schemas = [schema for schema in schemas if isinstance(schema, Mapping)]
        self.properties: dict[str, _Demands | None] = {}
        """What is asked of those properties that were looked at; None: nothing."""

    @cached_property
    def kinds(self) -> frozenset[str] | None:
        """The types of which it has to be one, "number" for what is no integer; None: any."""
        found: list[frozenset[str]] = [frozenset()] if self._impossible else []
        for named in (schema["type"] for schema in self._schemas if "type" in schema):
            kinds = named if isinstance(named, list) else [named]
            found.append(frozenset(kind for one in kinds for kind in (_NUMBERS if one == "number" else [str(one)])))
        if (named := self._named) is not None:
            found.append(frozenset(kind for value in named for kind in _kinds_of(value)))
        return frozenset.intersection(*found) if found else None

    @cached_property
    def values(self) -> frozenset[Any] | None:
        """The constants of which it has to be one; None: any, or a list or an object."""
        if self._named is None or any(isinstance(value, list | Mapping) for value in self._named):
            return None
        return frozenset(self._named)

    @cached_property
    def _named(self) -> list[Any] | None:
        for schema in self._schemas:
            if "const" in schema:
                return [schema["const"]]
            if isinstance(named := schema.get("enum"), list):
                return named
        return None

    @cached_property
    def required(self) -> frozenset[str]:
        """The properties that it has to have, where it is an object."""
        found = [names for schema in self._schemas if isinstance(names := schema.get("required"), list)]
        return frozenset(name for names in found for name in names if isinstance(name, str))

    @cached_property
    def choices(self) -> list[list[Any]]:
        """Lists of schemas of each of which it has to fit one."""
        found = [schema.get(key) for schema in self._schemas for key in ("anyOf", "oneOf")]
        return [choices for choices in found if isinstance(choices, list) and choices]

    def forbids(self, name: str) -> bool:
        """Whether it must not have a property."""
        return any(
            schema.get("additionalProperties") is False
            and "patternProperties" not in schema
            and name not in _properties(schema)
            for schema in self._schemas
        )

    def of_property(self, name: str) -> list[Any]:
        """What a property has to fit."""
        return [held[name] for schema in self._schemas if name in (held := _properties(schema))]


def target(schema: Any, reference: str) -> Any:
    """What a local reference means; nothing where it leads nowhere, which the library will say."""
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        schema = schema.get(step) if isinstance(schema, Mapping) else None
    return schema


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _kinds_of(value: Any) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int() | float():
            return _NUMBERS
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
    return frozenset({"object"})
