"""A tokenizer rebuilt from GGUF metadata. Owns byte-level BPE and SentencePiece (BPE) vocabularies; other kinds are
refused by name."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE

from ..errors import ModelNotFound, UnsupportedModel
from .end_tokens import end_token_ids
from .gguf_file import GgufFile
from .gguf_pretokenizers import pre_tokenizer
from .tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_STRIPPING_MODELS = ("phi-3", "phi3")
"""Their control tokens take the white space after them; GGUF does not say so."""
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")
_SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END_KEYS = ("eos", "eot", "eom")


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer, chat template and end tokens that `file` describes.

    Raises UnsupportedModel, naming it, for a kind of tokenizer or of cutting that is not known, and ModelNotFound
    where the lists do not fit together.
    """
    kind = file.text("tokenizer.ggml.model")
    vocabulary = _vocabulary(file)
    if kind == "gpt2":
        raw, bos_default = _byte_level(file, vocabulary)
    elif kind == "llama":
        raw, bos_default = _sentencepiece(file, vocabulary), True
    else:
        raise UnsupportedModel(
            f"{file.path.name} has a {kind!r} tokenizer; GGUF files are read with 'gpt2' (byte-level BPE) or 'llama' "
            "(SentencePiece); give the model's MLX or Hugging Face form"
        )
    _add_tokens(file, raw, vocabulary)
    special = {name: text for name, key in _SPECIAL_KEYS.items() if (text := _token(file, vocabulary, key))}
    if kind == "llama":  # SentencePiece's defaults, where the file does not name them
        defaults = {"bos_token": "<s>", "eos_token": "</s>"}
        special = {name: text for name, text in defaults.items() if text in vocabulary} | special
    add_bos = bool(file.value("tokenizer.ggml.add_bos_token", bos_default)) and special.get("bos_token") in vocabulary
    if add_bos:
        bos = special["bos_token"]
        raw.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, vocabulary[bos])]
        )
    template = file.text("tokenizer.chat_template")
    ends = [_id(file, vocabulary, key) for key in _END_KEYS] + [vocabulary.get(special.get("eos_token", ""))]
    return Tokenizer(raw, end_token_ids(raw, ends, template), template, special, add_bos)


def _vocabulary(file: GgufFile) -> dict[str, int]:
    tokens = _list(file, "tokenizer.ggml.tokens", str)
    vocabulary = {token or f"[EMPTY_{i}]": i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelNotFound(f"{file.path} is damaged: its vocabulary repeats a token; fetch it again")
    return vocabulary


def _list(file: GgufFile, key: str, kind: type, length: int | None = None) -> list[Any]:
    """A metadata list of one type. Raises ModelNotFound where it is missing, another type or another length."""
    values = file.value(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], kind):
        raise ModelNotFound(f"{file.path} holds no {key}; it is not a whole model")
    if length is not None and len(values) != length:
        raise ModelNotFound(f"{file.path} is damaged: {key} has {len(values)} entries for {length} tokens")
    return values


def _id(file: GgufFile, vocabulary: dict[str, int], name: str) -> int | None:
    number = file.number(f"tokenizer.ggml.{name}_token_id")
    return int(number) if number is not None and 0 <= number < len(vocabulary) else None


def _token(file: GgufFile, vocabulary: dict[str, int], name: str) -> str | None:
    id_ = _id(file, vocabulary, name)
    return next((token for token, other in vocabulary.items() if other == id_), None)


def _byte_level(file: GgufFile, vocabulary: dict[str, int]) -> tuple[RawTokenizer, bool]:
    """GPT-2's kind: text is cut by expressions, its bytes written as letters, pairs merged in the order given."""
    cutting = pre_tokenizer(file.text("tokenizer.ggml.pre") or "default")
    merges = []
    for merge in _list(file, "tokenizer.ggml.merges", str):
        cut = merge.find(" ", 1)  # a part may start with a space
        pair = (merge[:cut], merge[cut + 1 :])
        if cut > 0 and pair[0] in vocabulary and pair[1] in vocabulary and pair[0] + pair[1] in vocabulary:
            merges.append(pair)
    raw = RawTokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=cutting.whole_words))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cutting.patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
    raw.decoder = decoders.ByteLevel()
    return raw, cutting.add_bos


def _sentencepiece(file: GgufFile, vocabulary: dict[str, int]) -> RawTokenizer:
    """SentencePiece's BPE: the pair whose union has the best score merges first; unknown letters become bytes."""
    scores = _list(file, "tokenizer.ggml.scores", int | float, len(vocabulary))  # type: ignore[arg-type]
    ranked = []
    for token, id_ in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[id_], vocabulary[left], vocabulary[right], (left, right)))
    ranked.sort()
    unknown = _token(file, vocabulary, "unknown") or "<unk>"
    raw = RawTokenizer(
        BPE(
            vocab=vocabulary,
            merges=[entry[-1] for entry in ranked],
            unk_token=unknown if unknown in vocabulary else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(file.value("tokenizer.ggml.add_space_prefix", True))
    marks = [normalizers.Prepend("▁")] if prefix else []
    raw.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return raw


def _add_tokens(file: GgufFile, raw: RawTokenizer, vocabulary: dict[str, int]) -> None:
    """Tokens matched in text before anything else: control tokens, and those a model's maker added."""
    kinds = _list(file, "tokenizer.ggml.token_type", int, len(vocabulary))
    name = (file.text("general.name") or "").lower()
    stripping = any(model in name for model in _STRIPPING_MODELS)
    added = []
    for token, id_ in vocabulary.items():
        if kinds[id_] not in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            continue
        special = kinds[id_] != _USER_DEFINED
        rstrip = stripping and token not in _NOT_STRIPPING
        added.append(AddedToken(token, special=special, normalized=False, rstrip=rstrip))
    raw.add_tokens(added)
