"""The conversation and its /commands, without a terminal."""

from __future__ import annotations

import asyncio

import pytest

from mlxpaged.chat.backend import ModelCard
from mlxpaged.cli.conversation import Conversation
from mlxpaged.cli.keyboard import is_open, unwrapped
from mlxpaged.cli.page import figures
from mlxpaged.cli.slash import HELP, NAMES, Commands, Leave, is_command, unescaped
from mlxpaged.engine.events import EngineStats, Timing, Usage
from mlxpaged.errors import BadParameter, ConfigError
from tests.scripted import ScriptedService


def said(conversation: Conversation, line: str) -> str:
    """What a command answers."""
    service = ScriptedService(manual=True)

    async def card() -> ModelCard:
        return ModelCard("scripted", defaults={"temperature": 0.6})

    async def stats() -> EngineStats:
        return service.stats()

    return asyncio.run(Commands(conversation, card, stats).run(line))


def test_a_turn_that_got_no_answer_is_taken_back() -> None:
    conversation = Conversation(system="be kind")
    conversation.ask("one")
    conversation.answer("uno")
    conversation.ask("two")
    conversation.take_back()
    assert [(turn["role"], turn["content"]) for turn in conversation.messages().messages] == [
        ("system", "be kind"),
        ("user", "one"),
        ("assistant", "uno"),
    ]


def test_clear_forgets_the_turns_and_keeps_the_system_message() -> None:
    conversation = Conversation(system="be kind", turns=[{"role": "user", "content": "x"}])
    said(conversation, "/clear")
    assert (conversation.turns, conversation.system) == ([], "be kind")


def test_system_is_shown_set_and_dropped() -> None:
    conversation = Conversation()
    assert said(conversation, "/system") == "No system message."
    assert said(conversation, "/system be brief") == "System message: be brief"
    assert said(conversation, "/system off") == "No system message."
    assert conversation.system is None


def test_params_are_set_shown_and_given_back() -> None:
    conversation = Conversation(values={"top_k": 5})
    shown = said(conversation, "/params temperature 0.2 top-p=0.9").split()
    assert conversation.values == {"top_k": 5, "temperature": 0.2, "top_p": 0.9}
    assert shown[shown.index("temperature") + 1] == "0.2"
    shown = said(conversation, "/params temperature default").split()
    assert shown[shown.index("temperature") + 1] == "0.6"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/params temperature", "temperature has no value"),
        ("/params heat 1", "no parameter heat"),
        ("/params top_k 1.5", "a whole number"),
        ("/params temperature nan", "temperature is nan"),
        ("/params temperature -1", "from 0"),
        ("/frobnicate", "there is no /frobnicate"),
    ],
)
def test_wrong_use_changes_nothing_and_says_what_is_wrong(line: str, words: str) -> None:
    conversation = Conversation()
    with pytest.raises((ConfigError, BadParameter), match=words):
        said(conversation, line)
    assert conversation.values == {}


def test_stats_help_and_bye() -> None:
    assert "0 running, 0 waiting" in said(Conversation(), "/stats")
    assert said(Conversation(), "/help") == HELP
    assert all(name in HELP for name in NAMES)
    with pytest.raises(Leave):
        said(Conversation(), "/bye")


@pytest.mark.parametrize(
    ("line", "command"),
    [("/bye", True), ("/nope x/y", True), ("//bye", False), ("/usr/bin", False), ("/tmp", False), ("a /b", False)],
)
def test_what_is_a_command(line: str, command: bool) -> None:
    assert is_command(line) is command


def test_a_double_slash_sends_one() -> None:
    assert (unescaped("//bye"), unescaped("/usr/bin")) == ("/bye", "/usr/bin")


@pytest.mark.parametrize(
    ("text", "is_unfinished"),
    [("a\\", True), ('"""a', True), ('"""a\nb"""', False), ('def f():\n    """doc', False), ("a", False)],
)
def test_messages_that_go_on(text: str, is_unfinished: bool) -> None:
    assert is_open(text) is is_unfinished


def test_quotes_around_and_control_characters_in_a_message_are_dropped() -> None:
    assert unwrapped('"""\na\n  b\n"""') == "a\n  b"
    assert unwrapped("a\x1b[31mb\x00\tc\x7f") == "a[31mb\tc"


def test_the_line_of_figures() -> None:
    line = figures(Usage(1200, 40, 1100), Timing(0.0, 0.21, 1.21), 8192)
    assert line == "ttft 0.21 s · 39.0 tok/s · 40 tokens · cached 1,100/1,200 · ctx 1,240/8,192"
    assert figures(Usage(5, 1, 0), None, None) == "1 token · cached 0/5 · ctx 6"
