"""instructor against a server: python instructor_client.py URL."""

from __future__ import annotations

import sys

import instructor
import openai
from checks import check, run
from pydantic import BaseModel, Field

plain = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="any", max_retries=0, timeout=120)
ASKED = {
    "model": "smollm2",
    "temperature": 0,
    "max_tokens": 120,
    "messages": [{"role": "user", "content": "Name a city and its population."}],
}


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=20)
    population: int


def extracted(mode: instructor.Mode) -> None:
    client = instructor.from_openai(plain, mode=mode)
    found = client.chat.completions.create(response_model=City, max_retries=0, **ASKED)
    assert isinstance(found, City) and found.city


@check("a model by a named tool")
def by_tool() -> None:
    extracted(instructor.Mode.TOOLS)


@check("a model by a JSON schema")
def by_schema() -> None:
    extracted(instructor.Mode.JSON_SCHEMA)


@check("a model by pieces")
def by_pieces() -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(response_model=City, **ASKED)
    assert last.city and isinstance(last.population, int)


run("instructor")
