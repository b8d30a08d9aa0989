"""Text decoded token by token equals the text decoded at once, for the kinds of tokenizer that models come with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE

from mlxpaged.model.end_tokens import end_token_ids
from mlxpaged.model.tokenizer import BYTE_LETTERS, Tokenizer

LETTERS = st.one_of(st.sampled_from(" aehlow\n<>|é你🦙\u0301"), st.characters(exclude_categories=["Cs"]))
TEXTS = st.text(alphabet=LETTERS, max_size=40)


def byte_level() -> Tokenizer:
    """GPT-2's kind: 256 byte letters, a few merges, two special tokens and an added one that holds spaces."""
    letters = [BYTE_LETTERS[byte] for byte in range(256)]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("ä", "½")]
    pieces = [*letters, *("".join(merge) for merge in merges)]
    raw = RawTokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    raw.add_tokens([AddedToken("  wide  ", normalized=False)])
    return Tokenizer(raw, frozenset({263}))


def sentencepiece(prefix: bool = True) -> Tokenizer:
    """Llama 2's kind: byte fallback, spaces as marks, one dropped from the start."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"aehlow",
        "é",
        "he",
        "▁w",
        "▁▁",
    ]
    merges = [("h", "e"), ("▁", "w"), ("▁", "▁")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    raw = RawTokenizer(BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    marks = [normalizers.Prepend("▁")] if prefix else []
    raw.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(raw, frozenset({2}))


KINDS = {"byte level": byte_level(), "sentencepiece": sentencepiece(), "no prefix": sentencepiece(prefix=False)}
IDS = st.lists(st.integers(0, 275), max_size=30)


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special)
    return [*map(detokenizer.add, ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(ids=IDS, skip_special=st.booleans())
def test_streaming_any_ids_gives_what_decoding_gives(kind: str, ids: list[int], skip_special: bool) -> None:
    tokenizer = KINDS[kind]
    assert "".join(streamed(tokenizer, ids, skip_special)) == tokenizer.decode(ids, skip_special)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_text_survives_encoding_and_no_piece_of_it_is_broken(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    text = text.replace("▁", "_")  # SentencePiece cannot tell its mark from a space
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids, skip_special=False)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, skip_special=st.booleans())
def test_decoding_text_gives_what_the_tokenizers_library_gives(kind: str, text: str, skip_special: bool) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special) == tokenizer.raw.decode(ids, skip_special_tokens=skip_special)


@given(ids=IDS)
def test_byte_level_ids_decode_as_in_the_tokenizers_library_even_where_they_are_no_text(ids: list[int]) -> None:
    tokenizer = KINDS["byte level"]
    assert tokenizer.decode(ids) == tokenizer.raw.decode(ids)


def test_half_a_surrogate_pair_is_replaced_and_a_whole_one_joined() -> None:
    tokenizer = KINDS["byte level"]
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83e\udd99")) == "🦙"


def test_a_character_of_four_tokens_comes_out_with_its_last() -> None:
    tokenizer = KINDS["byte level"]
    ids = tokenizer.encode("a🦙b")
    assert [len(tokenizer.token_bytes(id_)) for id_ in ids] == [1, 1, 1, 1, 1, 1]
    assert streamed(tokenizer, ids, True) == ["a", "", "", "", "🦙", "b", ""]


def test_an_unfinished_character_becomes_one_replacement_at_the_end() -> None:
    tokenizer = KINDS["sentencepiece"]
    ids = tokenizer.encode("ab🦙")[:-2]
    assert streamed(tokenizer, ids, True)[-3:] == ["", "", "\ufffd"]


def test_a_stray_byte_is_replaced_once_the_next_token_shows_it() -> None:
    tokenizer = KINDS["byte level"]
    assert streamed(tokenizer, [0xF0, ord("a")], True) == ["", "\ufffda", ""]


def test_token_bytes_are_exact() -> None:
    bytes_of = KINDS["byte level"].token_bytes
    assert b"".join(map(bytes_of, range(256))) == bytes(range(256))
    assert bytes_of(259) == b"hello" and bytes_of(262) == b"<|im_start|>" and bytes_of(264) == b"  wide  "
    spm = KINDS["sentencepiece"]
    assert spm.token_bytes(3 + 0xE4) == b"\xe4" and spm.token_bytes(spm.raw.token_to_id("▁w")) == b" w"
    assert spm.token_bytes(100_000) == b""


def test_the_first_space_of_sentencepiece_goes_unless_the_text_continues() -> None:
    tokenizer = KINDS["sentencepiece"]
    ids = tokenizer.encode("w")
    assert tokenizer.decode(ids) == "w"
    continuing = tokenizer.detokenizer(continuing=True)
    assert "".join([*map(continuing.add, ids), continuing.finish()]) == " w"


def test_special_tokens_in_text_are_special_and_can_be_shown_or_skipped() -> None:
    tokenizer = KINDS["byte level"]
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert ids == [262, 259, 263]
    assert [tokenizer.is_special(id_) for id_ in ids] == [True, False, True]
    assert not tokenizer.is_special(264)
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hello<|im_end|>"


def test_an_unknown_decoder_is_asked_piece_by_piece() -> None:
    raw = RawTokenizer(BPE(vocab={"he</w>": 0, "llo</w>": 1, "x": 2}, merges=[]))
    raw.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer = Tokenizer(raw, frozenset())
    assert tokenizer.decode([2, 0]) in {"xhe", "x he", "xhe "}
    assert b"he" in tokenizer.token_bytes(0)


@pytest.mark.parametrize(
    ("special", "template", "expected"),
    [
        (["<|im_end|>", "<|eot_id|>"], "...<|im_end|>...", {"<|im_end|>"}),
        (["<|im_end|>"], "no marker", set()),
        (["<|im_end|>"], None, set()),
        (["<end_of_turn>", "<eos>"], "{{ m }}<end_of_turn>", {"<end_of_turn>"}),
        (["<|end|>", "<|return|>", "<|call|>"], "<|end|> <|return|> <|call|>", {"<|return|>", "<|call|>"}),
        (["<|end|>"], "{{ m }}<|end|>", {"<|end|>"}),
    ],
    ids=["chatml", "not written", "no template", "gemma", "harmony", "phi"],
)
def test_end_of_turn_tokens_are_those_the_template_writes(
    special: list[str], template: str | None, expected: set[str]
) -> None:
    raw = RawTokenizer(BPE(vocab={"a": 0}, merges=[]))
    raw.add_special_tokens(special)
    ends = end_token_ids(raw, [0, None], template)
    assert ends == {0} | {raw.token_to_id(text) for text in expected}
