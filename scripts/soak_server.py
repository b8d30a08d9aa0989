"""Ten thousand requests against the real server over a scripted engine: memory must be flat afterwards.

    python scripts/soak_server.py [--requests 10000] [--most-mb 10]

Streams, whole answers, wrong bodies and clients that leave, several at a time. The server is a process of its own; its
memory is read after a tenth of the requests and at the end. Prints one JSON line; exits 1 when it grew by more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

import httpx
from bench_server import Started

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
AT_ONCE = 16


async def ask(http: httpx.AsyncClient, number: int) -> None:
    """One request of the kind that `number` says."""
    match number % 6:
        case 0 | 1:
            answer = await http.post("/v1/chat/completions", json={**HELLO, "stream": number % 2 == 0})
        case 2:
            answer = await http.post("/v1/messages", json={**HELLO, "stream": True})
        case 3:
            answer = await http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})
        case 4:
            answer = await http.post("/v1/chat/completions", json={**HELLO, "temperature": 9})
        case _:
            async with http.stream("POST", "/v1/chat/completions", json={**HELLO, "stream": True}) as answer:
                async for _ in answer.aiter_raw():
                    break  # and leave
    assert answer.status_code in {200, 400}, answer.status_code


async def ask_many(url: str, numbers: range) -> None:
    waiting = iter(numbers)

    async def work(http: httpx.AsyncClient) -> None:
        for number in waiting:
            await ask(http, number)

    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        await asyncio.gather(*(work(http) for _ in range(AT_ONCE)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--most-mb", type=float, default=10.0)
    given = parser.parse_args()
    server = Started("--serve-ours", "--tokens", "8", "--forget")
    try:
        begun, first = time.monotonic(), given.requests // 10
        asyncio.run(ask_many(server.url, range(first)))
        before = server.memory_bytes()
        asyncio.run(ask_many(server.url, range(first, given.requests)))
        grown = (server.memory_bytes() - before) / 2**20
        idle = httpx.get(f"{server.url}/v1/kv", trust_env=False).json()
    finally:
        server.close()
    left = idle["num_running"] + idle["num_waiting"]
    print(
        json.dumps(
            {
                "requests": given.requests,
                "seconds": round(time.monotonic() - begun, 1),
                "memory_mb": round(before / 2**20, 1),
                "grown_mb": round(grown, 2),
                "left_running": left,
            }
        )
    )
    return int(grown > given.most_mb or left > 0)


if __name__ == "__main__":
    sys.exit(main())
