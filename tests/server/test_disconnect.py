"""A client that leaves takes its work with it, wherever the request is and however it was asked for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from mlxpaged.engine.events import Delta, EngineStats
from tests.scripted import ScriptedService, says
from tests.server.conftest import Running, Serve

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def is_idle(stats: EngineStats) -> bool:
    return stats.num_running == stats.num_waiting == 0


@contextmanager
def asked(server: Running, body: dict[str, object], path: str = "/v1/chat/completions") -> Iterator[None]:
    """A request under way; the connection is closed at the end, without having read an answer."""
    ready = threading.Event()
    address = urlsplit(server.url)
    payload = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nHost: x.localhost\r\nContent-Type: application/json\r\nContent-Length: "

    async def ask(left: asyncio.Event) -> None:
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(f"{head}{len(payload)}\r\n\r\n".encode() + payload)
        await writer.drain()
        ready.set()
        await left.wait()
        writer.close()
        await writer.wait_closed()

    loop = asyncio.new_event_loop()
    left = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(ask(left),))
    thread.start()
    try:
        assert ready.wait(20)
        yield
    finally:
        loop.call_soon_threadsafe(left.set)
        thread.join(20)
        loop.close()


@pytest.mark.parametrize("stream", [True, False])
def test_before_the_first_token(serve: Serve, stream: bool) -> None:
    service = ScriptedService(manual=True)
    with asked(serve(service), {**HELLO, "stream": stream}):
        service.wait_until(lambda stats: stats.num_running == 1)
    service.wait_until(lambda _: service.num_cancelled == 1)
    service.step()
    assert is_idle(service.stats())


@pytest.mark.parametrize("stream", [True, False])
def test_while_waiting_in_the_queue(serve: Serve, stream: bool) -> None:
    service = ScriptedService(lambda *_: says(*"abcd"), manual=True, max_rows=1)
    server = serve(service)
    with asked(server, {**HELLO, "stream": stream}):
        service.wait_until(lambda stats: stats.num_running == 1)
        with asked(server, {**HELLO, "stream": stream}):
            service.wait_until(lambda stats: stats.num_waiting == 1)
        service.wait_until(lambda _: service.num_cancelled == 1)
        service.step()
        assert (service.stats().num_running, service.stats().num_waiting) == (1, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_in_the_middle_of_a_reply_and_of_held_text(serve: Serve, stream: bool) -> None:
    service = ScriptedService(lambda *_: [*says("a")[:1], Delta(token_ids=(226,)), *says("b")], manual=True)
    with asked(serve(service), {**HELLO, "stream": stream}):
        service.wait_until(lambda stats: stats.num_running == 1)
        service.step()
        service.step()
    service.wait_until(lambda _: service.num_cancelled == 1)
    service.step()
    assert is_idle(service.stats())


def test_all_choices_of_all_prompts_go_with_the_client(serve: Serve) -> None:
    service = ScriptedService(manual=True)
    with asked(serve(service), {"prompt": ["a", "b"], "n": 3}, "/v1/completions"):
        service.wait_until(lambda stats: stats.num_running == 6)
    service.wait_until(lambda _: service.num_cancelled == 6)
    service.step()
    assert is_idle(service.stats())


def test_a_reply_read_to_its_end_is_not_cancelled(serve: Serve) -> None:
    server = serve()
    for stream in (True, False):
        assert server.http.post("/v1/chat/completions", json={**HELLO, "stream": stream}).status_code == 200
    server.service.wait_until(is_idle)
    assert server.service.num_cancelled == 0


def test_a_storm_of_200_clients_leaves_nothing_running_and_the_next_answer_is_right(serve: Serve) -> None:
    """Half streams, half not; each leaves at its own moment: on connecting, after the headers, after some text."""
    service = ScriptedService(lambda *_: says(*("x" * 2000)), max_rows=8)
    server = serve(service)

    async def visit(client: httpx.AsyncClient, number: int) -> None:
        body = {**HELLO, "stream": number % 2 == 0, "n": 1 + number % 3}
        try:
            async with asyncio.timeout(0.002 * (number % 40)):
                async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    async for _ in answer.aiter_raw():
                        if number % 5 == 0:
                            return
        except (TimeoutError, httpx.TransportError):
            return

    async def storm() -> None:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, limits=limits, timeout=30) as client:
            await asyncio.gather(*(visit(client, number) for number in range(200)))

    asyncio.run(storm())
    service.wait_until(is_idle)
    answer = server.http.post("/v1/chat/completions", json=HELLO).json()
    assert answer["choices"][0]["message"]["content"] == "x" * 2000
