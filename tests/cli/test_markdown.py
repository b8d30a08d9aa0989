"""Markdown that streams in: the finished page is the same however it was cut, and only the open block is redrawn."""

from __future__ import annotations

import io
import os
import random

import pyte
import pytest

from mlxpaged.chat.foreign import neutralise
from mlxpaged.cli.markdown import MarkdownStream
from mlxpaged.cli.terminal import LiveRegion, is_plain

DOCUMENT = """# A title

A paragraph with **bold**, `code`, a [link](http://example.org) and <b>text</b>,
whose second line stays a line.

- one
- two
  - nested

1. first

2. second

| a | b |
|---|---|
| 1 | 2 |

```python
def f(x):
    \"\"\"Over
    lines.\"\"\"
    return x + 1

# end
```

~~~
# no markdown **here**
~~~

> quoted

The end, with 漢字 and é.
"""


class Screen(io.StringIO):
    """A terminal that takes what is written and can show its whole scrollback."""

    def __init__(self, rows: int = 40, columns: int = 60) -> None:
        super().__init__()
        self._screen = pyte.HistoryScreen(columns, rows, history=2000, ratio=1)
        self._stream = pyte.Stream(self._screen)
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        self._stream.feed(text)
        return len(text)

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        above = ["".join(line[x].data for x in range(self._screen.columns)) for line in self._screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self._screen.display]).rstrip()


@pytest.fixture(autouse=True)
def sized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def streamed(text: str, sizes: list[int], rows: int = 40) -> Screen:
    """The screen after `text` came in pieces of these sizes (cycled), each drawn."""
    os.environ["LINES"] = str(rows)  # the fixture puts it back
    screen, start, turn = Screen(rows), 0, 0
    seconds = iter(range(10**9))
    stream = MarkdownStream(screen, clock=lambda: float(next(seconds)) * 100)
    while start < len(text):
        size = sizes[turn % len(sizes)]
        stream.feed(text[start : start + size])
        start, turn = start + size, turn + 1
    stream.finish()
    return screen


def test_a_document_looks_as_it_should() -> None:
    assert streamed(DOCUMENT, [7]).text() == "\n".join(
        [
            "A title",
            "",
            "A paragraph with bold, code, a link (http://example.org)",
            "and <b>text</b>,",
            "whose second line stays a line.",
            "",
            " • one",
            " • two",
            "    • nested",
            "",
            " 1 first",
            " 2 second",
            "",
            " a  b",
            " ────",
            " 1  2",
            "",
            "```python",
            "def f(x):",
            '    """Over',
            '    lines."""',
            "    return x + 1",
            "",
            "# end",
            "```",
            "",
            "~~~",
            "# no markdown **here**",
            "~~~",
            "",
            "▌ quoted",
            "",
            streamed("The end, with 漢字 and é.", [99]).text(),  # pyte shows a wide character as two cells
        ]
    )


@pytest.mark.parametrize("seed", range(12))
def test_how_the_text_is_cut_makes_no_difference(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, rng.choice([2, 9, 40])) for _ in range(50)]
    assert streamed(DOCUMENT, sizes).text() == streamed(DOCUMENT, [len(DOCUMENT)]).text()


@pytest.mark.parametrize("seed", range(4))
def test_blocks_taller_than_the_screen_end_up_whole(seed: int) -> None:
    rng = random.Random(seed)
    text = "\n".join(f"- item {number} with some words" for number in range(60)) + "\n\nend"
    shown = streamed(text, [rng.randint(1, 30) for _ in range(20)], rows=12).text()
    assert [line for line in shown.split("\n") if "item" in line] == [
        f" • item {number} with some words" for number in range(60)
    ]
    assert shown.endswith("\n\nend")


def test_a_long_code_block_is_printed_line_by_line_and_never_again() -> None:
    code = "".join(f"line_{number} = {number}\n" for number in range(300))
    screen = streamed(f"```python\n{code}```\n", [11], rows=20)
    assert screen.text() == f"```python\n{code}```"
    # Every line is drawn while it grows and once when it ends; a redraw of the block would be thousands of times more.
    assert sum(len(text) for text in screen.written) < 60 * len(code)


def test_an_unfinished_reply_is_printed_as_far_as_it_came() -> None:
    assert streamed("Hello **wor", [3]).text() == "Hello **wor"
    assert streamed("```python\nx = 1\ny = ", [3]).text() == "```python\nx = 1\ny ="


def test_only_changed_lines_are_rewritten() -> None:
    screen = Screen()
    region = LiveRegion(screen)
    region.draw(["one", "two", "three"], height=40)
    region.draw(["one", "two", "three and four"], height=40)
    assert "one" not in screen.written[-1] and "two" not in screen.written[-1]
    region.draw(["one", "two", "three and four"], height=40)
    assert len(screen.written) == 2
    region.commit(["one", "two"])
    region.draw(["next"], height=40)
    assert screen.text() == "one\ntwo\nnext"


def test_a_passing_status_leaves_no_trace() -> None:
    screen = Screen()
    stream = MarkdownStream(screen)
    stream.status("reading: 10 of 90 tokens")
    assert "reading" in screen.text()
    stream.feed("Hi")
    stream.finish()
    assert screen.text() == "Hi"


def test_held_back_text_is_drawn_by_refresh() -> None:
    now = 0.0
    screen = Screen()
    stream = MarkdownStream(screen, clock=lambda: now)
    stream.feed("one ")
    stream.feed("two")
    assert screen.text() == "one"
    now = 1.0
    stream.refresh()
    assert screen.text() == "one two"


@pytest.mark.parametrize(
    ("foreign", "safe"),
    [
        ("\x1b[2J", "␛[2J"),
        ("\x1b]52;c;aGk=\x07", "␛]52;c;aGk=␇"),
        ("a\rb\r\nc", "ab\nc"),
        ("\x9b31m\x7f\x00", "\ufffd31m␡␀"),
        ("tab\tand\nline é 漢", "tab\tand\nline é 漢"),
    ],
)
def test_foreign_text_cannot_steer_the_terminal(foreign: str, safe: str) -> None:
    assert neutralise(foreign) == safe


def test_plain_text_is_for_pipes_and_for_who_asks() -> None:
    assert not is_plain(Screen(), {"TERM": "xterm"})
    assert is_plain(Screen(), {"NO_COLOR": "1"})
    assert is_plain(Screen(), {"TERM": "dumb"})
    assert is_plain(io.StringIO(), {})
