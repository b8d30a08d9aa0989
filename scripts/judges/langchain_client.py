"""langchain-openai against a server: python langchain_client.py URL."""

from __future__ import annotations

import sys

from checks import check, run
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

SETTINGS = {"base_url": f"{sys.argv[1]}/v1", "api_key": "any", "model": "smollm2", "temperature": 0, "max_retries": 0}
chat_model = ChatOpenAI(**SETTINGS, max_tokens=16)
long_model = ChatOpenAI(**SETTINGS, max_tokens=100)


@tool
def weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"sunny in {city}"


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=20)
    population: int


@check("invoke and stream say the same")
def chat() -> None:
    whole = chat_model.invoke("Say hello in three words.")
    text = "".join(str(chunk.content) for chunk in chat_model.stream("Say hello in three words."))
    assert text == whole.content and text
    assert whole.usage_metadata["output_tokens"] > 0


@check("logprobs, n and a batch")
def logprobs() -> None:
    answer = chat_model.bind(logprobs=True, top_logprobs=2).invoke("Hello")
    assert answer.response_metadata["logprobs"]["content"]
    assert len(chat_model.batch(["One", "Two", "Three"])) == 3
    two = ChatOpenAI(**{**SETTINGS, "temperature": 1}, n=2, max_tokens=8)
    assert len(two.generate([[HumanMessage("Hi")]]).generations[0]) == 2


@check("a tool that must be used, and a named one")
def tools() -> None:
    for choice in ("required", "weather"):
        answer = long_model.bind_tools([weather], tool_choice=choice).invoke("How is it in Paris?")
        assert answer.tool_calls[0]["name"] == "weather" and set(answer.tool_calls[0]["args"]) == {"city"}


@check("structured output by schema and by tool")
def structured() -> None:
    for method in ("json_schema", "function_calling"):
        found = long_model.with_structured_output(City, method=method).invoke("Name a city.")
        assert isinstance(found, City)


@check("plain completions")
def completions() -> None:
    assert OpenAI(**SETTINGS, max_tokens=8).invoke("The sky is")


@check("an error is an exception")
def errors() -> None:
    try:
        ChatOpenAI(**{**SETTINGS, "model": "unknown"}).invoke("Hi")
    except Exception as error:
        assert "unknown" in str(error)
    else:
        raise AssertionError("an unknown model was accepted")


run("langchain-openai")
