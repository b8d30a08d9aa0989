"""Who waits for whom when a model is to be replaced, and for how long at most."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from mlxpaged.chat import residency
from mlxpaged.chat.residency import Residency
from mlxpaged.errors import Overloaded
from tests.scripted import ScriptedService


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedService]:
    """An engine that holds `scripted`; nobody is let in before a switch that waits."""
    monkeypatch.setattr(residency, "PATIENCE_S", 0.0)
    one = ScriptedService(manual=True)
    yield one
    one.close()


async def reach(models: Residency, name: str, log: list[str]) -> None:
    """Logs when the model `name` is in memory, and leaves it."""
    async with models.of(name):
        log.append(name)


async def begun(*work: asyncio.Task[None]) -> None:
    """Lets every task run up to where it waits."""
    for _ in work:
        await asyncio.sleep(0)


def test_whoever_waited_behind_a_switch_that_gave_up_is_answered_beside_the_endless_reply(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "GIVE_UP_S", 0.05)

    async def ask() -> None:
        models, log = Residency(service), list[str]()
        models.reply_began()
        switch = asyncio.create_task(reach(models, "other", log))
        newcomer = asyncio.create_task(reach(models, "scripted", log))
        await begun(switch, newcomer)
        assert models.switching and models.waiting and models.waiting.model == "other" and log == []
        with pytest.raises(Overloaded, match=r"other was not loaded: 1 running reply did not end within 0\.05 s"):
            await switch
        await newcomer
        assert log == ["scripted"] and service.loads == [] and not models.switching

    asyncio.run(ask())


def test_the_time_of_a_switch_counts_from_when_it_was_asked_for_also_behind_another(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "GIVE_UP_S", 0.5)

    async def ask() -> None:
        models, log = Residency(service), list[str]()
        models.reply_began()
        asked = asyncio.get_running_loop().time()
        switches = [asyncio.create_task(reach(models, name, log)) for name in ("other", "third", "fourth")]
        ends = await asyncio.gather(*switches, return_exceptions=True)
        assert [type(end) for end in ends] == [Overloaded] * 3 and log == []
        assert 0.5 <= asyncio.get_running_loop().time() - asked < 3 * 0.5

    asyncio.run(ask())


def test_a_switch_whose_time_went_by_behind_another_still_happens_where_nothing_runs(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "GIVE_UP_S", 0.0)

    async def ask() -> None:
        models, log = Residency(service), list[str]()
        await asyncio.gather(*(reach(models, name, log) for name in ("other", "third", "scripted")))
        assert log == ["other", "third", "scripted"]

    asyncio.run(ask())
