"""What a face says of a model that can be had neither here nor at the server that runs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from mlxpaged.chat.backend import ModelCard
from mlxpaged.cli import compose
from mlxpaged.cli.progress import LoadProgress
from mlxpaged.errors import ModelNotFound


class Server:
    """A tie to a server that knows models by these names alone."""

    def __init__(self, *names: str) -> None:
        self.backend = SimpleNamespace(url="http://127.0.0.1:1")
        self._names = names

    async def check_listed(self) -> None:
        if "x" not in self._names:
            raise ModelNotFound("the server has no model x")

    async def ready(self, on_status: object) -> ModelCard:
        if "x" not in self._names:
            raise ModelNotFound("the server holds y and does not load x")
        return ModelCard("x")


def opened(monkeypatch: pytest.MonkeyPatch, server: Server | None) -> compose.OpenedAttached:
    def fetch(name: str, progress: LoadProgress) -> None:
        raise ModelNotFound(f"no model at {name!r}")

    async def reached() -> Server:
        assert server, "nothing is started for a model that is not there"
        return server

    one = compose.OpenedAttached("x", None, None, (), LoadProgress())
    monkeypatch.setattr(compose, "fetch_model", fetch)
    monkeypatch.setattr(compose, "_servers", lambda: server is not None)
    monkeypatch.setattr(one, "_reached", reached)
    return one


@pytest.mark.parametrize("server", [None, Server("y")])
def test_a_model_that_is_nowhere_is_said_in_the_same_words_with_and_without_a_server(
    monkeypatch: pytest.MonkeyPatch, server: Server | None
) -> None:
    one = opened(monkeypatch, server)
    for ask in (one.ready, one.look):
        with pytest.raises(ModelNotFound, match="no model at 'x'"):
            asyncio.run(ask())  # type: ignore[arg-type]


def test_a_server_may_know_a_model_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    one = opened(monkeypatch, Server("x"))
    assert asyncio.run(one.ready()).name == "x"
    asyncio.run(one.look())
