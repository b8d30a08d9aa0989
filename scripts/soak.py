"""The real server under mixed load for a while: does it leak, stick or say something else than it says alone?

    python scripts/soak.py [--model smollm2] [--minutes 30] [--workers 12] [--kv-tokens 2000] [--out FILE] [-- FLAGS]

First every case is asked once, alone, of a server without a prefix cache: what each must say. Then workers ask random
cases of another server whose KV pool is small, so that rows are preempted and blocks are evicted: whole replies,
clients that leave after some pieces or before the first, and prompts that are long. FLAGS go to both servers.

One JSON report goes to stdout; the exit code is 1 when it holds a finding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from served import ROOT, Served, Told, quantile, served

WORDS = [
    "river",
    "stone",
    "window",
    "garden",
    "winter",
    "letter",
    "market",
    "bridge",
    "candle",
    "harbour",
    "forest",
    "silver",
    "morning",
    "paper",
    "kitchen",
]
SYSTEMS = ("You are brief.", "You are a careful clerk. " + "Keep the files in order and answer in one line. " * 12)
NEAR_TIE = 0.02
"""Log probabilities this close may change order with the shape of a batch; a greedy reply may then differ."""
POOL_THREADS = 2
"""What asyncio's pool may still start after the warm-up."""
MOST_SLOPE_MB = 1.0
WARM_UP = 1 / 3
STUCK_S = 180.0


@dataclass(frozen=True)
class Case:
    """One conversation and how it is sampled."""

    name: str
    messages: tuple[dict[str, str], ...]
    asked: dict[str, Any]


def cases(long_words: int, seed: int) -> list[Case]:
    """Short chats, chats of several turns over a shared system prompt, and long prompts; greedy and sampled."""
    rng = random.Random(seed)
    made = []
    for number in range(24):
        kind = ("short", "turns", "long")[number % 3]
        messages = [{"role": "system", "content": SYSTEMS[number % 2]}] if kind != "short" else []
        turns = 3 if kind == "turns" else 1
        for turn in range(turns):
            words = long_words if kind == "long" else rng.randint(3, 20)
            text = " ".join(rng.choice(WORDS) for _ in range(words))
            messages.append({"role": "user", "content": f"{text}. Say more about the {WORDS[number % len(WORDS)]}."})
            if turn < turns - 1:
                messages.append({"role": "assistant", "content": f"It is about the {rng.choice(WORDS)}."})
        asked: dict[str, Any] = {"max_tokens": rng.choice([8, 24, 120]), "temperature": 0}
        if number % 4 == 3:
            asked |= {"temperature": 0.8, "top_p": 0.95, "seed": number}
        made.append(Case(f"{kind} {number}", tuple(messages), asked))
    return made


