"""Thousands of requests leave nothing behind: neither objects nor memory."""

from __future__ import annotations

import gc
from collections import Counter

import psutil

from tests.scripted import ScriptedService, says
from tests.server.conftest import Running, Serve

BODY = {"messages": [{"role": "user", "content": "hi"}]}
ASKED = 60
"""Requests in each of the two rounds; scripts/soak_server.py sends 10,000."""


def a_round(server: Running) -> None:
    for number in range(ASKED):
        match number % 4:
            case 0:
                answer = server.http.post("/v1/chat/completions", json={**BODY, "stream": True})
            case 1:
                answer = server.http.post("/v1/messages", json=BODY)
            case 2:
                answer = server.http.post("/v1/completions", json={"prompt": "a", "n": 2})
            case _:
                answer = server.http.post("/v1/chat/completions", json={**BODY, "temperature": 9})
        assert answer.status_code in {200, 400}
    server.service.submitted.clear()  # the script's own record


def ours() -> Counter[str]:
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if str(type(one).__module__).startswith("mlxpaged"))


def test_a_second_round_of_requests_leaves_no_more_than_the_first(serve: Serve) -> None:
    server = serve(ScriptedService(lambda *_: says(*"abcdefgh")))
    a_round(server)
    objects, memory = ours(), psutil.Process().memory_info().rss
    a_round(server)
    server.service.wait_until(lambda stats: stats.num_running == 0)
    assert +(ours() - objects) == Counter()
    assert psutil.Process().memory_info().rss - memory < 8 * 2**20
