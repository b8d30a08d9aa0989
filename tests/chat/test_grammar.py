"""Schemas become masks: what is allowed, what is refused with a reason, and what no request can do."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from mlxpaged.chat.grammar import ANY_OBJECT, GrammarFault, ReplyGrammar, Vocabulary, schema_notation
from mlxpaged.chat.schema_words import UNENFORCED, refuse_unenforced
from mlxpaged.errors import BadParameter
from tests.model.words import END, START, byte_tokenizer

VOCAB_SIZE = 300
"""More ids than the tokenizer has: a model's logits may be padded."""

VOCABULARY = Vocabulary(byte_tokenizer(), VOCAB_SIZE, ["<start>", "absent"])


def held_to(schema: Any, **options: Any) -> ReplyGrammar:
    notation = f"start: json\njson: {schema_notation(schema, 'response_format', **options)}"
    return VOCABULARY.compile(notation, "response_format").fresh()


def allowed(grammar: ReplyGrammar) -> set[int]:
    """The allowed ids; the mask is one row of a step's, as on the engine."""
    words = np.zeros((3, -(-VOCAB_SIZE // 32)), np.uint32)
    grammar.fill(words[1])
    assert not words[0].any() and not words[2].any()
    return {id_ for id_ in range(words.shape[1] * 32) if words[1, id_ // 32] >> np.uint32(id_ % 32) & 1}


def takes(grammar: ReplyGrammar, text: str) -> bool:
    """Whether every byte of `text` is allowed in turn."""
    for byte in text.encode():
        if byte not in allowed(grammar):
            return False
        if grammar.advance(byte):
            return byte == text.encode()[-1]
    return True


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"name": "Ada", "age": 36}', True),
        ('{"name":"Ada","age":36}', True),
        ('{\n  "name": "Ada",\n  "age": 36\n}', True),
        ('{"age": 36', False),
        ('{"name": "Ada", "age": 151', False),
        ('{"name": 1', False),
        ('{"name": "Ada", "age": 36, ', False),
        ("[", False),
        ("{\n\n", False),
        ("{" + " " * 21, False),
    ],
)
def test_only_text_of_the_schema_is_allowed_and_white_space_is_bounded(text: str, fits: bool) -> None:
    assert takes(held_to(PERSON), text) is fits


def test_a_reply_is_complete_with_its_last_brace() -> None:
    grammar = held_to(PERSON)
    text = b'{"name": "Ada", "age": 36}'
    assert [grammar.advance(byte) for byte in text] == [False] * (len(text) - 1) + [True]


def test_no_special_or_padding_id_is_ever_allowed_inside() -> None:
    grammar = held_to(ANY_OBJECT)
    for byte in b'{"a':  # inside a string anything may come
        assert not allowed(grammar) & {END, START, *range(258, VOCAB_SIZE)}
        grammar.advance(byte)
    assert len(allowed(grammar)) > 100


@pytest.mark.parametrize("seed", range(5))
def test_random_ids_under_the_mask_are_valid_json_of_the_schema(seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 3},
            "inner": {
                "anyOf": [
                    {"type": "null"},
                    {
                        "type": "object",
                        "properties": {"n": {"type": "integer", "minimum": -9, "maximum": 9}},
                        "required": ["n"],
                        "additionalProperties": False,
                    },
                ]
            },
        },
        "required": ["kind", "tags", "inner"],
        "additionalProperties": False,
    }
    grammar, draw, ids = held_to(schema), random.Random(seed), []
    while True:
        ids.append(draw.choice(sorted(allowed(grammar))))
        if grammar.advance(ids[-1]):
            break
        assert len(ids) < 2000
    said = json.loads(bytes(id_ for id_ in ids if id_ < 256))
    assert list(said) == ["kind", "tags", "inner"] and said["kind"] in {"a", "b"}
    assert 1 <= len(said["tags"]) <= 3 and all(len(tag) <= 5 for tag in said["tags"])
    assert said["inner"] is None or -9 <= said["inner"]["n"] <= 9


def test_many_replies_to_one_schema_do_not_touch_each_other() -> None:
    compiled = VOCABULARY.compile("start: json\njson: " + schema_notation(ANY_OBJECT, "x"), "x")
    one, other = compiled.fresh(), compiled.fresh()
    one.advance(ord("{"))
    assert allowed(other) == {ord("{")} != allowed(one)


