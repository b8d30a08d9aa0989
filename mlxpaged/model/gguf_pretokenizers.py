"""How text is cut before byte-level BPE, by the name GGUF gives it. Owns the table only.

GGUF stores a name instead of the expressions a model was trained with (`tokenizer.ggml.pre`). The expressions are
those of the models' own tokenizer.json; the names, and which of them mean the same, are the GGUF format's.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedModel

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """The expression of cl100k and its children, which differ in how they cut digits."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(contraction: str, digits: str) -> str:
    """The expression of o200k and Tekken, which also cut between a lower- and an upper-case letter."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{contraction}|{start}{_UPPER}+{_LOWER}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_DEEPSEEK_LETTERS = (  # cased letters, as escapes: some look like others and editors normalise them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED_CODER = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
_THREE_DIGITS = "[0-9][0-9][0-9]"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns` are applied in turn, each cutting out its matches. `whole_words`: a piece that is a token is taken
    without merging. `add_bos`: the default where the file does not say."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_CL100K = PreTokenizer((_words(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_words(r"\p{N}"),))
_O200K = PreTokenizer((_cased_words(f"{_CONTRACTION}?", r"\p{N}{1,3}"),))

_BY_NAME: dict[str, PreTokenizer] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "a.x-4.0", "mellum"), _PLAIN_GPT2
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"), _QWEN2),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer(_CL100K.patterns, whole_words=True)),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _O200K),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK_V3)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer((_BAILING,))),
    "tekken": PreTokenizer((_cased_words("", r"\p{N}"),), whole_words=True, add_bos=True),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "default": PreTokenizer((_PUNCTUATION, _GPT2, r"\p{N}+", _THREE_DIGITS)),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """What `tokenizer.ggml.pre` names. Raises UnsupportedModel for a name that is not in the table: cutting text
    another way would give ids the model never saw."""
    found = _BY_NAME.get(name)
    if found is None:
        raise UnsupportedModel(
            f"the GGUF file cuts text by {name!r} (tokenizer.ggml.pre), which is not known here; "
            "give the model's MLX or Hugging Face form"
        )
    return found
