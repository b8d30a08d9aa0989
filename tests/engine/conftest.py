"""An engine service over a tiny model, without files or network."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from mlxpaged.config import EngineConfig
from mlxpaged.engine import host as host_module
from mlxpaged.engine.events import Delta
from mlxpaged.engine.service import EngineService
from mlxpaged.sched.requests import SamplingParams

from ..model.families import tiny_model
from ..model.rig import loaded
from ..model.words import byte_tokenizer

TIMEOUT_S = 60


class Asked:
    """One request's deltas, as its sink saw them."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.ended = threading.Event()
        self.first = threading.Event()
        self.handle: Any = None

    def sink(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.token_ids:
            self.first.set()
        if delta.finish is not None:
            self.first.set()
            self.ended.set()

    def wait(self) -> Delta:
        assert self.ended.wait(TIMEOUT_S), "the request never ended"
        return self.deltas[-1]

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


class TinyService:
    """A service whose `load` gives a tiny llama over single bytes."""

    def __init__(self, **engine: Any) -> None:
        pressed = engine.pop("pressed", None)
        self.service = EngineService(EngineConfig(**({"num_blocks": 120, "max_rows": 8} | engine)), pressed)
        self.info = self.service.load("tiny").result(TIMEOUT_S)

    def ask(self, prompt: str | list[int], **sampling: Any) -> Asked:
        asked = Asked()
        ids = self.info.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        asked.handle = self.service.submit(ids, SamplingParams(**sampling), asked.sink)
        return asked


@pytest.fixture
def make_service(monkeypatch, tmp_path):
    """make_service(**EngineConfig fields) -> TinyService; all are closed at the end."""
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    made: queue.SimpleQueue[TinyService] = queue.SimpleQueue()

    def tiny(source: Any, dtype: Any) -> Any:
        model, config = tiny_model("llama", vocab_size=258)
        return loaded(model, config, tokenizer=byte_tokenizer(), context_len=400)

    monkeypatch.setattr(host_module, "resolve", lambda name, on_progress=None, fetch=True: name)
    monkeypatch.setattr(host_module, "require_room", lambda source, config: None)
    monkeypatch.setattr(host_module, "load", tiny)

    def make(**engine: Any) -> TinyService:
        service = TinyService(**engine)
        made.put(service)
        return service

    yield make
    while not made.empty():
        made.get().service.close()
