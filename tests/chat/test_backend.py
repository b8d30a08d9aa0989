"""The local backend: two phases, cancellation from every side, one wake-up per step."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from mlxpaged.chat.backend import LocalBackend, merge
from mlxpaged.chat.messages import Messages
from mlxpaged.engine.events import Delta
from mlxpaged.errors import Overloaded, PromptTooLong, RequestError
from mlxpaged.sched.requests import FinishReason, SamplingParams
from tests.scripted import BOS, IM_END, IM_START, ByteTokenizer, ScriptedService, says

HELLO = Messages(({"role": "user", "content": "hi"},))
PLAIN = SamplingParams()


def run(work: Callable[[LocalBackend], Coroutine[Any, Any, Any]], service: ScriptedService) -> Any:
    try:
        return asyncio.run(work(LocalBackend(service, name="scripted")))
    finally:
        service.close()


def test_a_reply_is_the_engines_deltas_in_order() -> None:
    async def work(backend: LocalBackend) -> list[Delta]:
        reply = await backend.start(HELLO, PLAIN)
        assert reply.prompt_tokens == 21
        return [delta async for delta in reply]

    deltas = run(work, ScriptedService())
    assert [delta.text for delta in deltas] == ["Hel", "lo", ""]
    assert [delta.finish for delta in deltas] == [None, None, FinishReason.STOP]
    assert deltas[-1].usage is not None and deltas[-1].usage.completion_tokens == 5


def test_messages_are_rendered_texts_get_one_bos_and_ids_stay_as_they_are() -> None:
    async def work(backend: LocalBackend) -> list[list[int]]:
        prompts = [HELLO, "ab", "<s>ab", "", [1, 2]]
        return [await backend.tokenize(prompt) for prompt in prompts]

    chat, text, with_bos, empty, ids = run(work, ScriptedService(manual=True))
    assert chat[0] == IM_START and chat.count(IM_END) == 1 and BOS not in chat
    assert text == with_bos == [BOS, 97, 98]
    assert (empty, ids) == ([BOS], [1, 2])


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        (Messages(()), RequestError),
        (Messages(({"role": "king", "content": "x"},)), RequestError),
        ([], RequestError),
        ([999], RequestError),
        ("x" * 5000, PromptTooLong),
        ("\ud800", RequestError),
    ],
)
def test_what_is_wrong_is_raised_by_start(prompt: Any, error: type[Exception]) -> None:
    service = ScriptedService(manual=True)
    with pytest.raises(error):
        run(lambda backend: backend.start(prompt, PLAIN), service)
    assert service.submitted == []


def test_a_model_without_a_template_takes_plain_text_only() -> None:
    service = ScriptedService(manual=True, tokenizer=ByteTokenizer(chat_template=None))
    with pytest.raises(RequestError, match="has no chat template"):
        run(lambda backend: backend.start(HELLO, PLAIN), service)


def test_before_the_model_is_there_start_says_to_come_back_and_models_says_loading() -> None:
    async def work(backend: LocalBackend) -> None:
        with pytest.raises(Overloaded, match="scripted is still loading"):
            await backend.start(HELLO, PLAIN)
        assert [(card.name, card.state) for card in await backend.models()] == [("scripted", "loading")]

    run(work, ScriptedService(manual=True, loading=True))


def test_leaving_the_loop_cancels_the_request() -> None:
    service = ScriptedService(lambda *_: [*says("a")[:1], *[Delta(text="x")] * 100_000, *says()])

    async def work(backend: LocalBackend) -> None:
        async for delta in await backend.start(HELLO, PLAIN):
            if delta.text == "a":
                break
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.to_thread(service.wait_until, lambda stats: stats.num_running == 0)

    run(work, service)
    assert service.num_cancelled == 1


def test_closing_the_iterator_cancels_the_request() -> None:
    service = ScriptedService(manual=True)

    async def work(backend: LocalBackend) -> None:
        reply = await backend.start(HELLO, PLAIN)
        async with aclosing(aiter(reply)) as deltas:
            service.step()
            assert (await anext(deltas)).text == "Hel"
        assert service.num_cancelled == 1

    run(work, service)


def test_cancelling_the_reading_task_cancels_the_request() -> None:
    service = ScriptedService(manual=True)

    async def read(reply: Any) -> None:
        async for _ in reply:
            pass

    async def work(backend: LocalBackend) -> None:
        task = asyncio.create_task(read(await backend.start(HELLO, PLAIN)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert service.num_cancelled == 1

    run(work, service)


def test_cancel_from_outside_ends_the_iterator_with_that_finish() -> None:
    service = ScriptedService(manual=True)

    async def work(backend: LocalBackend) -> list[Delta]:
        reply = await backend.start(HELLO, PLAIN)
        service.step()
        reply.cancel()
        service.step()
        deltas = [delta async for delta in reply]
        reply.cancel()
        return deltas

    deltas = run(work, service)
    assert [(delta.text, delta.finish) for delta in deltas] == [("Hel", None), ("", FinishReason.CANCELLED)]
    assert service.num_cancelled == 1


def test_a_step_of_many_replies_wakes_the_loop_once() -> None:
    service = ScriptedService(manual=True)

    async def work(backend: LocalBackend) -> int:
        replies = [await backend.start(HELLO, PLAIN) for _ in range(20)]
        loop = asyncio.get_running_loop()
        wakes = 0
        threadsafe = loop.call_soon_threadsafe

        def counted(*arguments: Any, **more: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return threadsafe(*arguments, **more)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        service.step()  # on the loop's own thread, so that the loop cannot wake in the middle of it
        told = [delta.text async for _, delta in merge_first(replies)]
        assert told == ["Hel"] * 20
        return wakes

    async def merge_first(replies: Any) -> Any:
        count = 0
        async with aclosing(merge(replies)) as deltas:
            async for item in deltas:
                yield item
                count += 1
                if count == len(replies):
                    return

    assert run(work, service) == 1


def test_merged_replies_end_together_and_one_closed_takes_all() -> None:
    service = ScriptedService(lambda _, sampling: says(*"abc"[: sampling.choice + 1]))

    async def work(backend: LocalBackend) -> list[str]:
        replies = [await backend.start(HELLO, SamplingParams(choice=choice)) for choice in range(3)]
        texts = ["", "", ""]
        async for index, delta in merge(replies):
            texts[index] += delta.text
        return texts

    assert run(work, service) == ["a", "ab", "abc"]


def test_counts_are_cut_to_the_context() -> None:
    service = ScriptedService(context_len=30, manual=True)
    asked = SamplingParams(max_tokens=1000, min_tokens=500, top_k=10**9)
    run(lambda backend: backend.start(HELLO, asked), service)
    sampling = service.submitted[0][1]
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (9, 9, 259)


def test_a_reply_whose_loop_is_closed_is_cancelled_by_the_next_delta() -> None:
    service = ScriptedService(manual=True)
    run(lambda backend: backend.start(HELLO, PLAIN), service)
    service.step()
    service.step()
    assert service.num_cancelled == 1
    assert service.stats().num_running == 0
