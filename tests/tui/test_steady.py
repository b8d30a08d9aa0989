"""What is not drawn again: text that says the same, a layout nobody needs, a drawing that costs too much."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from textual.app import App, ComposeResult
from textual.content import Content
from textual.widgets import Static

from mlxpaged.tui.details import _line
from mlxpaged.tui.pace import DRAW_S, SHARE, SLOWEST_S, Pace
from mlxpaged.tui.reply import Passage, _parser
from mlxpaged.tui.steady import Steady


class Page(App[None]):
    """A text as wide as the screen, one as wide as itself, and a passage."""

    CSS = "#wide { width: 1fr; height: auto; } #own { width: auto; height: 1; }"

    def compose(self) -> ComposeResult:
        yield Steady(id="wide")
        yield Steady(id="own")
        yield Passage()


def told(monkeypatch: pytest.MonkeyPatch, widget: str, *texts: str, size: tuple[int, int] = (20, 10)) -> Sequence[bool]:
    """For each update that `texts` bring about, whether it asks for a new layout."""
    seen: list[bool] = []

    async def run() -> None:
        app = Page()
        async with app.run_test(size=size) as pilot:
            passage = app.query_one(Passage)
            if widget == "passage":
                await passage.append("Begun.")
            await pilot.pause()
            plain = Static.update

            def noted(self: Static, content: Content, *, layout: bool = True) -> None:
                if self.is_attached:
                    seen.append(layout)
                plain(self, content, layout=layout)

            monkeypatch.setattr(Static, "update", noted)
            for text in texts:
                if widget == "passage":
                    await passage.append(text)
                else:
                    app.query_one(f"#{widget}", Steady).say(Content(text))
                await pilot.pause()

    asyncio.run(run())
    return seen


def test_the_same_text_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(told(monkeypatch, "wide", "one", "one", "two", "two")) == 2


def test_a_new_layout_is_asked_for_only_with_another_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, "wide", "one", "four", "a line too long for it", "short") == [False, False, True, True]


def test_a_text_as_wide_as_itself_asks_for_one_with_another_width(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, "own", "one", "two", "three")[1:] == [False, True]


def test_a_paragraph_asks_for_one_only_with_another_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, "passage", " And", " so", " on and on") == [False, False, True]


def test_the_rules_of_markdown_are_put_together_once() -> None:
    assert _parser() is _parser()


def test_cells_of_one_look_are_one_span() -> None:
    line = _line([("■", "red"), ("■", "red"), ("·", "grey"), ("·", "grey"), ("■", "red")])
    assert line.plain == "■■··■"
    assert [(span.start, span.end) for span in line.spans] == [(0, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize(("cpu_s", "pause_s"), [(0.001, DRAW_S), (0.2 * SHARE, 0.2), (9.0, SLOWEST_S)])
def test_drawing_slows_down_as_it_costs_more_and_never_stops(cpu_s: float, pause_s: float) -> None:
    pace = Pace()
    for _ in range(50):
        pace.cost(cpu_s)
    assert pace.pause_s == pytest.approx(pause_s, rel=0.01)


def test_one_dear_drawing_is_soon_forgotten() -> None:
    pace = Pace()
    pace.cost(30.0)
    for _ in range(4):
        pace.cost(0.001)
    assert pace.pause_s < 2 * DRAW_S
