"""The conversation and its /commands, without a terminal."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlxpaged.chat.backend import LocalBackend, ModelCard
from mlxpaged.chat.sessions import State
from mlxpaged.chat.store import Store
from mlxpaged.cli.conversation import Conversation
from mlxpaged.cli.keyboard import is_open, unwrapped
from mlxpaged.cli.page import figures
from mlxpaged.cli.slash import HELP, NAMES, Commands, Leave, Outcome, is_command, unescaped
from mlxpaged.engine.events import Timing, Usage
from mlxpaged.errors import BadParameter, ConfigError
from tests.scripted import ScriptedService


def talk(*texts: str, system: str | None = None) -> Conversation:
    """A conversation of these turns, in memory: question, reply, question, ..."""
    conversation = Conversation(Store(None), system=system)
    for index, text in enumerate(texts):
        if index % 2:
            answered(conversation, text)
        else:
            conversation.ask(text)
    return conversation


def answered(conversation: Conversation, text: str, state: State = "done") -> None:
    draft = conversation.begin_reply("scripted")
    draft.feed(text)
    draft.finish(state)


def texts(conversation: Conversation) -> list[str]:
    return [turn.content for turn in conversation.turns]


def done(conversation: Conversation, line: str) -> Outcome:
    """What a command leaves to do."""
    service = ScriptedService(manual=True)

    async def card() -> ModelCard:
        return ModelCard("scripted", defaults={"temperature": 0.6})

    backend = LocalBackend(service, name="scripted")
    return asyncio.run(Commands(conversation, card, lambda: backend).run(line))


def said(conversation: Conversation, line: str) -> str:
    """What a command answers."""
    return done(conversation, line).text


def test_a_turn_that_got_no_answer_is_taken_back() -> None:
    conversation = talk("one", "uno", "two", system="be kind")
    conversation.take_back()
    assert [(turn["role"], turn["content"]) for turn in conversation.messages().messages] == [
        ("system", "be kind"),
        ("user", "one"),
        ("assistant", "uno"),
    ]


@pytest.mark.parametrize("command", ["/clear", "/new"])
def test_a_new_conversation_keeps_system_and_values_and_the_old_one_stays_saved(command: str) -> None:
    conversation = talk("x", "y", system="be kind")
    said(conversation, "/params top_k 5")
    said(conversation, command)
    assert (texts(conversation), conversation.system, conversation.values) == ([], "be kind", {"top_k": 5})
    assert [one.title for one in conversation.store.sessions()] == ["x"]
    assert done(conversation, "/load x").recap
    assert texts(conversation) == ["x", "y"]


def test_retry_undo_and_edit() -> None:
    conversation = talk("one", "uno", "two", "due")
    assert done(conversation, "/retry") == Outcome(answer=True)
    assert texts(conversation) == ["one", "uno", "two"]
    answered(conversation, "dos")
    assert done(conversation, "/edit").prefill == "two"
    assert texts(conversation) == ["one", "uno"]
    assert said(conversation, "/undo") == "Taken back: one"
    with pytest.raises(ConfigError, match="nothing was asked yet"):
        said(conversation, "/undo")


@pytest.mark.parametrize("state", ["stopped", "cut", "error"])
def test_continue_goes_on_with_a_cut_reply_and_asks_for_a_missing_one(state: State) -> None:
    conversation = talk("one")
    answered(conversation, "un", state)
    assert done(conversation, "/continue") == Outcome(resume=True)
    messages = conversation.messages(resume=True)
    assert (messages.continue_final_message, messages.add_generation_prompt) == (True, False)
    assert messages.messages[-1] == {"role": "assistant", "content": "un"}
    assert done(talk("one"), "/continue") == Outcome(answer=True)
    with pytest.raises(ConfigError, match="the last reply is whole"):
        said(talk("one", "uno"), "/continue")


def test_fork_rename_and_sessions() -> None:
    conversation = talk("one", "uno")
    assert said(conversation, "/fork") == "Now in a copy: one (fork)"
    assert said(conversation, "/rename  Numbers   in\tSpanish") == "This conversation is called Numbers in Spanish."
    header, first, second = said(conversation, "/sessions").splitlines()
    assert header.split() == ["ID", "USED", "TURNS", "TITLE"]
    assert first.endswith("now   2      Numbers in Spanish") and second.endswith("now   2      one")


def test_copy_takes_the_reply_or_one_of_its_code_blocks() -> None:
    conversation = talk("code", "Here:\n```py\nx = 1\n```\nand\n~~~\ny\n~~~\n")
    assert done(conversation, "/copy 1").clipboard == "x = 1\n"
    assert done(conversation, "/copy 2").clipboard == "y\n"
    assert done(conversation, "/copy").clipboard.startswith("Here:")
    with pytest.raises(ConfigError, match="has 2 code blocks"):
        said(conversation, "/copy 3")


def test_export_writes_a_file_and_never_over_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    conversation = talk("What is 1/2?", "0.5")
    assert said(conversation, "/export") == "Written to what-is-1-2.md."
    assert "## Assistant\n\n0.5" in (tmp_path / "what-is-1-2.md").read_text()
    with pytest.raises(ConfigError, match="exists already"):
        said(conversation, "/export md")
    assert said(conversation, f"/export json {tmp_path}/x.json") == f"Written to {tmp_path}/x.json."


def test_a_file_goes_before_the_next_message_only(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a fact\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    conversation = talk()
    assert said(conversation, f"/attach {tmp_path}/notes.txt") == "6 characters go with the next message."
    conversation.ask("And?")
    conversation.ask("So?")
    assert texts(conversation) == ["notes.txt:\n```\na fact\n```\n\nAnd?", "So?"]
    with pytest.raises(ConfigError, match="is not a text file"):
        said(conversation, f"/attach {tmp_path}/picture.png")


def test_system_is_shown_set_and_dropped() -> None:
    conversation = talk()
    assert said(conversation, "/system") == "No system message."
    assert said(conversation, "/system be brief") == "System message: be brief"
    assert said(conversation, "/system off") == "No system message."
    assert conversation.system is None


def test_flags_hold_for_their_call_and_are_not_saved() -> None:
    store = Store(None)
    session = store.create("scripted", None, {"top_k": 5, "temperature": 0.2})
    standing, typed = {"temperature": 0.9, "min_p": 0.1}, {"top_k": 7, "max_tokens": 30}
    conversation = Conversation(store, session, None, standing, typed)
    assert conversation.values == {"temperature": 0.2, "min_p": 0.1, "top_k": 7, "max_tokens": 30}
    said(conversation, "/params top_k 9 max-tokens default")
    assert conversation.values == {"temperature": 0.2, "min_p": 0.1, "top_k": 9}
    assert store.session(session.id).params == {"top_k": 9, "temperature": 0.2}


def test_params_are_set_shown_and_given_back() -> None:
    conversation = talk()
    said(conversation, "/set top_k 5")
    shown = said(conversation, "/params temperature 0.2 top-p=0.9").split()
    assert conversation.values == {"top_k": 5, "temperature": 0.2, "top_p": 0.9}
    assert shown[shown.index("temperature") + 1] == "0.2"
    shown = said(conversation, "/params temperature default").split()
    assert shown[shown.index("temperature") + 1] == "0.6"


def test_thinking_is_a_wish_to_the_template() -> None:
    conversation = talk()
    assert conversation.messages().template_kwargs == {}
    assert said(conversation, "/think off") == "Thinking: off."
    assert conversation.messages().template_kwargs == {"enable_thinking": False}
    assert conversation.values == {}


def test_models_and_another_model() -> None:
    assert said(talk(), "/model") == "* scripted  ready  context 4,096"
    assert done(talk(), "/model other/one").model == "other/one"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/params temperature", "temperature has no value"),
        ("/params heat 1", "no parameter heat"),
        ("/params top_k 1.5", "a whole number"),
        ("/params temperature nan", "temperature is nan"),
        ("/params temperature -1", "from 0"),
        ("/params temperature 5", "temperature is 5; it must be from 0 .* to 2, or default"),
        ("/frobnicate", "there is no /frobnicate"),
    ],
)
def test_wrong_use_changes_nothing_and_says_what_is_wrong(line: str, words: str) -> None:
    conversation = talk()
    with pytest.raises((ConfigError, BadParameter), match=words):
        said(conversation, line)
    assert conversation.values == {}


def test_stats_help_and_bye() -> None:
    figures = said(talk(), "/stats")
    assert "0 running, 0 waiting" in figures and "\nK/V       0 MiB\nmemory    0 MiB in arrays of MLX" in figures
    assert said(talk(), "/help") == HELP
    assert all(name in HELP for name in NAMES)
    with pytest.raises(Leave):
        said(talk(), "/bye")


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
