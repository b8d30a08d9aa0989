"""What the full-screen app costs the replies it shows: the gap between their tokens, against plain streams of the same
prompts from the same server.

    python scripts/bench_tui_itl.py [--model smollm2] [--sessions 8] [--rounds 3] [--tokens 60] [--screen 200x50]

The app and plain streams take turns; the plain ones begin one after the other, with the app's own delays, and both are
measured from the same number of tokens to the same number: on a CPU a step takes longer the longer the replies are.
What is compared is the server's own histogram of inter-token latencies. A round in which other programs took more than
`--others` of a core is measured again, a few times. Prints one JSON line. Reported, not asserted: it depends on the
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil
from bench_tui import Screen
from served import Served, served

SUBJECTS = (
    "the sea",
    "a mountain village",
    "two old clocks",
    "the first train",
    "a lost map",
    "winter",
    "bees",
    "salt",
)
NEW_TOKENS = 1000
PATIENCE_S = 120.0
LOOK_S = 0.25
ATTEMPTS = 4


def prompts(count: int) -> list[str]:
    """As many as there are sessions, each with a long answer."""
    return [f"Write a long story about {SUBJECTS[number % len(SUBJECTS)]}, part {number}." for number in range(count)]


async def gaps(server: Served) -> tuple[float, int]:
    """The histogram's sum in seconds and its count."""
    text = (await server.http.get(server.url.removesuffix("/v1") + "/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    name = "mlxpaged_inter_token_latency_seconds"
    return float(values[f"{name}_sum"]), int(float(values[f"{name}_count"]))


@dataclass(frozen=True)
class Window:
    """Mean seconds between tokens, and the part of one core that other programs took meanwhile."""

    itl_s: float
    others: float


async def window(server: Served, args: argparse.Namespace) -> Window:
    """While the replies grow from `after` to `after + tokens` each, on average."""
    before, began, others = await grown(server, args.sessions, args.after), time.monotonic(), others_cpu_s()
    after = await grown(server, args.sessions, args.after + args.tokens)
    taken = (others_cpu_s() - others) / (time.monotonic() - began)
    return Window((after[0] - before[0]) / (after[1] - before[1]), taken)


def others_cpu_s() -> float:
    """CPU seconds so far of everything but this process and those it started."""
    total = psutil.cpu_times()
    own = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        times = process.cpu_times()
        own += times.user + times.system
    return total.user + total.nice + total.system - own


async def grown(server: Served, sessions: int, tokens: int) -> tuple[float, int]:
    """The gaps so far, once all replies run and hold so many tokens each on average."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        rows = (await server.kv())["rows"]
        if len(rows) == sessions and sum(row["completion_tokens"] for row in rows) >= sessions * tokens:
            return await gaps(server)
        await asyncio.sleep(LOOK_S)
    raise SystemExit(f"{sessions} replies of {tokens} tokens never ran at once")


async def plain(server: Served, args: argparse.Namespace, delays: Sequence[float]) -> Window:
    """The same replies to clients that draw nothing, each begun `delays` seconds after the one before."""
    streams = []
    try:
        for text, delay in zip(prompts(args.sessions), delays, strict=True):
            await asyncio.sleep(delay)
            asked = server.chat([{"role": "user", "content": text}], max_tokens=NEW_TOKENS, temperature=0.0)
            streams.append(asyncio.create_task(asked))
        return await window(server, args)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await server.idle()


@dataclass(frozen=True)
class Shown:
    """The replies on the app's screen; the part of one core that the app took, and when each was asked for, in seconds
    after the one before."""

    window: Window
    cpu: float
    delays: list[float]


async def shown(server: Served, args: argparse.Namespace) -> Shown:
    """The same replies on the app's screen."""
    with tempfile.TemporaryDirectory() as folder:
        address = server.url.removesuffix("/v1")
        command = [*(sys.executable, "-m", "mlxpaged", "tui", "--url", address, "--ephemeral"), "--temperature", "0"]
        screen = Screen([*command, "--max-tokens", str(NEW_TOKENS)], folder, size=args.screen)
        try:
            delays = await asyncio.to_thread(begin_sessions, screen, args.sessions)
            process, measuring = psutil.Process(screen.process.pid), asyncio.create_task(window(server, args))
            shares = []
            while not measuring.done():
                shares.append(await asyncio.to_thread(screen.share, process, 1.0, False))
            return Shown(await measuring, sum(shares) / len(shares), delays)
        finally:
            screen.process.kill()
            screen.process.wait()
            await server.idle()


def begin_sessions(screen: Screen, count: int) -> list[float]:
    """Asks in one session after the other; the seconds between the questions."""
    screen.until("Ask anything")
    delays, last = [], time.monotonic()
    for number, text in enumerate(prompts(count)):
        if number:
            screen.type("\x0e")
        screen.until("A new session")
        screen.type(f"{text}\r")
        now = time.monotonic()
        delays.append(now - last if number else 0.0)
        last = now
        screen.until("Esc stops")
    return delays


async def measure(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    async with served(args.model, *flags) as server:
        await plain(server, args, [0.0] * args.sessions)  # caches fill
        rounds: list[tuple[Window, Shown]] = []
        for _ in range(args.rounds * ATTEMPTS):
            app = await shown(server, args)
            rounds.append((await plain(server, args, app.delays), app))
            print(in_words(*rounds[-1]), file=sys.stderr)
            if sum(taken(*one) <= args.others for one in rounds) == args.rounds:
                break
    rounds = sorted(rounds, key=lambda one: taken(*one))[: args.rounds]
    plain_s, shown_s = median(one.itl_s for one, _ in rounds), median(app.window.itl_s for _, app in rounds)
    return {
        "sessions": args.sessions,
        "plain_itl_ms": round(plain_s * 1e3, 1),
        "tui_itl_ms": round(shown_s * 1e3, 1),
        "ratio": round(shown_s / plain_s, 3),
        "tui_cpu": round(median(app.cpu for _, app in rounds), 3),
        "others_cpu": round(max(taken(*one) for one in rounds), 3),
    }


def taken(without: Window, app: Shown) -> float:
    """What other programs took of a core in a round."""
    return max(without.others, app.window.others)


def in_words(without: Window, app: Shown) -> str:
    times = f"{without.itl_s * 1e3:.1f} ms plain, {app.window.itl_s * 1e3:.1f} ms shown"
    return f"{times} (app {app.cpu:.1%} of a core, others {without.others:.1%} and {app.window.others:.1%})"


def size(text: str) -> tuple[int, int]:
    """COLUMNSxROWS."""
    columns, _, rows = text.partition("x")
    return int(columns), int(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sessions", type=int, default=8, help="replies at once")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured")
    parser.add_argument("--others", type=float, default=0.1, help="most that other programs may take of one core")
    parser.add_argument("--after", type=int, default=90, help="mean tokens of a reply when measuring begins")
    parser.add_argument("--tokens", type=int, default=60, help="mean tokens by which each grows while measured")
    parser.add_argument("--screen", type=size, default=(200, 50), help="COLUMNSxROWS; narrow ones hide the panes")
    args, flags = parser.parse_known_args()
    print(json.dumps(asyncio.run(measure(args, [flag for flag in flags if flag != "--"]))))


if __name__ == "__main__":
    main()
