"""Text of a model, a file or a server made safe for a terminal. Owns which characters are neutralised."""

from __future__ import annotations

_CONTROL_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t\r"}
_NEUTRAL = str.maketrans(_CONTROL_PICTURES | {0x0D: None, 0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd"))


def neutralise(text: str) -> str:
    """Foreign text made safe to print: control characters, the start of every escape sequence among them, become
    visible signs (ESC: ␛); newlines and tabs stay, carriage returns go. Works piece by piece."""
    return text.translate(_NEUTRAL)
