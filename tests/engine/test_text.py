"""Ids to text: nothing broken, nothing lost, nothing shown that a stop string takes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxpaged.engine.text import TextStream
from mlxpaged.sched.requests import SamplingParams, TokenLogprob

from ..model.words import END, START, byte_tokenizer

TOKENIZER = byte_tokenizer()


def stream(text: str | bytes, **sampling: object) -> tuple[list[str], str | None]:
    """The pieces shown for `text` fed byte by byte, and the stop string that ended it."""
    out = TextStream(TOKENIZER, SamplingParams(**sampling))  # type: ignore[arg-type]
    pieces = []
    for byte in text.encode() if isinstance(text, str) else text:
        piece = out.add(byte)
        pieces.append(piece.text)
        if piece.stop is not None:
            return pieces, piece.stop
    last = out.finish()
    return [*pieces, last.text], last.stop


def test_pieces_never_hold_a_broken_character() -> None:
    pieces, _ = stream("héllo 😀 日本")
    assert "".join(pieces) == "héllo 😀 日本"
    assert all("�" not in piece for piece in pieces)


def test_an_unfinished_character_at_the_end_is_shown_as_replaced() -> None:
    pieces, _ = stream("ab😀".encode()[:-1])
    assert "".join(pieces) == "ab�"


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    pieces, stop = stream("one END two", stop=("ENDING",))
    assert stop is None and "".join(pieces) == "one END two"
    assert pieces[:4] == ["o", "n", "e", " "]
    assert pieces[4:8] == ["", "", "", "END "]


def test_the_cut_is_at_the_earliest_match_and_the_stop_is_not_shown() -> None:
    pieces, stop = stream("abcdefgh", stop=("fg", "cd"))
    assert ("".join(pieces), stop) == ("ab", "cd")


def test_a_stop_inside_one_token_drops_the_rest_of_that_token() -> None:
    out = TextStream(TOKENIZER, SamplingParams(stop=("apital",)))
    out._detokenizer = type("Whole", (), {"add": lambda self, _: "The capital of", "finish": lambda self: ""})()
    piece = out.add(1)
    assert (piece.text, piece.stop) == ("The c", "apital")


def test_a_stop_string_waits_for_min_tokens() -> None:
    pieces, stop = stream("xx and xx", stop=("xx",), min_tokens=5)
    assert ("".join(pieces), stop) == ("xx and ", "xx")


def test_stop_strings_are_armed_by_the_marker() -> None:
    pieces, stop = stream("a. b#c. d", stop=(".",), stop_after=(ord("#"),))
    assert ("".join(pieces), stop) == ("a. b#c", ".")


def test_special_tokens_are_text_only_when_asked() -> None:
    shown = TextStream(TOKENIZER, SamplingParams(skip_special_tokens=False))
    assert shown.add(END).text == "<end>"
    assert TextStream(TOKENIZER, SamplingParams()).add(END).text == ""


@given(
    text=st.text(alphabet="ab😀", max_size=12),
    stops=st.lists(st.text(alphabet="ab😀", min_size=1, max_size=3), max_size=3),
)
def test_streamed_text_equals_the_text_cut_at_once(text, stops) -> None:
    pieces, stop = stream(text, stop=tuple(stops))
    # Fed byte by byte, the stop that completes first wins; among those the earliest start.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    expected = text[: min(ends)[1]] if ends else text
    assert "".join(pieces) == expected
    assert (stop is not None) == bool(ends)


@given(text=st.text(max_size=12), stops=st.lists(st.text(alphabet="abcé", min_size=1, max_size=3), max_size=2))
def test_every_token_shown_has_its_logprob(text, stops) -> None:
    out = TextStream(TOKENIZER, SamplingParams(stop=tuple(stops), logprobs=0))
    shown: list[TokenLogprob] = []
    ids = list(text.encode())
    for place, byte in enumerate(ids):
        piece = out.add(byte, TokenLogprob(byte, -float(place)))
        shown += piece.logprobs
        if piece.stop is not None:
            break
    else:
        shown += out.finish().logprobs
        assert [entry.token_id for entry in shown] == ids
    assert [entry.logprob for entry in shown] == [-float(place) for place in range(len(shown))]


def test_stops_count_before_and_behind_thinking_but_not_inside() -> None:
    thinking = {"stop": ("b",), "stop_until": tuple(b"<t>"), "stop_after": tuple(b"</t>")}
    assert "".join(stream("<t>abc</t>abc", **thinking)[0]) == "<t>abc</t>a"
    assert "".join(stream("abc", **thinking)[0]) == "a"
    assert "".join(stream("a<t>b", **thinking)[0]) == "a<t>b"


def test_a_special_token_is_shown_where_it_is_asked_for() -> None:
    shown = TextStream(TOKENIZER, SamplingParams(shown_special_ids=(START,)))
    assert [shown.add(START).text, shown.add(END).text, shown.add(97).text] == ["<start>", "", "a"]
