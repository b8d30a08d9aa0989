"""The backend over HTTP: the same replies and the same errors as the local one, through a real server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import httpx
import pytest

from mlxpaged.chat.messages import Messages
from mlxpaged.chat.remote import RemoteBackend
from mlxpaged.engine.events import Delta, Progress, Timing
from mlxpaged.errors import ModelNotFound, Overloaded, RequestError, Unreachable
from mlxpaged.sched.requests import FinishReason, SamplingParams
from tests.scripted import ByteTokenizer, ScriptedService, says
from tests.server.conftest import running_server

HELLO = Messages(({"role": "user", "content": "hi"},))
PLAIN = SamplingParams()


def run(work: Callable[[RemoteBackend], Coroutine[Any, Any, Any]], service: ScriptedService, **options: Any) -> Any:
    async def connected(url: str) -> Any:
        backend = RemoteBackend(url, **options)
        try:
            return await work(backend)
        finally:
            await backend.close()

    with running_server(service) as server:
        return asyncio.run(connected(server.url))


@pytest.mark.parametrize("prompt", [HELLO, "hi", [1, 2]], ids=["messages", "text", "ids"])
def test_deltas_arrive_as_the_engine_made_them(prompt: Any) -> None:
    held = [
        Delta(progress=Progress(0, 21, 0, queue_position=3)),
        Delta(progress=Progress(8, 21, 4)),
        Delta(token_ids=(226, 150)),
        Delta(text="\u2588\u2028\x85", token_ids=(136,)),
    ]
    service = ScriptedService(lambda *_: [*held, *says("Hel", "lo", stop_reason="END")])

    async def work(backend: RemoteBackend) -> list[Delta]:
        return [delta async for delta in await backend.start(prompt, PLAIN)]

    deltas = run(work, service)
    assert deltas[:-1] == [*held, *says("Hel", "lo")[:-1]]
    last = deltas[-1]
    assert (last.finish, last.stop_reason, last.timing) == (FinishReason.STOP, "END", Timing(0.0, 0.25, 1.25))
    assert last.usage is not None and last.usage.completion_tokens == 8


def test_every_sampling_parameter_crosses() -> None:
    asked = SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((5, -1.5),),
        seed=7,
        stop=("a", "b"),
        stop_token_ids=(9,),
        min_tokens=2,
        ignore_eos=True,
        skip_special_tokens=False,
    )
    service = ScriptedService()

    async def work(backend: RemoteBackend) -> None:
        for prompt in (HELLO, "hi"):
            async for _ in await backend.start(prompt, asked):
                pass

    run(work, service)
    chat, plain = [sampling for _, sampling in service.submitted]
    assert chat == asked and plain == replace(asked, continues_text=True)


def test_without_max_tokens_a_plain_text_runs_to_the_end_of_the_context_too() -> None:
    service = ScriptedService(context_len=100)

    async def work(backend: RemoteBackend) -> None:
        async for _ in await backend.start([1, 2], PLAIN):
            pass

    run(work, service)
    assert service.submitted[0][1].max_tokens == 98


def test_template_options_cross() -> None:
    template = "{{ messages[-1].content }}{% if mood %}{{ mood }}{% endif %}{% if add_generation_prompt %}!{% endif %}"
    service = ScriptedService(tokenizer=ByteTokenizer(chat_template=template))
    story = Messages(
        ({"role": "user", "content": "x"}, {"role": "assistant", "content": "ab"}),
        template_kwargs={"mood": "z"},
        add_generation_prompt=False,
        continue_final_message=True,
    )

    async def work(backend: RemoteBackend) -> tuple[list[int], list[int]]:
        return await backend.tokenize(story), await backend.tokenize(HELLO)

    assert run(work, service) == ([97, 98], [104, 105, 33])


def test_tokens_models_and_stats_cross() -> None:
    async def work(backend: RemoteBackend) -> None:
        assert await backend.tokenize("ab") == [256, 97, 98]
        assert await backend.tokenize("ab", add_special=False) == [97, 98]
        assert await backend.detokenize([97, 258]) == "a<|im_end|>"
        (card,) = await backend.models()
        assert (card.name, card.state, card.context_len, card.defaults) == ("scripted", "ready", 4096, {"top_k": 20})
        assert (card.quantisation, card.family) == ("4 bits, groups of 64", "qwen3")
        assert (await backend.stats()).blocks_free == 64

    run(work, ScriptedService(defaults={"top_k": 20}, quantisation="4 bits, groups of 64", family="qwen3"))


@pytest.mark.parametrize(
    ("prompt", "model", "error", "words"),
    [
        (Messages(({"role": "king", "content": "x"},)), None, RequestError, "must be one of"),
        ("x" * 5000, None, RequestError, "maximum context length is 4096"),
        (HELLO, "absent", ModelNotFound, "this server has scripted"),
    ],
)
def test_the_servers_errors_are_ours_again(prompt: Any, model: str | None, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run(lambda backend: backend.start(prompt, PLAIN), ScriptedService(), model=model)


def test_a_loading_server_is_overloaded() -> None:
    with pytest.raises(Overloaded, match="still loading"):
        run(lambda backend: backend.start(HELLO, PLAIN), ScriptedService(loading=True))


def test_no_server_is_unreachable_with_a_way_out() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: a connection is refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(Unreachable, match="mlxpaged serve") as refused:
            asyncio.run(RemoteBackend(url).models())
    assert url in str(refused.value) and refused.value.exit_code == 4


def test_another_kind_of_server_is_told_apart() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(502, text="<html>"))
    with pytest.raises(Unreachable, match="502"):
        asyncio.run(RemoteBackend("http://x", transport=transport).models())


def test_cancel_ends_the_reply_here_and_there() -> None:
    service = ScriptedService(manual=True)

    async def work(backend: RemoteBackend) -> list[Delta]:
        reply = await backend.start(HELLO, PLAIN)
        service.step()
        deltas = []
        async for delta in reply:
            deltas.append(delta)
            reply.cancel()
        await asyncio.to_thread(service.wait_until, lambda _: service.num_cancelled == 1)
        return deltas

    deltas = run(work, service)
    assert [delta.text for delta in deltas[:1]] == ["Hel"]
    assert deltas[-1].finish is FinishReason.CANCELLED


def test_an_error_event_and_a_stream_cut_short_end_the_reply_with_an_error() -> None:
    async def work(backend: RemoteBackend) -> list[Delta]:
        return [delta async for delta in await backend.start(HELLO, PLAIN)]

    failed = run(work, ScriptedService(lambda *_: says("a", finish=FinishReason.ERROR, error="step 3 failed")))
    assert (failed[-1].finish, failed[-1].error) == (FinishReason.ERROR, "step 3 failed")

    cut = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=cut))

    async def read() -> list[Delta]:
        return await work(RemoteBackend("http://x", transport=transport))

    deltas = asyncio.run(read())
    assert (deltas[0].text, deltas[-1].finish) == ("a", FinishReason.ERROR)
    assert deltas[-1].error == "the server's connection ended in mid-reply"


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b'{"choices":[{}]}', b'{"choices":[{"text":"a","finish_reason":"what"}]}']
)
def test_a_stream_that_is_not_ours_ends_the_reply_with_an_error(data: bytes) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=b"data: " + data + b"\n\n"))

    async def read() -> list[Delta]:
        return [delta async for delta in await RemoteBackend("http://x", transport=transport).start(HELLO, PLAIN)]

    last = asyncio.run(read())[-1]
    assert (last.finish, last.error) == (FinishReason.ERROR, "the server's stream is not one of ours; check --url")
