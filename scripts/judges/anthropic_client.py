"""The anthropic package against a server: python anthropic_client.py URL."""

from __future__ import annotations

import sys

import anthropic
from checks import PARAMETERS, check, run

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="any", max_retries=0, timeout=120)
ASKED = {"model": "smollm2", "max_tokens": 16, "messages": [{"role": "user", "content": "Say hello in three words."}]}
GREEDY = {**ASKED, "extra_body": {"temperature": 0}}  # newer versions have no such argument any more
TOOLS = [{"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS}]


@check("messages, whole and streamed, say the same")
def messages() -> None:
    whole = client.messages.create(**GREEDY)
    with client.messages.stream(**GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text and text
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) > 0


@check("system, stop sequences and the longest answer")
def ends() -> None:
    assert client.messages.create(**{**GREEDY, "max_tokens": 1}).stop_reason == "max_tokens"
    whole = client.messages.create(**GREEDY).content[0].text
    stopped = client.messages.create(**GREEDY, system="Be brief.", stop_sequences=[" "])
    assert stopped.stop_reason in {"stop_sequence", "end_turn", "max_tokens"} and whole


@check("a tool that must be used, whole and streamed, and its result")
def tools() -> None:
    asked = {**GREEDY, "max_tokens": 100, "tools": TOOLS, "tool_choice": {"type": "any"}}
    whole = client.messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    call = next(block for block in whole.content if block.type == "tool_use")
    assert call.name == "weather" and set(call.input) == {"city"}
    with client.messages.stream(**asked) as stream:
        again = next(block for block in stream.get_final_message().content if block.type == "tool_use")
    assert again.input == call.input
    turns = [
        *ASKED["messages"],
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]
    assert client.messages.create(**{**GREEDY, "messages": turns}, tools=TOOLS).stop_reason


@check("a named tool")
def named_tool() -> None:
    asked = {**GREEDY, "max_tokens": 100, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather"}}
    assert any(block.type == "tool_use" for block in client.messages.create(**asked).content)


@check("count_tokens equals the usage of the message")
def count() -> None:
    counted = client.messages.count_tokens(model="smollm2", messages=ASKED["messages"]).input_tokens
    usage = client.messages.create(**GREEDY).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@check("errors arrive as their exceptions")
def errors() -> None:
    for kind, asked in [
        (anthropic.NotFoundError, {"model": "claude-unknown"}),
        (anthropic.BadRequestError, {"extra_body": {"temperature": 9}}),
        (anthropic.BadRequestError, {"messages": []}),
    ]:
        try:
            client.messages.create(**{**GREEDY, **asked})
        except kind as error:
            assert error.body["error"]["message"]
        else:
            raise AssertionError(f"{asked} was accepted")


run("anthropic")
