"""The keys in force: the table's own, and what a person's [keys] changes of them. Owns which of two actions gets a key;
binds none, Textual does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from .keys import ACTIONS, KeyAction, in_words, sign_of

NO_KEY = "no_key"
"""What Textual is told of an action without a key, and no terminal sends: an empty entry would leave it its own."""

_MODIFIERS = frozenset({"alt", "ctrl", "hyper", "meta", "shift", "super"})
_NAMED = {f"f{number}" for number in range(1, 25)} | {
    *("escape", "enter", "tab", "space", "backspace", "delete", "insert"),
    *("home", "end", "pageup", "pagedown", "up", "down", "left", "right"),
}
_OTHER_NAMES = {
    "esc": "escape",
    "return": "enter",
    "del": "delete",
    "ins": "insert",
    "pgup": "pageup",
    "pgdn": "pagedown",
    "control": "ctrl",
    "option": "alt",
}
_SAME_BYTE = {"ctrl+i": "tab", "ctrl+m": "enter", "ctrl+left_square_bracket": "escape"}


@dataclass(frozen=True, slots=True)
class Keys:
    """Action -> its keys. `complaints`: what of a person's table does not hold, a line each."""

    by_action: Mapping[str, tuple[str, ...]]
    complaints: tuple[str, ...] = ()

    @property
    def keymap(self) -> dict[str, str]:
        """What differs from the table, for App.set_keymap."""
        return {name: ",".join(keys) or NO_KEY for name, keys in self.by_action.items() if keys != ACTIONS[name].keys}

    def shown(self, name: str) -> str:
        """Every key of an action in words; empty where it has none."""
        return ", ".join(in_words(key) for key in self.by_action[name])

    def hint(self, name: str, otherwise: str) -> str:
        """The first key of an action in words, or what does the same."""
        keys = self.by_action[name]
        return in_words(keys[0]) if keys else otherwise


DEFAULT_KEYS = Keys({name: action.keys for name, action in ACTIONS.items()})


def keys_from(table: Mapping[str, object]) -> Keys:
    """The keys in force with a person's table, action -> key or list of keys. What is wrong in it is passed over and
    said in the complaints: an unknown action, no key, a key that another line has."""
    complaints: list[str] = []
    taken: dict[str, str] = {}
    own: dict[str, tuple[str, ...]] = {}
    for name, value in table.items():
        try:
            keys = keys_of(name, value)
        except ConfigError as error:
            kept = f"; {name} stays on {DEFAULT_KEYS.shown(name)}" if name in ACTIONS else ""
            complaints.append(f"{error}{kept}")
            continue
        if clash := next((key for key in keys if key in taken), None):
            words = f"{in_words(clash)} cannot be {name} too: it is {taken[clash]}"
            complaints.append(f"{words}; {name} stays on {DEFAULT_KEYS.shown(name)}")
            continue
        own[name] = keys
        taken |= dict.fromkeys(keys, name)
    by_action = {}
    for name, action in ACTIONS.items():
        if name in own:
            by_action[name] = own[name]
        else:
            by_action[name] = tuple(key for key in action.keys if key not in taken)
            gone = [key for key in action.keys if key in taken]
            complaints += [_gone(key, taken[key], action, by_action[name]) for key in gone]
    return Keys(by_action, tuple(complaints))


def known_action(name: str) -> str:
    """The name itself. Raises ConfigError where no action has it."""
    if name not in ACTIONS:
        raise ConfigError(f"there is no action {name} for a key; there are {_names()}")
    return name


def keys_of(name: str, value: object) -> tuple[str, ...]:
    """The keys that a person wrote for an action, as Textual names them. Raises ConfigError."""
    known_action(name)
    words = [str(one) for one in value] if isinstance(value, list) else str(value).split(",")
    keys = tuple(dict.fromkeys(_key(name, word.strip()) for word in words))
    if not keys:
        raise ConfigError(f"{name} has an empty list; write a key such as ctrl+t, alt+n or f5")
    if typed := next((key for key in keys if _types(key) and not ACTIONS[name].at_turn), None):
        raise ConfigError(f"{name} cannot be {in_words(typed)}, which writes; take one with ctrl or alt, or f3 to f12")
    return keys


def _key(name: str, word: str) -> str:
    *modifiers, last = (f"ctrl+{word[1:]}" if word.startswith("^") else word).split("+")
    modifiers = [_OTHER_NAMES.get(one.lower(), one.lower()) for one in modifiers]
    sign = _last(last, modifiers)
    if sign is None or any(one not in _MODIFIERS for one in modifiers):
        raise ConfigError(f"{name} cannot be {word!r}, which is no key; write one such as ctrl+t, alt+n or f5")
    if modifiers == ["shift"] and len(sign) == 1:
        return sign.upper()
    key = "+".join([*sorted(set(modifiers)), sign])
    return _SAME_BYTE.get(key, key)


def _last(word: str, modifiers: list[str]) -> str | None:
    """The part behind the modifiers as Textual names it; None for no key. A sign may be written itself, or by name."""
    from textual.keys import _character_to_key

    if len(word) == 1:
        return _character_to_key(word.lower() if modifiers else word)
    word = _OTHER_NAMES.get(word.lower(), word.lower())
    sign = sign_of(word)
    return word if word in _NAMED else _character_to_key(sign) if sign else None


def _types(key: str) -> bool:
    """Whether the key puts a character into a text."""
    return key == "space" or (key not in _NAMED and "+" not in key)


def _gone(key: str, taker: str, action: KeyAction, left: tuple[str, ...]) -> str:
    rest = f"is on {', '.join(map(in_words, left))}" if left else "has no key: give it one"
    return f"{in_words(key)} is {taker} now; {action.name} {rest}"


def _names() -> str:
    return ", ".join(name for name in ACTIONS if not name.startswith("session_")) + " and session_1 to session_9"
