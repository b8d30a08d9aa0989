"""Which panes stand beside the conversation. Owns from what size on each is shown and what the person wants instead;
draws nothing."""

from __future__ import annotations

from collections.abc import Mapping

from textual.geometry import Size
from textual.widget import Widget

SIDEBAR_FROM, DETAILS_FROM = 90, 150
"""Columns from which a pane is shown without being asked for."""

_LEAST = {"sidebar": SIDEBAR_FROM, "details": DETAILS_FROM}


class Panes:
    """The panes by name, "sidebar" and "details"."""

    def __init__(self, widgets: Mapping[str, Widget]) -> None:
        self._widgets = widgets
        self._wanted: dict[str, bool] = {}

    def toggle(self, name: str) -> None:
        """Shows or hides a pane from the next `arrange` on, whatever the size."""
        self._wanted[name] = not self._widgets[name].display

    def arrange(self, size: Size) -> bool:
        """Shows what fits a terminal of that size, or is wanted; whether it is so small that the conversation needs it
        all."""
        tiny = size.width < 60 or size.height < 15
        for name, widget in self._widgets.items():
            widget.display = self._wanted.get(name, size.width >= _LEAST[name] and not tiny)
        return tiny