def test_an_id_that_is_not_allowed_is_told_by_the_next_mask() -> None:
    grammar = held_to(ANY_OBJECT)
    assert not grammar.advance(ord("x"))
    with pytest.raises(GrammarFault):
        allowed(grammar)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chained(length: int) -> dict[str, Any]:
    """Definitions that each lead to the next: walking them took a peer's whole stack."""
    steps = {f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": steps | {f"d{length}": {"type": "integer"}}}


def patterned(length: int) -> dict[str, Any]:
    """Patterns that meet by references: matching them all at once took minutes."""
    steps = {f"d{n}": {"pattern": f".{{{n}}}.*", "$ref": f"#/$defs/d{n + 1}"} for n in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": steps | {f"d{length}": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"$ref": "#/$defs/nope"}, "does not exist"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"enum": []}, "Unsatisfiable"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ({"$ref": "https://example.com/schema.json"}, ""),
        ({"$ref": "#"}, ""),
        ({"type": "string", "pattern": "\ud800"}, ""),
        ({"type": "integer", "minimum": float("inf")}, ""),
        (nested(300), "recursion limit"),
        (nested(500), "nested"),
        (chained(300), "nested"),
        (chained(5000), "nested"),
        ({"allOf": [{"pattern": f"[ab]*a[ab]{{{n}}}"} for n in range(30)]}, "combines 30 patterns"),
        (patterned(40), "combines 40 patterns"),
        ({"enum": ["x" * 1000] * 300}, "bytes; send at most 262144"),
        ({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(2)]} for i in range(16)]}, "too large"),
    ],
    ids=range(17),
)
def test_a_schema_that_cannot_be_held_to_is_refused_with_the_reason(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadParameter, match=f"^response_format .*{reason}") as refused:
        held_to(schema)
    assert refused.value.param == "response_format"
    assert "\n" not in str(refused.value) and "%json" not in str(refused.value)


@pytest.mark.parametrize("schema", [nested(25), chained(100)], ids=["nested", "chained"])
def test_schemas_within_the_limits_work(schema: dict[str, Any]) -> None:
    assert takes(held_to(schema), '{"a": {"a": {')


def test_unknown_keywords_are_refused_only_when_strict() -> None:
    schema = {"type": "string", "format": "poem"}
    with pytest.raises(BadParameter, match="Unknown format"):
        held_to(schema)
    assert takes(held_to(schema, lenient=True), '"roses"')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            'response_format uses "uniqueItems", which cannot be enforced; leave it out and check the reply for it',
        ),
        (
            {"not": {}},
            'response_format uses "not", which cannot be enforced; leave it out and check the reply for it',
        ),
        (
            {"properties": {"tags": {"anyOf": [{"type": "null"}, {"items": {"propertyNames": {"pattern": "a"}}}]}}},
            'response_format uses "propertyNames" at properties.tags.anyOf[1].items, which cannot be enforced; '
            "leave it out and check the reply for it",
        ),
        (
            {"$ref": "#/components/Tags", "components": {"Tags": {"contains": True}}},
            'response_format uses "contains" at #/components/Tags, which cannot be enforced; '
            "leave it out and check the reply for it",
        ),
        (
            {"$defs": {"a": {"prefixItems": [{"if": {"const": 1}, "then": {"const": 2}}]}}},
            'response_format uses "if" at $defs.a.prefixItems[0], which cannot be enforced; '
            "leave it out and check the reply for it",
        ),
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_refused_by_name_and_place(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter) as refused:
        refuse_unenforced(schema, "response_format")
    assert (str(refused.value), refused.value.param) == (message, "response_format")


@pytest.mark.parametrize(
    "schema",
    [
        {"title": "t", "description": "d", "default": {"not": 1}, "examples": [{"if": 1}], "$comment": "c"},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "http://a.example/b", "$anchor": "a"},
        {"deprecated": True, "readOnly": True, "writeOnly": True, "x-order": 1, "nullable": True},
        {"type": "string", "format": "poem", "contentEncoding": "base64", "contentMediaType": "text/plain"},
        {"properties": {"not": {"type": "string"}, "if": {}, "contains": {}}, "required": ["not"]},
        {"enum": [{"not": {}}], "const": {"uniqueItems": True}},
        {"uniqueItems": False, "not": False, "unevaluatedProperties": True, "dependentRequired": {}},
        {"then": {"const": 1}, "minContains": 2, "propertyNames": {}},
        {"$ref": "#", "properties": {"again": {"$ref": "#/properties/again"}}},
        {"patternProperties": {"^a": {}}, "minProperties": 1, "multipleOf": 2, "additionalProperties": False},
        {"oneOf": 1, "items": "x", "properties": []},
    ],
)
def test_what_demands_nothing_or_is_enforced_passes(schema: dict[str, Any]) -> None:
    refuse_unenforced(schema, "response_format")


@pytest.mark.parametrize("keyword", sorted(UNENFORCED))
def test_the_library_knows_none_of_the_keywords_that_are_refused(keyword: str) -> None:
    with pytest.raises(BadParameter, match=f"Unimplemented keys: .*{re.escape(keyword)}"):
        held_to({keyword: {}})


def test_a_schema_s_own_options_do_not_loosen_ours() -> None:
    assert not takes(held_to({**PERSON, "x-guidance": {"whitespace_pattern": "[ ]*"}}), "{" + " " * 30)


def test_marks_are_written_as_their_ids() -> None:
    assert VOCABULARY.literal('a<start>"b"') == '"a" <[257]> "\\"b\\""'
    assert VOCABULARY.literal("absent") == '"absent"'