@dataclass
class Findings:
    """What happened, and what was seen from outside meanwhile."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    near_ties: int = 0
    gaps_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    samples: list[tuple[float, float, int, int]] = field(default_factory=list)  # minutes, MB, threads, descriptors


async def ask_alone(args: argparse.Namespace, made: list[Case]) -> dict[str, Told]:
    """What every case says when nothing else runs."""
    async with served(args.model, "--no-prefix-cache", "--max-num-seqs", "1", *args.flags) as server:
        return {
            case.name: await server.chat(case.messages, **case.asked, logprobs=True, top_logprobs=2) for case in made
        }


async def worker(
    server: Served, made: list[Case], alone: dict[str, Told], rng: random.Random, until: float, seen: Findings
) -> None:
    """Asks until the time is up. One in four clients leaves early, half of those before the first piece."""
    while time.monotonic() < until:
        case = rng.choice(made)
        leave = rng.choice([0, rng.randint(1, 6)]) if rng.random() < 0.25 else None
        told = await server.chat(case.messages, leave_after=leave, within_s=STUCK_S, **case.asked)
        seen.outcomes[told.outcome] += 1
        seen.gaps_s += told.gaps_s
        if told.ttft_s is not None:
            seen.ttfts_s.append(told.ttft_s)
        if told.outcome in ("whole", "left"):
            judge(case, told, alone[case.name], seen)
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random())


def judge(case: Case, told: Told, expected: Told, seen: Findings) -> None:
    """A reply must be what it is alone, a broken-off one its beginning. A greedy one may leave that path where two
    tokens are nearly level."""
    same = told.text == expected.text if told.outcome == "whole" else expected.text.startswith(told.text)
    if same:
        return
    common = next(
        (place for place, (a, b) in enumerate(zip(told.text, expected.text, strict=False)) if a != b),
        min(len(told.text), len(expected.text)),
    )
    if case.asked["temperature"] == 0 and min(expected.gaps_to_second, default=1.0) < NEAR_TIE:
        seen.near_ties += 1
        return
    seen.wrong.append(
        {
            "case": case.name,
            "said": told.text[common - 20 : common + 40],
            "alone": expected.text[common - 20 : common + 40],
            "at": common,
        }
    )


async def watch(server: Served, seen: Findings, every_s: float = 1.0) -> None:
    """Memory, threads and descriptors of the serving process, until cancelled."""
    begun, child = time.monotonic(), server.child
    while True:
        with child.oneshot():
            seen.samples.append(
                ((time.monotonic() - begun) / 60, child.memory_info().rss / 2**20, child.num_threads(), child.num_fds())
            )
        await asyncio.sleep(every_s)


def slope(samples: list[tuple[float, float, int, int]]) -> float:
    """MB a minute after the warm-up, by least squares."""
    kept = samples[samples.index(warm(samples)) :]
    if len(kept) < 3:
        return 0.0
    minutes, megabytes = np.array([sample[0] for sample in kept]), np.array([sample[1] for sample in kept])
    return float(np.polyfit(minutes, megabytes, 1)[0])


def warm(samples: list[tuple[float, float, int, int]]) -> tuple[float, float, int, int]:
    """The first sample after the warm-up."""
    return samples[int(len(samples) * WARM_UP)]


def threads_leaked(before: int, after: int) -> int:
    """How many more there are, if more than a pool may have started, which does so as work overlaps."""
    return after - before if after - before > POOL_THREADS else 0


def small_budget(args: argparse.Namespace) -> int:
    """The least --memory-budget with which one request of --kv-tokens fits, and so the pool that holds no more."""
    ctx = ("--ctx", str(args.kv_tokens))
    command = [sys.executable, "-m", "mlxpaged", "load", args.model, "--estimate", "--json", *ctx]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(done.stderr)
    return int(json.loads(done.stdout)["least_bytes"])


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    made = cases(args.long_words, args.seed)
    alone = await ask_alone(args, made)
    unsure = [name for name, told in alone.items() if told.outcome != "whole"]
    seen = Findings()
    small = ("--memory-budget", str(small_budget(args)), "--ctx", str(args.kv_tokens))
    async with served(args.model, *small, *args.flags) as server:
        await server.chat(made[0].messages, **made[0].asked)  # connections, threads and buffers that stay
        before = await server.idle()
        descriptors = server.child.num_fds()
        pid = server.child.pid
        watching = asyncio.create_task(watch(server, seen))
        until = time.monotonic() + args.minutes * 60
        await asyncio.gather(
            *(worker(server, made, alone, random.Random(args.seed + n), until, seen) for n in range(args.workers))
        )
        after = await server.idle()
        watching.cancel()
        await server.http.aclose()
        fds_after = await settled_descriptors(server, descriptors)
        survived = server.process.poll() is None and server.child.pid == pid
        threads_after = server.child.num_threads() if survived else 0
    return report(args, seen, before, after, unsure) | {
        "threads": [warm(seen.samples)[2], threads_after],
        "descriptors": [descriptors, fds_after],
        "survived": survived,
    }


async def settled_descriptors(server: Served, wanted: int, within_s: float = 10.0) -> int:
    """Open descriptors once the clients' connections are gone, or after a while."""
    deadline = time.monotonic() + within_s
    while (count := server.child.num_fds()) > wanted and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return count


def report(
    args: argparse.Namespace, seen: Findings, before: dict[str, Any], after: dict[str, Any], unsure: list[str]
) -> dict[str, Any]:
    return {
        "model": args.model,
        "minutes": args.minutes,
        "workers": args.workers,
        "kv_tokens": args.kv_tokens,
        "requests": sum(seen.outcomes.values()),
        "outcomes": dict(seen.outcomes),
        "unsure_alone": unsure,
        "wrong": seen.wrong,
        "near_ties": seen.near_ties,
        "ttft_p50_s": quantile(seen.ttfts_s, 0.5),
        "ttft_p95_s": quantile(seen.ttfts_s, 0.95),
        "itl_p50_s": quantile(seen.gaps_s, 0.5),
        "itl_p95_s": quantile(seen.gaps_s, 0.95),
        "memory_mb": [round(sample[1], 1) for sample in (seen.samples[:1] + seen.samples[-1:])],
        "memory_slope_mb_a_minute": round(slope(seen.samples), 2),
        "preemptions": after["preemptions"],
        "evictions": after["evictions"],
        "blocks_left_used": after["blocks_used"],
        "still_live": after["num_running"] + after["num_waiting"],
        "steps": after["steps"] - before["steps"],
    }


def findings(found: dict[str, Any]) -> list[str]:
    """What a report says is wrong, in words. A slope means something only when there was time to warm up."""
    outcomes = found["outcomes"]
    checks = {
        "wrong answers": len(found["wrong"]),
        "stuck requests": outcomes.get("stuck", 0),
        "broken replies": outcomes.get("broken", 0),
        "refused requests": sum(count for name, count in outcomes.items() if name.isdecimal()),
        "cases that failed alone": len(found["unsure_alone"]),
        "requests still live at the end": found["still_live"],
        "blocks held at the end": found["blocks_left_used"],
        "threads more than after the warm-up": threads_leaked(*found["threads"]),
        "descriptors more than at the start": max(0, found["descriptors"][1] - found["descriptors"][0]),
        "crashes": int(not found["survived"]),
    }
    said = [f"{count} {what}" for what, count in checks.items() if count]
    if found["minutes"] >= 10 and found["memory_slope_mb_a_minute"] >= MOST_SLOPE_MB:
        said.append(f"memory grows by {found['memory_slope_mb_a_minute']} MB a minute")
    return said


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--kv-tokens", type=int, default=2000)
    parser.add_argument("--long-words", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="after --: flags of `mlxpaged serve`")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    found = asyncio.run(soak(args))
    found["findings"] = findings(found)
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 1 if found["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
