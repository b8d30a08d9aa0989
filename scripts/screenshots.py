"""Makes the README's pictures of the chat and the full-screen app, from a real run on smollm2.

    python scripts/screenshots.py [FOLDER]      # scripts/pictures/ by default

A server of its own is started for it, in folders of its own, and ended afterwards.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pyte
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 300
PROMPTS = (
    "Write a limerick about a cache.",
    "What is a hash table good for? Answer with a short list.",
    "Write a Python function that says whether a number is prime, and explain it.",
)
OTHER_APP = "Tell a long story about a lighthouse keeper and the sea."
CHAT_SIZE, TUI_SIZE, SMALL_SIZE = (30, 92), (156, 44), (80, 24)


@contextmanager
def own_folders() -> Iterator[None]:
    """State and sessions of this run only; servers that were started in it are ended."""
    from mlxpaged.chat.servers import records

    with tempfile.TemporaryDirectory() as folder:
        for name in ("STATE", "DATA", "CONFIG"):
            os.environ[f"MLXPAGED_{name}"] = str(Path(folder) / name.lower())
        try:
            yield
        finally:
            for record in records():
                os.kill(record.pid, signal.SIGTERM)
            while records():
                time.sleep(0.1)


def shoot_chat(file: Path) -> None:
    """`mlxpaged chat` in a terminal: one question, its answer and the figures."""
    rows, columns = CHAT_SIZE
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    chat = pexpect.spawn(
        sys.executable, ["-m", "mlxpaged", "chat"], env=environment, dimensions=CHAT_SIZE, timeout=PATIENCE_S
    )

    def until(text: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while text not in "\n".join(screen.display):
            if time.monotonic() > deadline:
                raise SystemExit(f"{text!r} was never shown:\n" + "\n".join(screen.display))
            data = chat.read_nonblocking(65536, timeout=PATIENCE_S)
            stream.feed(data)
            if b"\x1b[6n" in data:
                chat.send(f"\x1b[{screen.cursor.y + 1};{screen.cursor.x + 1}R")

    until(">>>")
    chat.send(PROMPTS[1] + "\r")
    until("ttft")
    until("/help")
    console = Console(width=columns, record=True, file=io.StringIO(), force_terminal=True)
    for row in range(max(index for index, line in enumerate(screen.display) if line.strip()) + 1):
        console.print(_styled(screen, row), no_wrap=True, crop=True)
    file.write_text(console.export_svg(title="mlxpaged chat"), encoding="utf-8")
    chat.close(force=True)


def _styled(screen: pyte.Screen, row: int) -> Text:
    text = Text()
    for column in range(screen.columns):
        cell = screen.buffer[row][column]
        colour = {"default": "", "brown": "yellow"}.get(cell.fg, cell.fg)
        if colour and len(colour) == 6 and set(colour) <= set("0123456789abcdef"):
            colour = f"#{colour}"
        text.append(cell.data, f"{'bold ' * cell.bold}{'italic ' * cell.italics}{colour}".strip())
    return text


async def shoot_tui(wide: Path, small: Path) -> None:
    """The full-screen app while three of its sessions and another program are answered."""
    from mlxpaged.chat.attach import Attached, attach
    from mlxpaged.chat.messages import Messages
    from mlxpaged.chat.store import Store
    from mlxpaged.sched.requests import SamplingParams
    from mlxpaged.tui.app import TuiApp

    async def connect(model: str | None, say: object) -> Attached:
        return await attach("smollm2")

    other = await attach("smollm2")
    await other.ready()
    app = TuiApp(Store(None), connect, theme="mlxpaged-night")
    async with app.run_test(size=TUI_SIZE) as pilot:
        chat = app._chat
        assert chat
        await app.tracker.connections.first.ready()

        async def ask(text: str) -> None:
            chat.prompt.insert(text)
            await pilot.press("enter")
            await _until(lambda: chat.talk.turns and chat.talk.phase.is_live)

        async def over() -> None:
            await _until(lambda: not chat.talk.phase.is_live)

        await ask(PROMPTS[2])
        await over()
        story = await other.backend.start(
            Messages(({"role": "user", "content": OTHER_APP},)), SamplingParams(max_tokens=400)
        )
        for prompt in PROMPTS[:2]:
            await pilot.press("ctrl+n")
            await ask(prompt)
        await pilot.press("alt+3")
        await ask("Now make it faster for large numbers.")
        await _until(lambda: chat.talk.num_tokens > 40)
        await asyncio.sleep(1.2)  # a look at the engine
        await chat.frames.settled()
        wide.write_text(app.export_screenshot(title="mlxpaged tui"), encoding="utf-8")
        story.cancel()
        await pilot.resize_terminal(*SMALL_SIZE)
        await pilot.pause(0.3)
        await chat.frames.settled()
        small.write_text(app.export_screenshot(title="mlxpaged tui"), encoding="utf-8")
        await app.action_quit()
    await other.close()


async def _until(holds: object) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise SystemExit("the app never got there")
        await asyncio.sleep(0.02)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "scripts" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    with own_folders():
        asyncio.run(shoot_tui(folder / "tui.svg", folder / "tui-80x24.svg"))
        shoot_chat(folder / "chat.svg")
    for file in sorted(folder.glob("*.svg")):
        print(f"{file}  {file.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
