"""Tokenizers rebuilt from GGUF metadata give the ids of the tokenizers they were written from."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
import sentencepiece

from mlxpaged.errors import ModelNotFound, UnsupportedModel
from mlxpaged.model.gguf_file import GgufFile
from mlxpaged.model.gguf_pretokenizers import pre_tokenizer
from mlxpaged.model.gguf_tokenizer import gguf_tokenizer
from mlxpaged.model.tokenizer import Tokenizer

from .tiny_gguf import TEMPLATE, TOKENS, TinyModel

CORPUS = (Path(__file__).parent.parent.parent / "LICENSE").read_text(encoding="utf-8")


def tokenizer(folder: Path, metadata: dict[str, object] | None = None) -> Tokenizer:
    return gguf_tokenizer(GgufFile(TinyModel(metadata=metadata or {}).write(folder / "tiny.gguf")))


def test_byte_level_merges_and_special_tokens(tmp_path: Path) -> None:
    tiny = tokenizer(tmp_path)
    assert [TOKENS[id_] for id_ in tiny.encode("<|im_start|>hello world")] == ["<|im_start|>", "hello", "Ġw", *"orld"]
    assert tiny.decode(tiny.encode("hello wörld 🦙 12")) == "hello wörld 🦙 12"
    assert tiny.chat_template == TEMPLATE
    assert tiny.end_token_ids == {2}
    assert tiny.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tiny.vocab_size == len(TOKENS)


def test_a_bos_id_is_added_to_plain_text_only_where_the_file_says_so(tmp_path: Path) -> None:
    without, with_bos = tokenizer(tmp_path), tokenizer(tmp_path, {"tokenizer.ggml.add_bos_token": True})
    assert not without.add_bos and without.encode("a", add_special=True) == without.encode("a")
    assert with_bos.add_bos and with_bos.encode("a", add_special=True) == [1, *with_bos.encode("a")]
    assert tokenizer(tmp_path, {"tokenizer.ggml.pre": "llama-bpe"}).add_bos


def test_end_of_turn_ids_in_metadata_end_a_reply(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.chat_template": "plain"}
    assert tokenizer(tmp_path, metadata).end_token_ids == {0, 2}


def test_an_id_outside_the_vocabulary_is_left_out(tmp_path: Path) -> None:
    outside = tokenizer(tmp_path, {"tokenizer.ggml.eos_token_id": 1 << 30})
    assert outside.end_token_ids == {2}  # the template's own end of turn


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "I've 1234", ["I", "'ve", " 1234"]),
        ("smollm", "I've 1234", ["I", "'ve", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "I'VE 1234", ["I", "'VE", " ", "123", "4"]),
        ("qwen2", "I'VE 12\n\n x", ["I", "'VE", " ", "1", "2", "\n\n", " x"]),
        ("gpt-4o", "helloWorld 1234", ["hello", "World", " ", "123", "4"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("falcon", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("deepseek-v3", "don't 1234你好", ["don", "'t", " ", "123", "4", "你好"]),
        ("deepseek-coder", "ab 12\n", ["ab", " ", "1", "2", "\n"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
    ],
)
def test_text_is_cut_as_the_named_models_cut_it(name: str, text: str, pieces: list[str]) -> None:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre_tokenizer(name).patterns]
    cut = pre_tokenizers.Sequence(splits).pre_tokenize_str(text)
    merged = [piece for piece, _ in cut]
    assert merged == pieces


def test_an_unknown_way_of_cutting_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'martian'"):
        pre_tokenizer("martian")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "repeats a token"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 entries for 264 tokens"),
        ({"tokenizer.ggml.tokens": [1, 2, 3]}, "holds no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": [1]}, "holds no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.model": "llama"}, "holds no tokenizer.ggml.scores"),
        ({"tokenizer.chat_template": 5}, "tokenizer.chat_template is not a text"),
    ],
)
def test_lists_that_do_not_fit_together_are_one_line(metadata: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=words):
        tokenizer(tmp_path, metadata)


@pytest.fixture(scope="module")
def spoken() -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE model with byte fallback, trained on the licence's text."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()),
        model_writer=trained,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.999,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())


def as_gguf(
    spoken: sentencepiece.SentencePieceProcessor, folder: Path, metadata: dict[str, object] | None = None
) -> Tokenizer:
    ids = range(spoken.get_piece_size())
    kinds = [2 if spoken.is_unknown(i) else 3 if spoken.is_control(i) else 6 if spoken.is_byte(i) else 1 for i in ids]
    written = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [spoken.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(spoken.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": kinds,
    }
    return tokenizer(folder, written | (metadata or {}))


def test_sentencepiece_ids_equal_sentencepieces_own(
    spoken: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    """Text of the corpus, noise of its letters, runs of spaces, and letters it never saw."""
    rebuilt, choose = as_gguf(spoken, tmp_path), random.Random(3)
    texts = ["", " ", "   ", "a", " a  b ", "Ünïcödé 你好 🦙", "\tx\n\ny", "=" * 37, "aaaa" * 9]
    for _ in range(300):
        at = choose.randrange(len(CORPUS))
        texts.append(CORPUS[at : at + choose.randrange(80)])
        texts.append("".join(choose.choice("etaoin  .,(é") for _ in range(choose.randrange(40))))
    for text in texts:
        assert rebuilt.encode(text) == spoken.encode(text), text
        assert rebuilt.decode(rebuilt.encode(text)) == text


def test_sentencepiece_adds_bos_by_default_and_a_space_where_the_file_says_so(
    spoken: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    rebuilt = as_gguf(spoken, tmp_path)
    assert rebuilt.add_bos and rebuilt.encode("the", add_special=True) == [1, *spoken.encode("the")]
    bare = as_gguf(spoken, tmp_path, {"tokenizer.ggml.add_space_prefix": False})
    assert bare.decode(bare.encode(" the")) == " the"
    assert bare.encode(" the") == spoken.encode("the")


def test_phi_3s_control_tokens_take_the_white_space_after_them(
    spoken: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    spaced, joined = "</s> \n the", "</s>the"
    plain = as_gguf(spoken, tmp_path)
    assert plain.encode(spaced) != plain.encode(joined)
    phi = as_gguf(spoken, tmp_path, {"general.name": "Phi3"})
    assert phi.encode(spaced) == phi.encode(joined) == plain.encode(joined)
    assert phi.encode("<s> the") == plain.encode("<s> the")
