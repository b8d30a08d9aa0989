"""A tokenizer from a model folder's files. Owns where a folder says what; transformers is a last resort only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from ..errors import ModelNotFound, UnsupportedModel
from .end_tokens import end_token_ids
from .tokenizer import Tokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where the file is missing. Raises ModelNotFound, naming the file, for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"cannot read {path}: {error}; fetch the model again") from error
    if not isinstance(content, dict):
        raise ModelNotFound(f"{path} is no JSON object; fetch the model again")
    return content


def folder_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer, chat template and end tokens of a model folder.

    Raises UnsupportedModel where only the model's own Python code could build it, ModelNotFound for damaged files.
    """
    raw = _raw(folder)
    raw.no_truncation()  # tokenizer.json may carry what its training used
    raw.no_padding()
    settings = read_json(folder / "tokenizer_config.json")
    special = _special_tokens(read_json(folder / "special_tokens_map.json") | settings)
    template = _template(folder, settings)
    config, generation = read_json(folder / "config.json"), read_json(folder / "generation_config.json")
    declared = [_ids(source.get("eos_token_id")) for source in (generation, config, config.get("text_config") or {})]
    ends = [id_ for ids in declared for id_ in ids]
    if eos := special.get("eos_token"):
        ends += _ids(raw.token_to_id(eos))
    bos = raw.token_to_id(special.get("bos_token", ""))
    add_bos = bos is not None and raw.encode("a").ids[:1] == [bos]
    return Tokenizer(raw, end_token_ids(raw, ends, template), template, special, add_bos)


def _raw(folder: Path) -> RawTokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _by_transformers(folder)
    try:
        return RawTokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception
        raise ModelNotFound(f"cannot read {path}: {str(error)[:120]}; fetch the model again") from error


def _by_transformers(folder: Path) -> RawTokenizer:
    """Folders that hold only tokenizer.model or vocab files: transformers converts them."""
    from .upstream import import_mlx_lm

    auto = import_mlx_lm("transformers").AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(folder, trust_remote_code=False)
        raw = tokenizer.backend_tokenizer
    except Exception as error:  # anything may be missing or wrong in such a folder
        reason = " ".join(str(error).split())[:160]
        raise UnsupportedModel(
            f"{folder} has no tokenizer.json, and transformers cannot build one: {reason}"
        ) from error
    return RawTokenizer.from_str(raw.to_str())


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Names to texts; a token is written as a text or as an object with its content."""
    found = {}
    for name in _SPECIAL_NAMES:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over chat_template.json, and both over tokenizer_config.json, as in transformers."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    template = read_json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default") or next(iter(named.values()), None)
    return template


def _ids(value: Any) -> list[int]:
    return [id_ for id_ in (value if isinstance(value, list) else [value]) if isinstance(id_, int)]
