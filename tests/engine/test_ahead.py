"""One step ahead gives the same tokens as waiting for every step, whatever happens in the middle."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ..model.families import tiny_model
from ..model.rig import Rig

ENDS = (7, 11, 23)


def asked(count: int) -> list[dict[str, Any]]:
    """Mixed requests: greedy and seeded, filters and penalties, short and long, some with a last word."""
    rng = random.Random(5)
    shared = [rng.randrange(199) for _ in range(60)]
    found = []
    for index in range(count):
        own = [rng.randrange(199) for _ in range(rng.randint(1, 90))]
        sampling: dict[str, Any] = {"temperature": rng.choice([0.0, 0.0, 0.8, 1.2]), "seed": index}
        if rng.random() < 0.3:
            sampling |= {"top_p": 0.9, "top_k": 40}
        if rng.random() < 0.2:
            sampling |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
        prompt = shared[: rng.randint(0, 60)] + own
        found.append({"prompt": prompt, "max_tokens": rng.randint(1, 30), "cancel_at": None, "sampling": sampling})
        if rng.random() < 0.15:
            found[-1]["cancel_at"] = rng.randint(1, 10)
    return found


def serve(requests: list[dict[str, Any]], ahead: int, **engine: Any) -> Rig:
    """Requests come in waves; some are cancelled as soon as so many of their tokens have been seen."""
    rig = Rig(*tiny_model("llama"), ahead=ahead, max_rows=12, **engine)
    waiting = list(enumerate(requests))
    cancelled: set[int] = set()
    while waiting or not rig.core.idle:
        for index, request in waiting[:3]:
            rig.add(index, request["prompt"], request["max_tokens"], ends=ENDS, **request["sampling"])
        del waiting[:3]
        rig.step()
        for index, request in enumerate(requests):
            at = request["cancel_at"]
            if at is not None and index not in cancelled and len(rig.replies.get(index, [])) >= at:
                rig.core.cancel(index)
                cancelled.add(index)
    return rig


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))


@pytest.mark.parametrize("engine", [{"num_blocks": 400}, {"num_blocks": 34, "step_budget": 24}], ids=["roomy", "tight"])
def test_a_hundred_mixed_requests_get_the_same_tokens_one_step_ahead(engine) -> None:
    requests = asked(100)
    sync, ahead = serve(requests, 0, **engine), serve(requests, 1, **engine)
    if engine["num_blocks"] < 100:
        assert sync.core.scheduler.preemptions > 0 and ahead.core.scheduler.preemptions > 0
    for index, request in enumerate(requests):
        if request["cancel_at"] is None:
            assert ahead.replies[index] == sync.replies[index], f"request {index}"
            assert ahead.ends[index] == sync.ends[index]
        else:
            shorter = min(len(ahead.replies[index]), len(sync.replies[index]))
            assert shorter >= min(request["cancel_at"], len(sync.replies[index]))
            assert ahead.replies[index][:shorter] == sync.replies[index][:shorter]


def test_no_token_after_an_end_reaches_anyone() -> None:
    requests = [request | {"cancel_at": None} for request in asked(40)]
    rig = serve(requests, 1, num_blocks=400)
    for index, request in enumerate(requests):
        reply = rig.replies[index]
        assert not set(reply[:-1]) & set(ENDS)
        assert reply[-1] in ENDS or len(reply) == request["max_tokens"]
