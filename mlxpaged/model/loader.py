"""From a model's files to a model in memory. Owns the choice of number format and what a person is told about it.

Called on the one MLX thread: arrays belong to the thread that made them. Models are mlx-lm's own, unmodified.
Importing this module imports mlx.core; call `blas.open_system_blas` before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..config import Dtype
from ..errors import MlxpagedError, ModelNotFound, UnsupportedModel
from .describe import folder_quantisation, gguf_quantisation
from .gguf_config import gguf_config, gguf_defaults
from .gguf_file import GgufFile
from .gguf_tokenizer import gguf_tokenizer
from .gguf_weights import build, num_parameters, shapes
from .memory import free_memory
from .memplan import gib
from .sources import ModelSource
from .tokenizer import Tokenizer
from .tokenizer_files import folder_tokenizer, read_json
from .upstream import import_mlx_lm

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_SAMPLING_RANGES = {
    "temperature": (0, 100),
    "top_p": (1e-6, 1),
    "top_k": (0, 1 << 30),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 10),
}
_FALLBACK_CONTEXT = 8192
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")


@dataclass
class LoadedModel:
    """A model ready to run. `context_len` is the most tokens it was made for; `defaults` are its maker's sampling
    parameters; `notes` are lines a person should read once; `quantisation` is how its files store weights. `model` and
    its arrays stay on the loading thread."""

    name: str
    path: Path
    config: dict[str, Any]
    model: nn.Module
    tokenizer: Tokenizer
    context_len: int
    weights_bytes: int
    defaults: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    quantisation: str | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are held. `dense`: all of them as this type; None: as stored. `activations`: the type of all else
    beside packed weights, and so of the computation; None: what the file stores. `note`: a line for a person."""

    dense: mx.Dtype | None
    activations: mx.Dtype | None = None
    note: str | None = None


def load(source: ModelSource, dtype: Dtype = "auto") -> LoadedModel:
    """Load weights and tokenizer; every weight is in memory on return. `dtype`: see choose_format.

    Raises ModelNotFound (damaged or incomplete files) or UnsupportedModel (mlx-lm has no such model).
    """
    return _load_gguf(source, dtype) if source.kind == "gguf" else _load_folder(source, dtype)


def choose_format(dtype: Dtype, parameters: int, on_cpu: bool, free_bytes: int) -> Format:
    """How `parameters` weights are held.

    auto: as stored; on the CPU float32, several times faster there, where that takes at most half of `free_bytes`.
    keep: as stored. A type's name: all weights dense in that type. Beside packed weights the CPU computes in float32,
    where MLX's packed product is 10 to 40 times faster than in 16 bits.
    """
    if dtype in _DTYPES:
        return Format(_DTYPES[dtype])
    if not on_cpu:
        return Format(None)
    if dtype == "auto":
        if parameters * 4 <= free_bytes // 2:
            return Format(mx.float32)
        needed, free = gib(parameters * 4), gib(free_bytes)
        return Format(
            None,
            mx.float32,
            f"weights stay as stored: float32 would take {needed}, more than half of the {free} free; "
            "--dtype float32 insists",
        )
    return Format(None, mx.float32)


@dataclass(frozen=True)
class Unread:
    """A model whose weights are still on disk: `model` has their shapes and types, and evaluating it would read them
    (folders) or make something else (GGUF). `weights_bytes`: what they will take."""

    model: nn.Module
    config: dict[str, Any]
    weights_bytes: int
    context_len: int


def unread(source: ModelSource, dtype: Dtype = "auto") -> Unread:
    """Everything about a model that its headers tell. Raises what `load` does, as far as it can be known."""
    if source.kind == "gguf":
        import_mlx_lm()
        file = GgufFile(source.path)
        config = gguf_config(file)
        form = choose_format(dtype, num_parameters(file), _on_cpu(), free_memory())
        model, weights_bytes = shapes(file, config, form.dense, form.activations)
        return Unread(model, config, weights_bytes, config["max_position_embeddings"])
    model, config, _ = _open_folder(source, dtype)
    return Unread(model, config, _weights_bytes(model), _context_len(config, source.path))


