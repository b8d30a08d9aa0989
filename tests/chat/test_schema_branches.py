"""Which branches of a oneOf exclude one another, and how a schema is refused that leaves it open."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mlxpaged.chat.schema_branches import MAX_COMPARISONS, Branches
from mlxpaged.chat.schema_words import refuse_unenforced
from mlxpaged.errors import BadParameter
from tests.chat.test_grammar import held_to, takes


def thing(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def kind(name: str, *required: str) -> dict[str, Any]:
    return thing({"kind": {"const": name}}, *required)


CAT, DOG, FOX = (kind(name, "kind") for name in ("cat", "dog", "fox"))
ANIMALS = {"Cat": CAT, "Dog": DOG, "Fox": FOX, "Pet": {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}, {"type": "null"}, {"type": ["array", "object"]}]},
        {"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}, {"enum": ["c", None]}, {"type": "integer"}]},
        {"oneOf": [CAT, DOG, FOX]},
        {"oneOf": [CAT, kind("dog")]},  # required by one: the other's value has another constant, or no kind at all
        {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "$defs": ANIMALS},
        {"oneOf": [{"$ref": "#/$defs/Pet"}, {"$ref": "#/$defs/Fox"}], "$defs": ANIMALS},
        {"oneOf": [{"anyOf": [CAT, DOG]}, {"anyOf": [FOX, {"type": "null"}]}]},
        {"oneOf": [thing({"a": {}}, "a", additionalProperties=False), thing({"b": {}}, "b")]},
        {
            "type": "object",
            "oneOf": [
                {"properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"]},
                {"properties": {"kind": {"const": "fox"}}, "required": ["kind"]},
            ],
        },
        {"oneOf": [thing({"at": CAT}, "at"), thing({"at": FOX}, "at")]},
        {"oneOf": [True]},
        {"oneOf": [{"type": "string"}, False]},
    ],
)
def test_branches_that_exclude_one_another_are_as_good_as_any_of(schema: dict[str, Any]) -> None:
    refuse_unenforced(schema, "response_format")
    assert Branches(schema).not_apart(schema) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"const": 1}, {"type": "number"}]},
        {"oneOf": [{"const": 1}, {"const": 1.0}]},
        {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]},
        {"oneOf": [kind("cat"), kind("dog")]},  # {} fits both
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"oneOf": [{**CAT, "type": ["object", "string"]}, {**DOG, "type": ["object", "string"]}]},
        {"oneOf": [thing({"a": {}}, "a"), thing({"b": {}}, "b")]},
        {"oneOf": [thing({}, "a", additionalProperties=False, patternProperties={"a": {}}), thing({"a": {}}, "a")]},
        {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Pet"}], "$defs": ANIMALS},
        {"oneOf": [{"$ref": "#/oneOf/1"}, {"$ref": "#/oneOf/0"}]},
        {"oneOf": [{"$ref": "http://a.example/b"}, {"$ref": "#/nowhere"}]},
        {"oneOf": [True, {"type": "string"}]},
        {"oneOf": [{"anyOf": []}, {"required": 1, "properties": 2, "enum": 3, "type": 4, "$ref": 5}]},
    ],
)
def test_branches_that_a_value_may_fit_together_are_found(schema: dict[str, Any]) -> None:
    assert Branches(schema).not_apart(schema) == (0, 1)


def test_a_schema_with_such_branches_is_refused_by_name_and_place() -> None:
    schema = thing({"size": {"oneOf": [{"type": "null"}, {"type": "integer"}, {"minimum": 2}]}})
    assert takes(held_to(schema), '{"size": 3}')  # which fits two branches, so not the schema
    with pytest.raises(BadParameter) as refused:
        refuse_unenforced(schema, "response_format")
    assert (str(refused.value), refused.value.param) == (
        'response_format uses "oneOf" at properties.size, and a value may fit its branches 0 and 2 at once, which is '
        "not ruled out; give them different types, or a required property with different constants, or use anyOf",
        "response_format",
    )


def test_references_in_a_circle_and_thousands_of_branches_end_soon() -> None:
    circle = {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}, "required": ["next"]}
    schema = {"oneOf": [{"$ref": "#/$defs/a"}, circle], "$defs": {"a": circle}}
    many = {"oneOf": [{"const": f"value {number}"} for number in range(200)]}
    too_many = {"oneOf": [kind(f"kind {number}", "kind") for number in range(5000)]}
    huge = {"oneOf": [{"enum": [*range(50_000), "a"]}, {"enum": [*map(str, range(50_000)), "a"]}]}
    start = time.process_time()
    assert Branches(schema).not_apart(schema) == (0, 1)
    assert Branches(many).not_apart(many) is None and MAX_COMPARISONS > 200 * 199 / 2
    assert Branches(too_many).not_apart(too_many) is not None
    assert Branches(huge).not_apart(huge) == (0, 1)
    assert time.process_time() - start < 5
