"""What a server costs while nobody asks, and whether it goes on after a sleep.

    python scripts/bench_idle.py [--model smollm2] [--seconds 60] [-- FLAGS]

One chat first, then nothing for `--seconds`: CPU and wake-ups of both processes. Then the serving process is stopped
and continued in mid-reply, as by a laptop's lid: that reply and the next one must come whole.

Prints one JSON line; exits 1 above 0.5% of a core, above 5 wake-ups a second, or when a reply is not whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

import psutil
from served import Served, served

MOST_CPU = 0.005
MOST_WAKE_UPS = 5.0
ASKED = {"max_tokens": 24, "temperature": 0}
QUESTION = [{"role": "user", "content": "Name three rivers."}]


def spent(processes: list[psutil.Process]) -> tuple[float, int]:
    """CPU seconds, and how often a thread of theirs was woken."""
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times), sum(_switches(process) for process in processes)


def _switches(process: psutil.Process) -> int:
    """Voluntary context switches of all threads: on Linux the process's own count is its first thread's alone."""
    if not sys.platform.startswith("linux"):
        return int(process.num_ctx_switches().voluntary)
    return sum(int(psutil.Process(thread.id).num_ctx_switches().voluntary) for thread in process.threads())


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    async with served(args.model, *args.flags) as server:
        assert server.process is not None
        first = await server.chat(QUESTION, **ASKED)
        processes = [psutil.Process(server.process.pid), server.child]
        await asyncio.sleep(2.0)
        cpu, woken = spent(processes)
        await asyncio.sleep(args.seconds)
        cpu_after, woken_after = spent(processes)
        return {
            "model": args.model,
            "seconds": args.seconds,
            "cpu_of_a_core": round((cpu_after - cpu) / args.seconds, 5),
            "wake_ups_a_second": round((woken_after - woken) / args.seconds, 2),
            "rss_mb": [round(process.memory_info().rss / 2**20, 1) for process in processes],
            "after_sleep": await sleep_and_wake(server, first.text),
        }


async def sleep_and_wake(server: Served, expected: str) -> list[str]:
    """The outcomes of a reply that a sleep broke into, and of the next one."""
    running = asyncio.create_task(server.chat(QUESTION, **ASKED))
    while (await server.kv())["num_running"] == 0:
        if running.done():
            break
    server.child.suspend()
    await asyncio.sleep(2.0)
    server.child.resume()
    told = [await running, await server.chat(QUESTION, **ASKED)]
    return [one.outcome if one.text == expected else "another text" for one in told]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("flags", nargs="*", help="after --: flags of `mlxpaged serve`")
    found = asyncio.run(measure(parser.parse_args()))
    print(json.dumps(found))
    calm = found["cpu_of_a_core"] <= MOST_CPU and found["wake_ups_a_second"] <= MOST_WAKE_UPS
    return 0 if calm and set(found["after_sleep"]) == {"whole"} else 1


if __name__ == "__main__":
    sys.exit(main())
