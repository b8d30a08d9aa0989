"""What a model's files say about it, without loading it. Owns reading configs for people; decides nothing, imports no
mlx."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .shelf import weights_bytes
from .sources import ModelSource

if TYPE_CHECKING:
    from .gguf_file import GgufFile

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_KIND = re.compile(r"(?:^|[-_.])((?:IQ|Q|F|BF|MXFP)\d[\w]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Description:
    """None: the files do not say. `template_bytes` is the length of the chat template, 0 where there is none."""

    name: str
    path: Path
    kind: str
    num_bytes: int
    family: str | None = None
    quantisation: str | None = None
    context_len: int | None = None
    num_layers: int | None = None
    template_bytes: int = 0


def describe(source: ModelSource) -> Description:
    """The facts about a model on this disk. Raises ModelNotFound or UnsupportedModel for a damaged or foreign file."""
    return _of_gguf(source) if source.kind == "gguf" else _of_folder(source)


def _of_folder(source: ModelSource) -> Description:
    config = _json(source.path / "config.json")
    text = config | (config.get("text_config") or {})
    return Description(
        source.name,
        source.path,
        source.kind,
        weights_bytes(source.path),
        family=text.get("model_type") or config.get("model_type"),
        quantisation=folder_quantisation(config),
        context_len=next((int(text[key]) for key in _CONTEXT_KEYS if isinstance(text.get(key), int)), None),
        num_layers=text.get("num_hidden_layers"),
        template_bytes=_template_bytes(source.path),
    )


def _of_gguf(source: ModelSource) -> Description:
    from .gguf_file import GgufFile

    file = GgufFile(source.path)
    family = file.text("general.architecture")

    def number(key: str) -> int | None:
        value = file.number(f"{family}.{key}")
        return None if value is None else int(value)

    return Description(
        source.name,
        source.path,
        source.kind,
        weights_bytes(source.path),
        family=family,
        quantisation=gguf_quantisation(file),
        context_len=number("context_length"),
        num_layers=number("block_count"),
        template_bytes=len(file.text("tokenizer.chat_template") or ""),
    )


def folder_quantisation(config: dict[str, Any]) -> str | None:
    """How a folder's weights are stored, such as "4 bits, groups of 64" or "bfloat16", by its config.json."""
    packed = config.get("quantization") or config.get("quantization_config") or {}
    bits = packed.get("bits") if isinstance(packed, dict) else None
    if not bits:
        text = config | (config.get("text_config") or {})
        return str(text.get("torch_dtype") or text.get("dtype") or "") or None
    mode, group = packed.get("mode", "affine"), packed.get("group_size")
    name = f"{bits} bits" if mode == "affine" else f"{bits} bits ({mode})"
    return f"{name}, groups of {group}" if isinstance(group, int) and group > 0 else name


def gguf_quantisation(file: GgufFile) -> str | None:
    """How a GGUF's weights are stored, such as "Q4_K_M": what its name says, else the kind of most of its bytes."""
    if named := _KIND.search(file.path.stem):
        return named[1].upper()
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.kind] += tensor.data.nbytes
    return sizes.most_common(1)[0][0] if sizes else None


def _template_bytes(folder: Path) -> int:
    loose = folder / "chat_template.jinja"
    if loose.is_file():
        return loose.stat().st_size
    template = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = next((one.get("template") for one in template if isinstance(one, dict)), None)
    return len(template) if isinstance(template, str) else 0


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
