"""The colour themes. Owns our own two and the hues of sessions; the rest are Textual's."""

from __future__ import annotations

from textual.theme import Theme

NIGHT = Theme(
    name="mlxpaged-night",
    primary="#7aa2f7",
    secondary="#bb9af7",
    accent="#7dcfff",
    success="#9ece6a",
    warning="#e0af68",
    error="#f7768e",
    foreground="#c8d0e8",
    background="#11131c",
    surface="#161925",
    panel="#1f2333",
    dark=True,
    variables={
        "foreground-muted": "#7f88a8",
        "foreground-disabled": "#4b5270",
        "border": "#3b4261",
        "border-blurred": "#272c40",
        "footer-background": "#11131c",
        "footer-key-foreground": "#7aa2f7",
        "footer-description-foreground": "#7f88a8",
        "block-cursor-background": "#262c42",
        "block-cursor-foreground": "#e6ebff",
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": "#1f2437",
        "block-cursor-blurred-foreground": "#c8d0e8",
        "block-cursor-blurred-text-style": "none",
        "block-hover-background": "#1b1f2e",
        "input-selection-background": "#33467c",
        "scrollbar": "#2c324a",
        "scrollbar-hover": "#3b4261",
        "scrollbar-active": "#7aa2f7",
        "scrollbar-background": "#11131c",
        "scrollbar-background-hover": "#11131c",
        "scrollbar-background-active": "#11131c",
        "scrollbar-corner-color": "#11131c",
    },
)

DAY = Theme(
    name="mlxpaged-day",
    primary="#2e5fc9",
    secondary="#8347c4",
    accent="#0a7ea4",
    success="#3c7d22",
    warning="#9a6700",
    error="#c4314b",
    foreground="#2b3145",
    background="#fbfbfd",
    surface="#f3f4f9",
    panel="#e8eaf3",
    dark=False,
    variables={
        "foreground-muted": "#656c85",
        "foreground-disabled": "#a2a8bd",
        "border": "#b9c0d6",
        "border-blurred": "#dcdfeb",
        "footer-background": "#fbfbfd",
        "footer-key-foreground": "#2e5fc9",
        "footer-description-foreground": "#6a7188",
        "block-cursor-background": "#dde5fa",
        "block-cursor-foreground": "#1c2233",
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": "#e6eaf6",
        "block-cursor-blurred-foreground": "#2b3145",
        "block-cursor-blurred-text-style": "none",
        "block-hover-background": "#eceffa",
        "scrollbar": "#c9cede",
        "scrollbar-hover": "#b0b7cc",
        "scrollbar-active": "#2e5fc9",
        "scrollbar-background": "#fbfbfd",
        "scrollbar-background-hover": "#fbfbfd",
        "scrollbar-background-active": "#fbfbfd",
        "scrollbar-corner-color": "#fbfbfd",
    },
)

THEMES = (NIGHT, DAY)

HUES = ("$primary", "$success", "$warning", "$secondary", "$accent", "$error")
"""The colours of sessions in the pool's picture and beside their names, in this order and over again."""


def hue_of(position: int) -> str:
    """The colour of the session at `position` in the list."""
    return HUES[position % len(HUES)]
