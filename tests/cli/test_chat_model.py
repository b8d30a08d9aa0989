"""The model that a chat talks with: who is said to answer, and who does after a switch that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from mlxpaged.cli.chat_model import ChatModel
from mlxpaged.cli.compose import OpenedLocally
from mlxpaged.cli.page import Page
from mlxpaged.cli.progress import LoadProgress
from mlxpaged.config import EngineConfig
from mlxpaged.errors import ModelNotFound
from tests.cli.program import StallingService, scripted_engine


class Prompt:
    """A prompt that is on the screen and never answered."""

    def __init__(self) -> None:
        self.failed: BaseException | None = None

    async def read(self, prefill: str = "") -> str | None:
        return None

    async def shown(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        self.failed = error

    def above(self, say: Callable[[], None]) -> None:
        say()

    def close(self) -> None:
        pass


@pytest.fixture
def service() -> Iterator[StallingService]:
    with scripted_engine(EngineConfig()) as one:
        yield one


def chat_model(service: StallingService, name: str = "scripted", prompt: Prompt | None = None) -> ChatModel:
    progress = LoadProgress()
    return ChatModel(OpenedLocally(service, name, progress), prompt or Prompt(), Page(quiet=False), progress)


def test_every_model_that_answers_is_named_once(service: StallingService, capsys: pytest.CaptureFixture[str]) -> None:
    async def talk() -> None:
        model = chat_model(service)
        model.begin()
        await model.card()
        await model.switch("other")
        await model.switch("other")
        assert (await model.card()).name == "other"

    asyncio.run(talk())
    assert capsys.readouterr().err == "Talking with scripted.\nNow with other.\nStill with other.\n"


def test_after_a_switch_that_failed_the_model_before_is_the_chats_still(service: StallingService) -> None:
    async def talk() -> None:
        model = chat_model(service)
        model.begin()
        await model.card()
        with pytest.raises(ModelNotFound):
            await model.switch("missing")
        assert (await model.card()).name == "scripted" and model.failure is None

    asyncio.run(talk())


def test_a_load_that_fails_ends_the_prompt_that_waits(service: StallingService) -> None:
    async def talk() -> None:
        model = chat_model(service, "missing", prompt := Prompt())
        model.begin()
        with pytest.raises(ModelNotFound) as raised:
            await model.card()
        assert prompt.failed is model.failure is raised.value

    asyncio.run(talk())
