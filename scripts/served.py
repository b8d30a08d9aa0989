"""A real server for scripts, and chats with it that note when each piece came. Owns the process; judges nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Told:
    """One streamed reply as its client saw it. Times are seconds from the request; `gaps_s` lie between pieces.
    `outcome`: "whole", "left" (by the client), a status such as "503", "broken" or "stuck"."""

    text: str = ""
    outcome: str = "whole"
    finish: str | None = None
    ttft_s: float | None = None
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    gaps_to_second: list[float] = field(default_factory=list)
    """Where asked for: each token's log probability less that of the next best, 0 where it was not the best."""


class Served:
    """A running server. `process` holds its sockets (None: somebody else's), `child` serves; `url` ends in /v1."""

    def __init__(self, process: subprocess.Popen[str] | None, url: str) -> None:
        self.process = process
        self.url = url
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self.http = httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits)

    @property
    def child(self) -> psutil.Process:
        assert self.process is not None
        return psutil.Process(self.process.pid).children()[0]

    async def kv(self) -> dict[str, Any]:
        """The engine as /kv shows it."""
        found: dict[str, Any] = (await self.http.get("/kv")).json()
        return found

    async def idle(self, within_s: float = 30.0) -> dict[str, Any]:
        """Waits until no request is live; the last look at the engine, busy or not."""
        deadline = time.monotonic() + within_s
        while True:
            seen = await self.kv()
            if (not seen["num_running"] and not seen["num_waiting"]) or time.monotonic() > deadline:
                return seen
            await asyncio.sleep(0.1)

    async def chat(
        self, messages: Sequence[dict[str, Any]], leave_after: int | None = None, within_s: float = 300.0, **asked: Any
    ) -> Told:
        """One streamed reply; `leave_after`: close the connection after so many pieces (0: at once)."""
        told, begun = Told(), time.monotonic()
        body = {"messages": list(messages), "stream": True, "stream_options": {"include_usage": True}, **asked}
        try:
            async with asyncio.timeout(within_s):
                await self._stream(body, told, begun, leave_after)
        except TimeoutError:
            told.outcome = "stuck"
        except httpx.HTTPError:
            told.outcome = "broken"
        told.total_s = time.monotonic() - begun
        return told

    async def _stream(self, body: dict[str, Any], told: Told, begun: float, leave_after: int | None) -> None:
        last, pieces = begun, 0
        async with self.http.stream("POST", "/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                told.outcome = str(answer.status_code)
                return
            async for line in answer.aiter_lines():
                if leave_after is not None and pieces >= leave_after:
                    told.outcome = "left"
                    return
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    told.outcome = "broken"
                    return
                if event.get("usage"):
                    _note_usage(told, event["usage"])
                for choice in event["choices"]:
                    told.finish = choice["finish_reason"] or told.finish
                    if piece := choice["delta"].get("content"):
                        now = time.monotonic()
                        if told.ttft_s is None:
                            told.ttft_s = now - begun
                        else:
                            told.gaps_s.append(now - last)
                        told.text, last, pieces = told.text + piece, now, pieces + 1
                        told.gaps_to_second += _gaps_to_second(choice)
        if told.finish is None:
            told.outcome = "broken"


def _note_usage(told: Told, usage: dict[str, Any]) -> None:
    told.prompt_tokens, told.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    told.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _gaps_to_second(choice: dict[str, Any]) -> list[float]:
    found = []
    for token in (choice.get("logprobs") or {}).get("content") or []:
        others = [one["logprob"] for one in token["top_logprobs"] if one["token"] != token["token"]]
        found.append(max(0.0, token["logprob"] - max(others, default=float("-inf"))))
    return found


@asynccontextmanager
async def served(
    model: str, *flags: str, program: Sequence[str] = (sys.executable, "-m", "mlxpaged")
) -> AsyncIterator[Served]:
    """A server over `model`, ready to answer; ended with a signal."""
    command = [*program, "serve", model, "--port", "0", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if " is ready at http" in line:
                break
        else:
            raise SystemExit(f"{' '.join(command)} did not start")
        server = Served(process, line.split(" is ready at ")[1].split()[0])
        drain = asyncio.create_task(asyncio.to_thread(_copy, process))
        yield server
        await server.http.aclose()
        process.terminate()
        await drain
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


def _copy(process: subprocess.Popen[str]) -> None:
    """A full pipe would stop the server."""
    assert process.stderr is not None
    for line in process.stderr:
        print(line, end="", file=sys.stderr)


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of them do not exceed; None where there is none."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
