"""The backend over HTTP, against a server of ours. Owns the wire side of a face: requests out, event stream in, error
bodies back into our errors; never imports the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

import httpx
import msgspec

from ..engine.events import Delta, EngineStats, Loading, Progress, Timing, Usage
from ..errors import BadParameter, EngineError, MlxpagedError, ModelNotFound, Overloaded, RequestError, Unreachable
from ..sched.requests import FinishReason, Grammar, SamplingParams
from .backend import ModelCard, Reply
from .messages import Messages
from .prompts import Prompt
from .residency import Waiting

_SILENCE_S = 60.0
"""A live stream says something at least every ten seconds; longer silence than this is a dead server."""


class RemoteBackend:
    """A backend over the server at `url` (with or without `/v1`). `model` None: whichever the server runs.

    Every call raises Unreachable when the server does not answer, and the error the server named otherwise.
    `transport` is for tests.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(_SILENCE_S, connect=5.0),
            transport=transport,
            trust_env=False,  # a proxy has no business between a terminal and its local server
        )

    async def start(self, prompt: Prompt, sampling: SamplingParams, grammar: Grammar | None = None) -> Reply:
        if grammar is not None:
            raise BadParameter("a grammar cannot be sent to a server; ask for a response_format", param="grammar")
        path, body = _request(prompt, sampling, self._model)
        request = self._client.build_request("POST", path, json=body)
        response = await self._send(request, stream=True)
        # The first deltas may be read before the caller looks at the reply: they wait in it.
        reply = Reply(None, lambda: pump.cancel())
        pump = asyncio.create_task(_pump(response, reply))
        await asyncio.sleep(0)  # a task cancelled before its first step would never close the response
        return reply

    async def tokenize(self, prompt: Prompt, add_special: bool = True) -> list[int]:
        if not isinstance(prompt, Messages | str):
            return list(prompt)
        body = _conversation(prompt) if isinstance(prompt, Messages) else {"prompt": prompt}
        answer = await self._json("POST", "/tokenize", {**body, "add_special_tokens": add_special})
        return list(answer["tokens"])

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return str((await self._json("POST", "/detokenize", {"tokens": list(token_ids)}))["prompt"])

    async def models(self) -> tuple[ModelCard, ...]:
        return tuple(
            ModelCard(
                name=entry["id"],
                state=entry.get("state", "ready"),
                context_len=entry.get("context_length"),
                created=entry.get("created", 0),
                defaults=entry.get("defaults", {}),
                served_by=entry.get("served_by", "paged"),
                notes=tuple(entry.get("notes", ())),
                quantisation=entry.get("quantisation"),
                family=entry.get("family"),
            )
            for entry in (await self._json("GET", "/v1/models"))["data"]
        )

    async def stats(self) -> EngineStats:
        return msgspec.convert(await self._json("GET", "/v1/kv"), EngineStats)

    async def load(self, model: str) -> None:
        """Make `model` answer there too. Raises ModelNotFound where the server does not know it or loads none."""
        await self._send(self._client.build_request("POST", "/models/load", json={"model": model}, timeout=None))

    async def unload(self, model: str) -> None:
        """Give the memory of `model` back. Raises ModelNotFound where it is not there or the server unloads none."""
        await self._send(self._client.build_request("POST", "/models/unload", json={"model": model}, timeout=None))

    async def awaited(self) -> Waiting | Loading | None:
        """What a load that was asked for there waits for, or how far it is; None where nothing is known of one."""
        try:
            body = msgspec.json.decode((await self._client.get("/health")).content)
            if "waits" in body:
                return msgspec.convert(body["waits"], Waiting)
            return msgspec.convert(body["loading"], Loading) if "loading" in body else None
        except (httpx.TransportError, msgspec.MsgspecError, TypeError):
            return None

    async def close(self) -> None:
        """Close the connections; replies still running are cancelled by the server."""
        await self._client.aclose()

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        response = await self._send(self._client.build_request(method, path, json=body))
        return msgspec.json.decode(response.content)

    async def _send(self, request: httpx.Request, stream: bool = False) -> httpx.Response:
        try:
            response = await self._client.send(request, stream=stream)
            if response.is_error:
                raise _error_of(response.status_code, await response.aread())
            return response
        except httpx.TransportError as error:
            raise Unreachable(
                f"no server answers at {self.url}; start one with `mlxpaged serve`, or give its address with --url"
            ) from error


