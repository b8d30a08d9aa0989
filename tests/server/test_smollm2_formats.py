"""Formats and forced calls over the embedded model, through the openai package: what comes back always parses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import openai
import pydantic
import pytest

from mlxpaged.config import EngineConfig
from mlxpaged.engine.service import EngineService
from mlxpaged.model.sources import ModelSource
from tests.server.conftest import running_server

pytestmark = pytest.mark.smollm2


class City(pydantic.BaseModel):
    """A city with a nested, referenced part."""

    class Place(pydantic.BaseModel):
        country: str = pydantic.Field(max_length=40)
        continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=40)
    is_capital: bool
    place: Place


@pytest.fixture(scope="module")
def client(smollm2_source: ModelSource) -> Iterator[openai.OpenAI]:
    service = EngineService(EngineConfig(context_len=1024, num_blocks=300))
    service.load("smollm2").result(120)
    with (
        running_server(service) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as client,
    ):
        yield client


def test_the_models_card_says_how_its_weights_are_stored(client: openai.OpenAI) -> None:
    card = client.models.retrieve("smollm2").model_dump()
    assert (card["quantisation"], card["family"]) == ("Q4_1", "llama")


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_an_answer_parses_by_its_schema(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": "Describe Paris as JSON."}],
        response_format=City,
        temperature=temperature,
        seed=5,
        max_tokens=400,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, City)


def test_a_required_tool_is_called_with_arguments_that_parse(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="smollm2",
        messages=[{"role": "user", "content": "Note the city of Rome."}],
        tools=[openai.pydantic_function_tool(City, name="note_city")],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=400,
    ) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, City)
