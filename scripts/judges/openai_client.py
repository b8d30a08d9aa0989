"""The openai package, 1.x or 3.x, against a server: python openai_client.py URL."""

from __future__ import annotations

import json
import sys

import openai
from checks import PARAMETERS, SCHEMA, check, run

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="any", max_retries=0, timeout=120)
MODEL = "smollm2"
HELLO = [{"role": "user", "content": "Say hello in three words."}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 16}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}]
NAMED = {"type": "function", "function": {"name": "weather"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}


@check("chat, whole and streamed, say the same")
def chat() -> None:
    whole = client.chat.completions.create(messages=HELLO, **GREEDY)
    chunks = list(
        client.chat.completions.create(messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason


@check("the stream helper")
def helper() -> None:
    stream_of = getattr(client.chat.completions, "stream", None) or client.beta.chat.completions.stream
    with stream_of(messages=HELLO, stop=["!", ".", ","], **{**GREEDY, "max_tokens": 100}) as stream:
        assert "content.done" in [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.content


@check("n choices with a seed differ and repeat")
def choices() -> None:
    asked = {"model": MODEL, "messages": HELLO, "n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 12}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) > 1 and texts == [choice.message.content for choice in second.choices]


@check("logprobs of chat and of completions with echo")
def logprobs() -> None:
    answer = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=3, **GREEDY)
    entries = answer.choices[0].logprobs.content
    assert len(entries) >= 3 and all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)
    echoed = client.completions.create(model=MODEL, prompt="The sky is", echo=True, logprobs=1, max_tokens=1)
    lists = echoed.choices[0].logprobs
    assert lists.token_logprobs[0] is None and all(value <= 0 for value in lists.token_logprobs[1:])
    assert echoed.choices[0].text.startswith("The sky is") and len(lists.tokens) == len(lists.text_offset)


@check("a required tool, whole and streamed")
def tools() -> None:
    asked = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", **GREEDY, "max_tokens": 100}
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    call = answer.message.tool_calls[0]
    assert call.function.name == "weather" and set(json.loads(call.function.arguments)) == {"city"}
    pieces = [chunk.choices[0].delta.tool_calls for chunk in client.chat.completions.create(stream=True, **asked)]
    deltas = [delta for piece in pieces for delta in piece or () if delta.index == 0]
    assert deltas[0].id and deltas[0].function.name == "weather"
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == json.loads(
        call.function.arguments
    )


@check("a named tool, and its result sent back")
def named_tool() -> None:
    asked = {"messages": HELLO, "tools": TOOLS, "tool_choice": NAMED, **GREEDY, "max_tokens": 100}
    message = client.chat.completions.create(**asked).choices[0].message
    call = message.tool_calls[0]
    turns = [*HELLO, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(messages=turns, tools=TOOLS, **GREEDY).choices[0].finish_reason


@check("auto with tools answers whatever the model does")
def auto() -> None:
    assert client.chat.completions.create(messages=HELLO, tools=TOOLS, **GREEDY).choices[0].finish_reason


@check("a JSON schema is followed")
def schema() -> None:
    answer = client.chat.completions.create(messages=HELLO, response_format=FORMAT, **{**GREEDY, "max_tokens": 100})
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"city", "population"} and isinstance(found["population"], int)
    anything = client.chat.completions.create(
        messages=HELLO, response_format={"type": "json_object"}, **{**GREEDY, "max_tokens": 200}
    )
    assert anything.choices[0].finish_reason == "length" or json.loads(anything.choices[0].message.content) is not None


@check("models")
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@check("errors arrive as their exceptions")
def errors() -> None:
    for kind, asked in [
        (openai.NotFoundError, {"model": "unknown"}),
        (openai.BadRequestError, {"temperature": 9}),
        (openai.BadRequestError, {"messages": [{"role": "king", "content": "x"}]}),
        (openai.BadRequestError, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    ]:
        try:
            client.chat.completions.create(**{"messages": HELLO, **GREEDY, **asked})
        except kind as error:
            assert error.body and error.body["message"]
        else:
            raise AssertionError(f"{asked} was accepted")


run("openai")
