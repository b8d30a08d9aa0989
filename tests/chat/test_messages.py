"""What a message list means, whatever the model."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpaged.chat.messages import Messages, fold_system, merge_neighbours, turns_of
from mlxpaged.errors import BadParameter


def turns(*messages: Any) -> list[dict[str, Any]]:
    return turns_of(Messages(messages))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_text_parts_are_joined_by_a_newline() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert turns(user(parts)) == [{"role": "user", "content": "a\nb\nc"}]
    assert turns(user([])) == [{"role": "user", "content": ""}]


def test_null_or_missing_content_is_empty_for_assistant_and_tool_only() -> None:
    assert turns({"role": "assistant"}, {"role": "tool", "content": None, "tool_call_id": "c1"}) == [
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "", "tool_call_id": "c1"},
    ]
    with pytest.raises(BadParameter, match=r"messages\[0\].content must be a text"):
        turns(user(None))


def test_tool_arguments_become_objects_and_broken_ones_stay_text() -> None:
    def call(arguments: Any) -> Any:
        calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        (turn,) = turns({"role": "assistant", "content": None, "tool_calls": calls})
        return turn["tool_calls"][0]["function"]["arguments"]

    assert call('{"city": "Paris"}') == {"city": "Paris"}
    assert call({"city": "Paris"}) == {"city": "Paris"}
    assert call('{"city": ') == '{"city": '
    assert call("") == call(None) == {}
    assert call("[" * 100_000) == "[" * 100_000


def test_null_keys_and_empty_tool_calls_are_left_out() -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": None, "name": None, "refusal": None, "audio": None}
    assert turns(message) == turns({**message, "tool_calls": []}) == [{"role": "assistant", "content": "a"}]


def test_an_old_function_message_is_a_tool_message() -> None:
    assert turns({"role": "function", "name": "f", "content": "4"}) == [{"role": "tool", "name": "f", "content": "4"}]


def test_earlier_reasoning_is_kept_for_templates_that_read_it() -> None:
    (turn,) = turns({"role": "assistant", "content": "4", "reasoning_content": "2 and 2"})
    assert turn["reasoning_content"] == "2 and 2"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "hi"}, "messages[0].role"),
        ({"role": "king", "content": "hi"}, "messages[0].role"),
        ({"role": ["user"], "content": "hi"}, "messages[0].role"),
        (user(5), "messages[0].content"),
        (user([{"type": "text"}]), "messages[0].content[0].text"),
        (user([{"type": "text", "text": "a"}, {"type": "image_url"}]), "messages[0].content[1]"),
        (user([7]), "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0]"),
        ({"role": "tool", "content": "a", "tool_call_id": 5}, "messages[0].tool_call_id"),
    ],
)
def test_a_shape_nobody_could_render_is_refused_by_place(message: Any, param: str) -> None:
    with pytest.raises(BadParameter) as refused:
        turns(message)
    assert refused.value.param == param


def test_no_messages_are_refused() -> None:
    with pytest.raises(BadParameter, match="messages is empty"):
        turns()


def test_continuing_needs_an_assistant_message_and_no_generation_prompt() -> None:
    answer = {"role": "assistant", "content": "Once"}
    assert turns_of(Messages((answer,), add_generation_prompt=False, continue_final_message=True))
    with pytest.raises(BadParameter, match="both true"):
        turns_of(Messages((answer,), continue_final_message=True))
    with pytest.raises(BadParameter, match="the last role is 'user'"):
        turns_of(Messages((user("a"),), add_generation_prompt=False, continue_final_message=True))


def test_neighbours_of_one_role_merge_and_tool_traffic_does_not() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    tool = {"role": "tool", "content": "4"}
    said = {"role": "assistant", "content": "x"}
    assert merge_neighbours([user("a"), user("b"), said, call, tool, tool, said]) == [
        user("a\n\nb"),
        said,
        call,
        tool,
        tool,
        said,
    ]


def test_system_texts_fold_into_the_next_user_turn() -> None:
    def system(content: str) -> dict[str, str]:
        return {"role": "system", "content": content}

    said = {"role": "assistant", "content": "x"}
    assert fold_system([system("S"), user("a"), said, system("T"), user("b")]) == [
        user("S\n\na"),
        said,
        user("T\n\nb"),
    ]
    assert fold_system([user("a"), system("S")]) == [user("a"), user("S")]
