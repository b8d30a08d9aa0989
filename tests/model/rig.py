"""A synchronous engine over a tiny model, and the stock mlx-lm replies it must equal."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlxpaged.config import EngineConfig
from mlxpaged.engine.build import Built, build
from mlxpaged.model.loader import LoadedModel
from mlxpaged.sched.events import EndEvent, Event, PromptEvent, TokenEvent
from mlxpaged.sched.requests import FinishReason, Request, SamplingParams

CLOSE_LOGITS = 1e-3


def loaded(model: nn.Module, config: dict[str, Any], name: str = "tiny", **fields: Any) -> LoadedModel:
    """A LoadedModel without files."""
    defaults = {"path": None, "tokenizer": None, "defaults": {}, "weights_bytes": 0, "notes": (), "context_len": 512}
    return LoadedModel(name=name, config=config, model=model, **(defaults | fields))


class Rig:
    """An engine core, requests by number, and their token ids."""

    def __init__(self, model: nn.Module, config: dict[str, Any], **engine: Any) -> None:
        self.built: Built = build(loaded(model, config), EngineConfig(**({"num_blocks": 200, "max_rows": 16} | engine)))
        self.core = self.built.core
        self.replies: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.cached: dict[int, int] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.prompt_logprobs: dict[int, list[Any]] = {}

    def add(self, request_id: int, prompt: list[int], max_tokens: int = 16, **sampling: Any) -> None:
        ids = np.asarray(prompt, np.int32)
        ends, grammar = frozenset(sampling.pop("ends", ())), sampling.pop("grammar", None)
        self.core.add(
            Request(request_id, ids, SamplingParams(max_tokens=max_tokens, **sampling), ends, grammar=grammar)
        )

    def step(self) -> None:
        self.core.step(self._take)
        self.core.scheduler.check()

    def run(self) -> dict[int, list[int]]:
        while not self.core.idle:
            self.step()
        return self.replies

    def _take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case TokenEvent(request_id, token, logprob, finish, cached):
                    self.replies.setdefault(request_id, []).append(token)
                    self.logprobs.setdefault(request_id, []).append(logprob)
                    self.cached[request_id] = cached
                    if finish is not None:
                        self.ends[request_id] = finish
                case PromptEvent(request_id, logprobs=logprobs):
                    self.prompt_logprobs.setdefault(request_id, []).extend(logprobs)
                case EndEvent(request_id, finish):
                    self.ends[request_id] = finish


class Stock:
    """Greedy replies of stock mlx-lm, with the gap between the two best logits at each token."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def reply(self, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        cache = make_prompt_cache(self._model)
        ids, gaps = [], []
        logits = self._model(mx.array(prompt)[None], cache=cache)[0, -1]
        for _ in range(max_tokens):
            best = np.sort(np.array(logits.astype(mx.float32)))[-2:]
            ids.append(int(mx.argmax(logits)))
            gaps.append(float(best[1] - best[0]))
            logits = self._model(mx.array([[ids[-1]]]), cache=cache)[0, -1]
        return ids, gaps


def assert_equal_to_stock(reply: list[int], expected: tuple[list[int], list[float]], label: str) -> None:
    """Equal to the first difference; one where the two best logits are nearly level is printed and ends it."""
    ids, gaps = expected
    assert len(reply) == len(ids), f"{label}: {len(reply)} tokens, stock gives {len(ids)}"
    for place, (ours, theirs) in enumerate(zip(reply, ids, strict=True)):
        if ours != theirs:
            assert gaps[place] < CLOSE_LOGITS, (
                f"{label}: token {place} is {ours}, stock gives {theirs} by {gaps[place]:.4f}"
            )
            print(f"{label}: token {place} differs at a gap of {gaps[place]:.1e}")
            return
