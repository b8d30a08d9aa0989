"""A reply told apart into thinking, prose and code, however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpaged.tui.pieces import Code, CodeEnd, CodeStart, Piece, PieceReader, Prose, Thinking


def read(*parts: str) -> list[Piece]:
    """All pieces of a reply that comes in `parts`, neighbours of one kind joined."""
    reader = PieceReader()
    pieces = [piece for part in parts for piece in reader.feed(part)] + list(reader.finish())
    joined: list[Piece] = []
    for piece in pieces:
        if joined and isinstance(piece, Thinking | Prose | Code) and type(joined[-1]) is type(piece):
            joined[-1] = type(piece)(joined[-1].text + piece.text)  # type: ignore[union-attr]
        else:
            joined.append(piece)
    return joined


def test_prose_stays_as_it_is() -> None:
    assert read("One **two**\n\n- three") == [Prose("One **two**\n\n- three")]


def test_a_code_block_is_a_piece_of_its_own() -> None:
    assert read("See:\n```python\nx = 1\n```\nDone.") == [
        Prose("See:\n"),
        CodeStart("python"),
        Code("x = 1\n"),
        CodeEnd(),
        Prose("Done."),
    ]


def test_a_block_in_a_list_loses_its_indentation() -> None:
    assert read("1. do\n   ```sh\n   ls\n     -l\n   ```\n2. done") == [
        Prose("1. do\n"),
        CodeStart("sh"),
        Code("ls\n  -l\n"),
        CodeEnd(),
        Prose("2. done"),
    ]


def test_a_longer_fence_holds_a_shorter_one() -> None:
    assert read("````md\n```py\n1\n```\n````\n") == [CodeStart("md"), Code("```py\n1\n```\n"), CodeEnd()]


def test_tildes_are_closed_by_tildes() -> None:
    assert read("~~~\n```\n~~~\n") == [CodeStart(""), Code("```\n"), CodeEnd()]


def test_an_open_block_is_shown_before_its_end() -> None:
    reader = PieceReader()
    assert list(reader.feed("```c\nint x;\nint")) == [CodeStart("c"), Code("int x;\nint")]
    assert list(reader.feed(" y;")) == [Code(" y;")]
    assert list(reader.finish()) == [CodeEnd()]


def test_half_a_fence_is_held_back_until_it_is_one() -> None:
    reader = PieceReader()
    assert list(reader.feed("a\n``")) == [Prose("a\n")]
    assert list(reader.feed("`py")) == []
    assert list(reader.feed("\n")) == [CodeStart("py")]


def test_inline_code_at_a_line_start_is_no_fence() -> None:
    assert read("`x` is\n``y`` too\n") == [Prose("`x` is\n``y`` too\n")]


def test_thinking_comes_first_and_apart() -> None:
    assert read("\n<think>\nhm ```\n</think>\n\nYes.") == [Thinking("hm ```\n"), Prose("Yes.")]


def test_thinking_that_never_ends_is_thinking() -> None:
    assert read("<think>hm") == [Thinking("hm")]


@pytest.mark.parametrize("text", ["<thin air", "<", "a <think> b", ""])
def test_what_only_looks_like_thinking_is_prose(text: str) -> None:
    assert read(text) == ([Prose(text)] if text else [])


ALPHABET = st.lists(
    st.sampled_from(["```", "`", "~~~", "\n", " ", "   ", "<think>", "</think>", "py", "word", "日本"]), max_size=30
).map("".join)


def test_empty_lines_before_thinking_and_before_prose_are_dropped_although_they_come_late() -> None:
    parts = ("<think>", "\n", "\nhm", "</think>", "\n", "\n", "so")
    assert read(*parts) == read("".join(parts)) == [Thinking("hm"), Prose("so")]
    assert read("<think>", "\n") == read("<think>\n") == []


@given(ALPHABET, st.data())
def test_the_pieces_do_not_depend_on_where_the_text_was_cut(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(*parts) == read(text)


@given(ALPHABET)
def test_no_visible_character_of_prose_is_lost(text: str) -> None:
    text = text.replace("`", "").replace("~", "").replace("<think>", "").replace("</think>", "")
    shown = "".join(piece.text for piece in read(text) if isinstance(piece, Prose))
    assert shown.strip("\n") == text.strip("\n")
