"""What keys typed between two prompts stand for: which Enter finishes a line, which a paste brought."""

from __future__ import annotations

import asyncio
import signal

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

from mlxpaged.cli.typeahead import FINISHED, PASTE_S, TypeAhead, keys_of

ENTER, ESCAPE = KeyPress(Keys.Enter, "\r"), KeyPress(Keys.Escape, "\x1b")
SLOW = 4 * PASTE_S


def typed(*chunks: tuple[str, float]) -> list[tuple[KeyPress, float]]:
    """Presses from texts that came at once, each with the seconds since the one before."""
    presses, at = [], 0.0
    for text, wait in chunks:
        at += wait
        names = {"\r": ENTER, "\x1b": ESCAPE}
        presses += [(names.get(char, KeyPress(char)), at) for char in text]
    return presses


def shown(keys: list[KeyPress]) -> str:
    """`|` for an Enter that finishes, `/` for a line break, `^` for an escape."""
    names = {Keys.ControlJ: "/", Keys.Escape: "^", Keys.Enter: "|"}
    assert all(key.data == FINISHED.data for key in keys if key.key == Keys.Enter and key is not ENTER)
    return "".join("!" if key is ENTER else names.get(key.key, key.key) for key in keys)


@pytest.mark.parametrize(
    ("chunks", "meant"),
    [
        ([], ""),
        ([("ab\r", 0), ("c\r", SLOW), ("d", SLOW)], "ab|c|d"),
        ([("a\r", 0), ("\r", SLOW)], "a||"),
        ([("a\rb\rc", 0)], "a/b/c"),
        ([("a\rb\r", 0)], "a/b/"),
        ([("a\r", 0), ("b\r", PASTE_S / 5), ("c\r", SLOW)], "a/b/c|"),
        ([("a\x1b\rb", 0)], "a^!b"),
        ([("\x1b", 0), ("a\r", 1)], "a|"),
        ([("a\x1b", 0)], "a"),
    ],
)
def test_an_enter_finishes_its_line_unless_a_paste_brought_it(chunks: list[tuple[str, float]], meant: str) -> None:
    assert shown(keys_of(typed(*chunks))) == meant


def test_lines_that_wait_stay_finished_and_control_c_is_a_signal_however_it_came() -> None:
    async def between_prompts() -> list[KeyPress]:
        with create_pipe_input() as terminal:
            ahead = TypeAhead(terminal)
            store_typeahead(terminal, [KeyPress("a"), FINISHED, KeyPress("b"), KeyPress(Keys.ControlC, "\x03")])
            ahead.begin()
            terminal.send_text("c\x03")
            while len(interrupts) < 2:
                await asyncio.sleep(0.01)
            ahead.end()
            ahead.close()
            return get_typeahead(terminal)

    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        assert shown(asyncio.run(between_prompts())) == "a|bc"
    finally:
        signal.signal(signal.SIGINT, before)