_CUT = "the server's connection ended in mid-reply"


async def _pump(response: httpx.Response, reply: Reply) -> None:
    """Read one event stream into a reply; whatever happens, the reply ends."""
    final = Delta(finish=FinishReason.ERROR, error=_CUT)
    try:
        async with aclosing(_deltas(response)) as deltas:
            async for delta in deltas:
                if delta.finish is None:
                    reply.take(delta)
                else:
                    final = delta
    except asyncio.CancelledError:
        final = Delta(finish=FinishReason.CANCELLED)
    except httpx.TransportError:
        final = Delta(finish=FinishReason.ERROR, error=_CUT)
    except (msgspec.DecodeError, AttributeError, LookupError, TypeError, ValueError):
        final = Delta(finish=FinishReason.ERROR, error="the server's stream is not one of ours; check --url")
    finally:
        reply.take(final)
        await response.aclose()


async def _deltas(response: httpx.Response) -> AsyncGenerator[Delta, None]:
    """Our server's chunks as deltas; the one with `finish` comes last, completed by the usage chunk after it."""
    final: Delta | None = None
    async for data in _event_data(response):
        if data == b"[DONE]":
            continue  # read to the end, so that the connection can be used again
        chunk = msgspec.json.decode(data)
        if error := chunk.get("error"):
            final = Delta(finish=FinishReason.ERROR, error=str(error["message"]))
            continue
        if progress := chunk.get("prompt_progress"):
            counts = (progress["processed"], progress["total"], progress["cache"])
            yield Delta(progress=Progress(*counts, progress.get("queue_position")))
        for choice in chunk.get("choices", ()):
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            token_ids = tuple(choice.get("token_ids") or ())
            if text or token_ids:
                yield Delta(text=text or "", token_ids=token_ids)
            if choice["finish_reason"]:
                reason, stop = FinishReason(choice["finish_reason"]), choice.get("stop_reason")
                final = Delta(finish=reason, stop_reason=stop, timing=_timing(chunk.get("timings")))
        if final and (usage := chunk.get("usage")):
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            final = replace(final, usage=Usage(usage["prompt_tokens"], usage["completion_tokens"], cached))
    if final:
        yield final


async def _event_data(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each event. Split at newlines only: httpx's own line reader also splits at U+2028 and the like,
    which JSON may carry as they are."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


_SERVERS_OWN = {
    "choice",
    "logprobs",
    "prompt_logprobs",
    "stop_after",
    "stop_until",
    "shown_special_ids",
    "continues_text",
}
"""Fields of SamplingParams that a server sets itself."""


def _request(prompt: Prompt, sampling: SamplingParams, model: str | None) -> tuple[str, dict[str, Any]]:
    if sampling.logprobs is not None:
        raise BadParameter("logprobs are not read over HTTP by this client; leave them off", param="logprobs")
    body: dict[str, Any] = {name: value for name, value in asdict(sampling).items() if name not in _SERVERS_OWN}
    body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= {"return_token_ids": True, "return_progress": True, "timings_per_token": True}
    if model is not None:
        body["model"] = model
    if isinstance(prompt, Messages):
        return "/v1/chat/completions", body | _conversation(prompt)
    if body["max_tokens"] is None:
        body["max_tokens"] = 2**31 - 1  # absent would mean 16 on this endpoint; the server cuts it to what fits
    return "/v1/completions", body | {"prompt": prompt if isinstance(prompt, str) else list(prompt)}


def _conversation(prompt: Messages) -> dict[str, Any]:
    return {
        "messages": [dict(message) for message in prompt.messages],
        "reasoning_format": "none",
        "chat_template_kwargs": dict(prompt.template_kwargs),
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
    }


def _timing(timings: dict[str, Any] | None) -> Timing | None:
    if not timings:
        return None
    queued_s, ttft_s = timings["queued_ms"] / 1000, timings["ttft_ms"] / 1000
    return Timing(queued_s=queued_s, ttft_s=ttft_s, total_s=timings["total_ms"] / 1000)


def _error_of(status: int, body: bytes) -> MlxpagedError:
    try:
        error = msgspec.json.decode(body)["error"]
        message, param = str(error["message"]), error.get("param")
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        return Unreachable(f"the server answered {status} with something that is not ours; check --url")
    if status == 404:
        return ModelNotFound(message)
    if status in {429, 503}:
        return Overloaded(message)
    if status >= 500:
        return EngineError(message)
    return RequestError(message, param)
