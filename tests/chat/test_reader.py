"""Replies told apart: thinking, answer, calls, however their text is split; nothing lost, no tag shown."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxpaged.chat.deltas import CallArguments, CallStart, ChatFinish, Content, Reasoning
from mlxpaged.chat.reader import ReplyReader
from mlxpaged.chat.tools import TAGS, Family, ToolUse
from mlxpaged.engine.events import Delta
from mlxpaged.sched.requests import FinishReason, TokenLogprob

from .replies import BROKEN, CALLED, HERMES, PARIS, REPLIES, TOOLS, Read, read, syntax_of


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_of_each_family_is_told_apart(name: str) -> None:
    family, text, expected = REPLIES[name]
    assert read([text], syntax_of(family)) == expected


@pytest.mark.parametrize("name", BROKEN)
def test_text_that_is_no_call_is_content_to_the_letter(name: str) -> None:
    family, text = BROKEN[name]
    assert read([text], syntax_of(family)) == Read(content=text)


@pytest.mark.parametrize("name", [*REPLIES, *BROKEN])
def test_letter_by_letter_and_at_every_cut_the_parts_are_the_same(name: str) -> None:
    family, text = {**REPLIES, **BROKEN}[name][:2]
    syntax = syntax_of(family)
    whole = read([text], syntax)
    assert read(list(text), syntax) == whole
    assert [read([text[:cut], text[cut:]], syntax) for cut in range(1, len(text))] == [whole] * (len(text) - 1)


PIECES = st.lists(
    st.sampled_from(
        sorted({piece for _, text, _ in REPLIES.values() for piece in (text, text[: len(text) // 2], text[-9:])})
        + [mark for tags in TAGS.values() for mark in tags]
        + ["<think>", "</think>", "\n", " ", "{", "}", '"', "<", "[ARGS]", "é", "x", ",", ":", "<|end|>", "<|message|>"]
        + ['{"name": "now", "arguments": {', "<function=now>", "<parameter=a>", "call:now{", "[TOOL_CALLS]"]
    ),
    max_size=7,
)


@settings(max_examples=300, deadline=None)
@given(
    pieces=PIECES,
    family=st.sampled_from(sorted({family for family, *_ in REPLIES.values()})),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    most=st.sampled_from([ToolUse(TOOLS), ToolUse(TOOLS, parallel=False)]),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED]),
)
@example(["<tool_call>", '{"name": "now", "arguments": {', "}", "<tool_call>"], "hermes", [3], ToolUse(TOOLS), "stop")
def test_no_split_changes_the_parts_and_no_text_breaks_the_reader(
    pieces: list[str], family: Family, cuts: list[int], most: ToolUse, finish: FinishReason
) -> None:
    text = "".join(pieces)
    syntax = syntax_of(family, use=most)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    split = [text[start:end] for start, end in pairwise(places)]
    whole = read([text], syntax, finish)
    assert read(split, syntax, finish) == read(list(text), syntax, finish) == whole
    if most.most_calls == 1:
        assert len(whole.calls) <= 1


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=30), space=st.sampled_from(["", "\n", " \n\n"]))
def test_text_without_markup_passes_as_it_is(text: str, space: str) -> None:
    text = text.replace("<", "").replace("{", "").replace("[", "") + space
    for family in ("hermes", "llama", "mistral"):
        assert read(list(text), syntax_of(family)).content == text
    assert read(list(text), syntax_of(None, use=ToolUse(), think=None)).content == text


def test_arguments_stream_while_they_are_written() -> None:
    reader = ReplyReader(syntax_of(), iter(["one"]).__next__)
    head = reader.read(Delta(text='<tool_call>\n{"name": "weather", "arguments": {"city": "'))
    assert head.parts == (CallStart(0, "one", "weather"), CallArguments(0, '{"city": "'))
    assert reader.read(Delta(text="Par")).parts == (CallArguments(0, "Par"),)


@pytest.mark.parametrize("family", ["qwen-coder", "glm", "gemma"])
def test_strings_of_markup_families_stream_too(family: Family) -> None:
    _, text, _ = REPLIES[family]
    reader = ReplyReader(syntax_of(family))
    reader.read(Delta(text=text[: text.index("Paris") + 2]))
    assert CallArguments(0, "ri") in reader.read(Delta(text="ri")).parts


def test_content_is_held_back_only_where_a_tag_could_begin() -> None:
    reader = ReplyReader(syntax_of())
    shown = ["".join(part.text for part in reader.read(Delta(text=letter)).parts) for letter in "a<b <to x"]
    assert shown == ["a", "", "<b", "", "", "", "", " <to", " x"]


def test_a_call_that_breaks_after_it_began_keeps_what_the_model_wrote() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Paris", days}}</tool_call> so'
    assert read([text], syntax_of()) == Read("", "so", (("weather", '{"city": "Paris", days}}'),), CALLED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HERMES[:-30], Read(calls=(("weather", '{"city": "Pa'),), finish=ChatFinish.LENGTH)),
        ("<think>so far", Read(reasoning="so far", finish=ChatFinish.LENGTH)),
        ("<think>so far</thi", Read(reasoning="so far", finish=ChatFinish.LENGTH)),
        ("<thi", Read(finish=ChatFinish.LENGTH)),
        ('\n<tool_call>{"na', Read(finish=ChatFinish.LENGTH)),
        ("a <b", Read(content="a <b", finish=ChatFinish.LENGTH)),
        ("a <tool_call>is", Read(content="a <tool_call>is", finish=ChatFinish.LENGTH)),
    ],
)
def test_a_reply_cut_off_gives_what_there_is_and_says_length(text: str, expected: Read) -> None:
    assert read(list(text), syntax_of(), FinishReason.LENGTH) == expected


@pytest.mark.parametrize("name", [name for name in REPLIES if REPLIES[name][2].calls])
def test_a_reply_cut_at_any_place_shows_no_markup(name: str) -> None:
    family, text, expected = REPLIES[name]
    for cut in range(len(text)):
        got = read(list(text[:cut]), syntax_of(family), FinishReason.LENGTH)
        assert expected.content.startswith(got.content.rstrip()), text[:cut]
        assert expected.reasoning.startswith(got.reasoning), text[:cut]
        assert [called for called, _ in got.calls] == [called for called, _ in expected.calls][: len(got.calls)]
        for (_, arguments), (_, complete) in zip(got.calls, expected.calls, strict=False):
            assert complete.startswith(arguments) or "<" not in arguments, text[:cut]
        assert read([text[:cut]], syntax_of(family), FinishReason.LENGTH) == got


def test_two_calls_cut_in_the_end_tag_of_the_second_are_two_calls_and_no_content() -> None:
    for size in range(len("</tool_call>")):
        text = HERMES + "\n" + HERMES.removesuffix("</tool_call>") + "</tool_call>"[:size]
        assert read([text], syntax_of(), FinishReason.LENGTH) == Read(calls=(PARIS, PARIS), finish=ChatFinish.LENGTH)


def test_an_answer_in_json_is_no_call_of_llama_s_and_is_shown_as_it_comes() -> None:
    reader = ReplyReader(syntax_of("llama"))
    shown = [reader.read(Delta(text=piece)).parts for piece in ('{"ci', 'ty":', ' "Par')]
    assert shown == [(), (Content('{"city":'),), (Content(' "Par'),)]


def test_thinking_that_the_prompt_opened_needs_no_first_tag() -> None:
    opened = syntax_of(opened=True)
    assert read(["hm</think>yes"], opened) == read(["<think>hm</think>yes"], opened) == Read("hm", "yes")
    assert read(["hm"], opened) == Read("hm")


def test_without_tools_their_markup_is_content() -> None:
    assert read([HERMES], syntax_of(None, use=ToolUse())).content == HERMES


def test_one_call_only_drops_what_follows_and_hides_the_stop_that_was_ours() -> None:
    syntax = syntax_of(use=ToolUse(TOOLS, parallel=False), own_stop="</tool_call>")
    assert read([HERMES + "\n" + HERMES + "x"], syntax) == Read(calls=(PARIS,), finish=CALLED)
    reader = ReplyReader(syntax)
    reader.read(Delta(text=HERMES.removesuffix("</tool_call>")))
    last = reader.read(Delta(finish=FinishReason.STOP, stop_reason="</tool_call>"))
    assert (last.finish, last.stop_reason) == (CALLED, None)


def test_a_named_call_ends_with_stop() -> None:
    assert read([HERMES], syntax_of(use=ToolUse(TOOLS, named="weather"))) == Read(calls=(PARIS,))


def test_logprobs_go_out_with_their_text_each_once_and_in_order() -> None:
    text = f"<think>hm</think>\nSo <b>.\n{HERMES}"
    reader = ReplyReader(syntax_of())
    entries: list[int] = []
    for place, letter in enumerate(text):
        out = reader.read(Delta(text=letter, logprobs=(TokenLogprob(place, 0.0),)))
        entries += [entry.token_id for entry in out.logprobs or ()]
        shown = sum(len(part.text) for part in out.parts if isinstance(part, Content | Reasoning | CallArguments))
        assert not shown or entries[-1] == place
        assert entries == list(range(len(entries)))
    out = reader.read(Delta(finish=FinishReason.STOP, logprobs=()))
    entries += [entry.token_id for entry in out.logprobs or ()]
    assert entries == list(range(len(text)))


def test_gemma_nested_deeper_than_any_call_is_no_crash() -> None:
    deep = "<|tool_call>call:f{a:" + "[" * 5000
    assert read([deep], syntax_of("gemma")).calls[0][0] == "f"
    deep = '<tool_call>{"name": "now", "arguments": {"a":' + "[" * 5000
    assert read([deep], syntax_of()).calls[0][0] == "now"


@pytest.mark.parametrize("name", [name for name in REPLIES if REPLIES[name][2].calls])
def test_arguments_of_whole_calls_are_json_objects(name: str) -> None:
    family, text, _ = REPLIES[name]
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in read([text], syntax_of(family)).calls)
