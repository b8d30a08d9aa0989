"""A person's own keys: what is understood, what is refused and what is said of it."""

from __future__ import annotations

import pytest

from mlxpaged.errors import ConfigError
from mlxpaged.tui.keymap import DEFAULT_KEYS, NO_KEY, keys_from, keys_of
from mlxpaged.tui.keys import ACTIONS, in_words


@pytest.mark.parametrize(
    ("written", "keys"),
    [
        ("ctrl+t", ("ctrl+t",)),
        ("Ctrl+T", ("ctrl+t",)),
        ("^t", ("ctrl+t",)),
        ("F5", ("f5",)),
        ("alt+n, f6", ("alt+n", "f6")),
        (["alt+n", "f6"], ("alt+n", "f6")),
        ("ctrl+PgUp", ("ctrl+pageup",)),
        ("option+1", ("alt+1",)),
        ("ctrl+/", ("ctrl+slash",)),
        ("ctrl+slash", ("ctrl+slash",)),
        ("ctrl+\\", ("ctrl+backslash",)),
        ("shift+ctrl+x", ("ctrl+shift+x",)),
        ("ctrl+m", ("enter",)),
    ],
)
def test_a_key_is_understood_as_people_write_it(written: object, keys: tuple[str, ...]) -> None:
    assert keys_of("new_session", written) == keys


@pytest.mark.parametrize("written", ["ctrl+nonsense", "hold+t", "", "ctrl+", "f25", "tt", 5, True, [], ["ctrl+t", ""]])
def test_what_is_no_key_is_refused(written: object) -> None:
    with pytest.raises(ConfigError, match=r"new_session .*(ctrl\+t|ctrl or alt)"):
        keys_of("new_session", written)


@pytest.mark.parametrize("written", ["t", "T", "shift+t", "?", "space"])
def test_a_key_that_writes_is_for_marked_turns_only(written: str) -> None:
    with pytest.raises(ConfigError, match="which writes"):
        keys_of("new_session", written)
    assert len(keys_of("turn_fork", written)) == 1


def test_an_unknown_action_is_told_with_those_there_are_and_the_rest_holds() -> None:
    keys = keys_from({"new_sesion": "ctrl+t", "search": "f3"})
    [line] = keys.complaints
    assert line.startswith("there is no action new_sesion for a key; there are send, new_line, ")
    assert "new_session" in line and "session_1 to session_9" in line and "\n" not in line
    assert keys.by_action["search"] == ("f3",) and keys.keymap == {"search": "f3"}


def test_a_wrong_key_leaves_the_action_its_own() -> None:
    keys = keys_from({"new_session": "ctrl+nonsense"})
    assert keys.by_action == DEFAULT_KEYS.by_action and not keys.keymap
    [line] = keys.complaints
    assert "'ctrl+nonsense', which is no key" in line and line.endswith("new_session stays on Ctrl+N")


def test_a_key_of_another_action_is_taken_from_it_and_that_is_told() -> None:
    keys = keys_from({"new_session": "ctrl+t"})
    assert keys.keymap == {"new_session": "ctrl+t", "thinking": NO_KEY}
    assert keys.complaints == ("Ctrl+T is new_session now; thinking has no key: give it one",)
    assert keys.hint("thinking", "/think") == "/think" and keys.shown("new_session") == "Ctrl+T"
    keys = keys_from({"send": "ctrl+j", "new_line": "enter"})
    assert keys.complaints == () and keys.shown("new_line") == "Enter"
    keys = keys_from({"send": "ctrl+j"})
    assert keys.complaints == ("Ctrl+J is send now; new_line is on Alt+Enter, Shift+Enter",)


def test_actions_that_change_keys_with_each_other_are_no_clash() -> None:
    keys = keys_from({"new_session": "ctrl+t", "thinking": "ctrl+n"})
    assert keys.complaints == () and keys.keymap == {"new_session": "ctrl+t", "thinking": "ctrl+n"}


def test_of_two_lines_with_one_key_the_first_holds() -> None:
    keys = keys_from({"search": "f4", "retry": "f4"})
    assert keys.by_action["search"] == ("f4",) and keys.by_action["retry"] == ("ctrl+r",)
    assert keys.complaints == ("F4 cannot be retry too: it is search; retry stays on Ctrl+R",)


def test_no_two_actions_begin_with_one_key() -> None:
    keys = [key for action in ACTIONS.values() for key in action.keys]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("ctrl+pagedown", "Ctrl+PgDn"),
        ("f2", "F2"),
        ("alt+1", "Alt+1"),
        ("f", "f"),
        ("G", "G"),
        ("escape", "Esc"),
        ("ctrl+slash", "Ctrl+/"),
        ("question_mark", "?"),
        ("ctrl+up", "Ctrl+Up"),
        ("space", "Space"),
    ],
)
def test_a_key_in_words(key: str, words: str) -> None:
    assert in_words(key) == words