def _load_gguf(source: ModelSource, dtype: Dtype) -> LoadedModel:
    import_mlx_lm()
    file = GgufFile(source.path)
    config = gguf_config(file)
    tokenizer = gguf_tokenizer(file)
    form = choose_format(dtype, num_parameters(file), _on_cpu(), free_memory())
    built = build(file, config, form.dense, form.activations)
    return LoadedModel(
        name=source.name,
        path=source.path,
        config=config,
        model=built.model,
        tokenizer=tokenizer,
        context_len=config["max_position_embeddings"],
        weights_bytes=_weights_bytes(built.model),
        defaults=_usable_defaults(gguf_defaults(file)),
        notes=built.notes if form.note is None else (*built.notes, form.note),
        quantisation=gguf_quantisation(file),
    )


def _open_folder(source: ModelSource, dtype: Dtype) -> tuple[nn.Module, dict[str, Any], Format]:
    """The model in the form it will have; nothing of its weights is read yet."""
    utils = import_mlx_lm()
    try:
        model, config = utils.load_model(source.path, lazy=True)
    except FileNotFoundError as error:
        raise ModelNotFound(f"{source.path} is not a whole model: {error}; fetch it again") from error
    except Exception as error:  # mlx-lm raises whatever the config or the weights lead it to
        raise _explain(source, error) from error
    form = choose_format(dtype, utils.get_total_parameters(model), _on_cpu(), free_memory())
    if form.dense is not None:
        model = _densify(model, form.dense, utils)
    elif form.activations is not None and any("scales" in module for module in model.modules()):
        model.set_dtype(form.activations)
    return model, config, form


def _load_folder(source: ModelSource, dtype: Dtype) -> LoadedModel:
    tokenizer = folder_tokenizer(source.path)
    model, config, form = _open_folder(source, dtype)
    try:
        mx.eval(model.parameters())
    except RuntimeError as error:  # lazily read files that are cut short
        raise ModelNotFound(f"cannot read the weights of {source.name}: {error}; fetch the model again") from error
    return LoadedModel(
        name=source.name,
        path=source.path,
        config=config,
        model=model,
        tokenizer=tokenizer,
        context_len=_context_len(config, source.path),
        weights_bytes=_weights_bytes(model),
        defaults=_usable_defaults(read_json(source.path / "generation_config.json")),
        notes=() if form.note is None else (form.note,),
        quantisation=folder_quantisation(config),
    )


def _weights_bytes(model: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def _densify(model: nn.Module, dtype: mx.Dtype, utils: Any) -> nn.Module:
    """Every weight as `dtype`. Scales go to float32 first, so that nothing is rounded twice."""
    for module in model.modules():
        if getattr(module, "mode", "affine") == "affine" and "scales" in module and module.get("biases") is not None:
            module.scales = module.scales.astype(mx.float32)
            module.biases = module.biases.astype(mx.float32)
    model = utils.dequantize_model(model)
    model.set_dtype(dtype)
    return model


def _on_cpu() -> bool:
    return mx.default_device() == mx.Device(mx.cpu)


def _explain(source: ModelSource, error: Exception) -> MlxpagedError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    model_type = read_json(source.path / "config.json").get("model_type")
    if "not supported" in reason:
        return UnsupportedModel(f"mlx-lm has no model of type {model_type!r}, which {source.name} is; update mlx-lm")
    return UnsupportedModel(f"mlx-lm cannot load {source.name} ({model_type}): {reason}")


def _usable_defaults(found: dict[str, Any]) -> dict[str, float]:
    """The maker's sampling parameters that are numbers in range; one that is not is left out."""
    usable: dict[str, float] = {}
    for name, (least, most) in _SAMPLING_RANGES.items():
        value = found.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
            usable[name] = int(value) if name == "top_k" else value
    return usable


def _context_len(config: dict[str, Any], folder: Path) -> int:
    for part in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return part[key]
    stated = read_json(folder / "tokenizer_config.json").get("model_max_length")
    return int(stated) if isinstance(stated, int | float) and 0 < stated < 1 << 24 else _FALLBACK_CONTEXT
