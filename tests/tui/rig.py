"""The app over a scripted engine: the store is in memory, every reply is written down, and when it moves is up to the
test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from textual.pilot import Pilot

from mlxpaged.chat.backend import LocalBackend, ModelCard
from mlxpaged.chat.store import Store
from mlxpaged.errors import ModelNotFound, Unreachable
from mlxpaged.tui.app import TuiApp
from mlxpaged.tui.chat_screen import ChatScreen
from mlxpaged.tui.state import Talk
from tests.scripted import ScriptedService


class ScriptedLink:
    """A tie to a scripted engine of this process, as `attach` would give it."""

    def __init__(self, service: ScriptedService, notice: str = "", missing: str | None = None) -> None:
        self.backend = LocalBackend(service)
        self.notice = notice
        self.closed = False
        self._missing = missing

    async def look(self, on_status: Callable[[str], None]) -> None:
        if self._missing:
            raise ModelNotFound(f"no model at {self._missing!r}")

    async def ready(self, on_status: Callable[[str], None]) -> ModelCard:
        await self.look(on_status)
        return (await self.backend.models())[0]

    async def close(self) -> None:
        self.closed = True


class Doors:
    """Connects to the engine; `shut` makes it unreachable from then on. `others` are the engines of further models by
    name; `missing` are names of none."""

    def __init__(self, service: ScriptedService, notice: str = "") -> None:
        self.shut = False
        self.others: dict[str | None, ScriptedService] = {}
        self.missing: set[str | None] = set()
        self.opened = 0
        self._service, self._notice = service, notice

    async def __call__(self, model: str | None, say: Callable[[str], None]) -> ScriptedLink:
        if self.shut:
            raise Unreachable("no server answers at http://127.0.0.1:8642; start one with `mlxpaged serve`")
        self.opened += 1
        missing = model if model in self.missing else None
        return ScriptedLink(self.others.get(model, self._service), self._notice, missing)


@dataclass
class Rig:
    """A running app and what a test does with it."""

    app: TuiApp
    pilot: Pilot[None]
    service: ScriptedService
    doors: Doors
    store: Store

    @property
    def chat(self) -> ChatScreen:
        chat = self.app._chat
        assert chat
        return chat

    @property
    def talk(self) -> Talk:
        return self.chat.talk

    async def type(self, text: str) -> None:
        self.chat.prompt.insert(text)
        await self.pilot.pause()

    async def send(self, text: str) -> None:
        """Types and sends; returns once the engine has the request."""
        before = len(self.service.submitted)
        await self.type(text)
        await self.pilot.press("enter")
        await self.until(lambda: len(self.service.submitted) > before)

    async def until(self, holds: Callable[[], object], steps: int = 400) -> None:
        """Lets the loop turn until `holds`; fails when it never does."""
        for _ in range(steps):
            if holds():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"never held: {self.text()}")

    async def step(self, count: int = 1) -> None:
        """The engine says the next delta of every reply, and it is on the screen."""
        for _ in range(count):
            self.service.step()
        await self.drawn()

    async def drawn(self) -> None:
        await asyncio.sleep(0.02)
        await self.chat.frames.settled()
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.drawn()

    def toasts(self) -> str:
        """The notices that are shown, unwrapped."""
        return "\n".join(notice.message for notice in self.app._notifications)

    def text(self) -> str:
        """The screen as plain lines."""
        screen = self.app.screen
        lines = ("".join(segment.text for segment in strip) for strip in screen._compositor.render_strips())
        return "\n".join(line.rstrip() for line in lines)


@asynccontextmanager
async def running(
    service: ScriptedService,
    size: tuple[int, int] = (120, 40),
    store: Store | None = None,
    doors: Doors | None = None,
    **more: Any,
) -> AsyncIterator[Rig]:
    store = store or Store(None)
    doors = doors or Doors(service)
    app = TuiApp(store, doors, **more)
    async with app.run_test(size=size, notifications=True) as pilot:
        rig = Rig(app, pilot, service, doors, store)
        await rig.until(lambda: app.tracker.connections.first.engine or app.tracker.connections.first.note)
        await rig.drawn()
        yield rig
    service.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Runs an async test."""
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]
