"""Text that is told often and changes seldom. Owns when such a widget is redrawn and when the screen is laid out anew;
knows nothing of what it says.

Both cost far more than finding out: Textual draws and lays out a widget whenever it is told something, the same or not,
and on a machine without a GPU the engine pays for every drawing with its own time.
"""

from __future__ import annotations

from typing import cast

from textual.content import Content
from textual.css.styles import RulesMap
from textual.widget import Widget
from textual.widgets import Static


def needs_layout(widget: Widget, before: Content, after: Content) -> bool:
    """Whether a widget whose size follows its text has another size with `after`."""
    width, styles = widget.content_size.width, widget.styles
    rules = cast(RulesMap, styles)  # Textual's own word for it
    if not width:
        return True
    if styles.width and styles.width.is_auto:
        return before.get_optimal_width(rules, width) != after.get_optimal_width(rules, width)
    return before.get_height(rules, width) != after.get_height(rules, width)


class Steady(Static):
    """Redraws only where it says something else."""

    def __init__(self, classes: str | None = None, id: str | None = None) -> None:
        super().__init__(Content(""), classes=classes, id=id)
        self._said = Content("")

    def say(self, content: Content) -> None:
        """The whole text from now on."""
        if not content.is_same(self._said):
            before, self._said = self._said, content
            self.update(content, layout=needs_layout(self, before, content))
