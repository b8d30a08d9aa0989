"""What the server costs: its CPU for many streams of a scripted engine, against a bare starlette stream that sends the
same bytes in the same pieces.

    python scripts/bench_server.py [--streams 32] [--tokens 200] [--rounds 3] [--most 4.0]

Each server is a process of its own under the same uvicorn settings; the clients are this process. Prints one JSON line;
exits 1 when the ratio is above `--most`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()


def serve_ours(num_tokens: int, forget: bool) -> None:
    """Our server over a scripted engine that says one token a step; with `forget` it keeps no record of requests."""
    from mlxpaged.chat.backend import LocalBackend
    from mlxpaged.server.lifecycle import serve
    from tests.scripted import ScriptedService, says

    script = says(*(f" word{number % 10}" for number in range(num_tokens)))
    service = ScriptedService(lambda *_: script, max_rows=1024)
    if forget:
        service.submitted = deque(maxlen=1)  # type: ignore[assignment]
    serve(LocalBackend(service, name="scripted"), "127.0.0.1", 0, None, _say)


def serve_bare(pieces: Sequence[bytes]) -> None:
    """Starlette alone: an asynchronous generator of ready bytes."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    from mlxpaged.server.lifecycle import listen, url_of

    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def answer(request: Request) -> Response:
        await request.body()
        return StreamingResponse(stream(), media_type="text/event-stream")

    async def run() -> None:
        sockets = listen("127.0.0.1", 0)
        await _say(url_of(sockets[0]))
        app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
        config = uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, access_log=False)
        await uvicorn.Server(config).serve(sockets)

    asyncio.run(run())


async def _say(url: str) -> None:
    print(url, flush=True)


async def read_stream(url: str) -> bytes:
    """One whole response's body, as it came off the wire."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(BODY)}\r\nConnection: close\r\n\r\n".encode() + BODY)
    raw = await reader.read()
    writer.close()
    return raw


async def read_streams(url: str, count: int) -> None:
    answers = await asyncio.gather(*(read_stream(url) for _ in range(count)))
    assert all(b"[DONE]" in answer for answer in answers), "a stream broke off"


def pieces_of(raw: bytes) -> list[bytes]:
    """The chunks of a chunked response."""
    _, _, rest = raw.partition(b"\r\n\r\n")
    pieces = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        pieces.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return pieces[:-1]


class Started:
    """A server process and its CPU clock."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(ROOT / "scripts" / "bench_server.py"), *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
        assert self._process.stdout
        self.url = self._process.stdout.readline().strip()

    def cpu_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def memory_bytes(self) -> int:
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def cost(server: Started, streams: int, rounds: int) -> float:
    """CPU seconds of the server for `streams` streams at once: the mean of `rounds` after one to warm up."""
    asyncio.run(read_streams(server.url, streams))
    before = server.cpu_s()
    for _ in range(rounds):
        asyncio.run(read_streams(server.url, streams))
    return (server.cpu_s() - before) / rounds


def measure(streams: int, num_tokens: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        ours = Started("--serve-ours", "--tokens", str(num_tokens))
        try:
            pieces = pieces_of(asyncio.run(read_stream(ours.url)))
            file = Path(folder) / "pieces.json"
            file.write_text(json.dumps([piece.decode() for piece in pieces]))
            bare = Started("--serve-bare", str(file))
            try:
                ours_s, bare_s = cost(ours, streams, rounds), cost(bare, streams, rounds)
            finally:
                bare.close()
        finally:
            ours.close()
    return {
        "streams": streams,
        "tokens": num_tokens,
        "events": len(pieces),
        "bytes": sum(map(len, pieces)),
        "ours_cpu_s": round(ours_s, 3),
        "bare_cpu_s": round(bare_s, 3),
        "ours_us_per_token": round(ours_s / streams / num_tokens * 1e6, 1),
        "ratio": round(ours_s / bare_s, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--most", type=float, default=4.0)
    parser.add_argument("--serve-ours", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--forget", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve-bare", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve_ours:
        serve_ours(given.tokens, given.forget)
        return 0
    if given.serve_bare:
        serve_bare([piece.encode() for piece in json.loads(Path(given.serve_bare).read_text())])
        return 0
    measured = measure(given.streams, given.tokens, given.rounds)
    print(json.dumps(measured))
    return int(measured["ratio"] > given.most)


if __name__ == "__main__":
    sys.exit(main())
