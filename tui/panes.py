"""Which panes stand beside the conversation. Owns from what size on each is shown and what the person wants instead;
draws nothing."""

from __future__ import annotations

from collections.abc import Mapping

from textual.geometry import Size
from textual.widget import Widget

SIDEBAR_FROM, DETAILS_FROM = 90, 150
"""Columns from which a pane is shown without being asked for."""

BOTH_FROM = 110
"""Columns that leave the conversation room beside both panes."""

ROOM_FROM = {"sidebar": 56, "details": 70}
"""Columns that leave the conversation 30 beside a pane that a person asked for; with fewer it is not shown."""

_LEAST = {"sidebar": SIDEBAR_FROM, "details": DETAILS_FROM}


class Panes:
    """The panes by name, "sidebar" and "details"."""

    def __init__(self, widgets: Mapping[str, Widget]) -> None:
        self._widgets = widgets
        self._wanted: dict[str, bool] = {}

    def toggle(self, name: str) -> None:
        """Shows or hides a pane from the next `arrange` on, whatever the size."""
        self._wanted.pop(name, None)  # the last one stands last
        self._wanted[name] = not self._widgets[name].display

    def lacks_room(self, name: str, size: Size) -> bool:
        """Whether a pane is wanted that a terminal of that size has no room for."""
        return self._wanted.get(name, False) and size.width < ROOM_FROM[name]

    def arrange(self, size: Size) -> bool:
        """Shows what fits a terminal of that size, or is wanted, and where there is no room for two what was wanted
        last; whether it is so small that the conversation needs it all. What is wanted and finds no room is shown once
        there is some."""
        tiny = size.width < 60 or size.height < 15
        shown = {
            name: self._wanted.get(name, size.width >= _LEAST[name] and not tiny) and size.width >= ROOM_FROM[name]
            for name in self._widgets
        }
        if size.width < BOTH_FROM and all(shown.values()):
            shown = dict.fromkeys(shown, False) | {list(self._wanted)[-1]: True}
        for name, widget in self._widgets.items():
            widget.display = shown[name]
        return tiny
