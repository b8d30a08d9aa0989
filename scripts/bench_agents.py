"""Agents on one server: chats that share a long system prompt and grow by tool results, with pauses and branches.

    python scripts/bench_agents.py [--model smollm2] [--chats 8] [--system-tokens 8000] [--turns 5]
        [--result-tokens 300] [--new-tokens 64] [--pause 0.5] [--branch 0.2] [--url URL] [-- FLAGS]

Every chat begins with the same system prompt and a task of its own. Each turn asks for a reply, adds it and the result
of a tool, waits a random pause of at most `--pause` seconds, and goes on; with the probability `--branch` it first goes
back one turn and takes another way from there. FLAGS go to the server; with --url a running one is asked instead.

Prints one JSON line. A prefill is cold when less than half of the prompt was found; the first one has to be, and with a
shared system prompt it should be the only one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from served import Served, Told, quantile, served

WORDS = ("read", "write", "list", "search", "open", "build", "test", "merge", "commit", "deploy", "trace", "report")
TOKENS_A_WORD = 1.1


def words(rng: random.Random, tokens: int) -> str:
    """Text of about so many tokens."""
    return " ".join(rng.choice(WORDS) for _ in range(max(1, round(tokens / TOKENS_A_WORD))))


async def agent(server: Served, number: int, args: argparse.Namespace, told: list[Told]) -> None:
    """One chat, from its task to its last turn."""
    rng = random.Random(args.seed + number)
    system = words(random.Random(args.seed), args.system_tokens)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"Task {number}: {words(rng, 30)}"},
    ]
    turn, last = 0, len(messages)
    while turn < args.turns:
        if turn and rng.random() < args.branch:  # another way from one turn ago
            del messages[last:]
            messages.append({"role": "user", "content": f"Rather {words(rng, 10)}"})
        last = len(messages)
        # Of made-up words a small model makes nothing: unless it may not, it ends at once.
        asked = {"max_tokens": args.new_tokens, "temperature": 0, "seed": number, "ignore_eos": True}
        reply = await server.chat(messages, **asked)
        told.append(reply)
        messages.append({"role": "assistant", "content": reply.text})
        messages.append({"role": "user", "content": f"Result of the tool: {words(rng, args.result_tokens)}"})
        turn += 1
        await asyncio.sleep(rng.random() * args.pause)


def figures(told: list[Told], wall_s: float) -> dict[str, Any]:
    """What the replies say about the prefix cache and the waiting."""
    whole = [one for one in told if one.outcome == "whole"]
    ttfts = [one.ttft_s for one in whole if one.ttft_s is not None]
    gaps = [gap for one in whole for gap in one.gaps_s]
    prompt, cached = sum(one.prompt_tokens for one in whole), sum(one.cached_tokens for one in whole)
    p50, p95 = quantile(ttfts, 0.5), quantile(ttfts, 0.95)
    return {
        "replies": len(whole),
        "failed": len(told) - len(whole),
        "cold_prefills": sum(one.cached_tokens < one.prompt_tokens / 2 for one in whole),
        "prompt_tokens": prompt,
        "cached_share": round(cached / prompt, 4) if prompt else None,
        "longest_prompt": max((one.prompt_tokens for one in whole), default=0),
        "ttft_p50_s": p50,
        "ttft_p95_s": p95,
        "ttft_p95_over_p50": round(p95 / p50, 2) if p50 and p95 else None,
        "itl_p50_s": quantile(gaps, 0.5),
        "itl_p95_s": quantile(gaps, 0.95),
        "out_tok_s": round(sum(one.completion_tokens for one in whole) / wall_s, 2),
        "wall_s": round(wall_s, 2),
    }


@asynccontextmanager
async def asked_server(args: argparse.Namespace) -> AsyncIterator[Served]:
    if args.url is None:
        async with served(args.model, *args.flags) as server:
            yield server
        return
    server = Served(None, args.url)
    yield server
    await server.http.aclose()


async def bench(args: argparse.Namespace) -> dict[str, Any]:
    told: list[Told] = []
    async with asked_server(args) as server:
        begun = time.monotonic()
        await asyncio.gather(*(agent(server, number, args, told) for number in range(args.chats)))
        wall_s = time.monotonic() - begun
    setting = {name: getattr(args, name) for name in ("model", "chats", "system_tokens", "turns", "result_tokens")}
    return setting | figures(told, wall_s)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--url", help="a running server's base URL, with /v1")
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--system-tokens", type=int, default=8000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--result-tokens", type=int, default=300)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0.5)
    parser.add_argument("--branch", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="after --: flags of `mlxpaged serve`")
    return parser.parse_args()


def main() -> int:
    found = asyncio.run(bench(arguments()))
    print(json.dumps(found))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
