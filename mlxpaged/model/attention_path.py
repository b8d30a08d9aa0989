"""From a model's layers to the way their attention runs. Owns the translation of a KVSpec into kernel templates; the
decision itself is made in kernels/choose.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ..config import Attention
from ..kernels.choose import AttentionPath, choose_path
from ..kernels.selftest import OnProgress
from ..kernels.template import KernelTemplate
from .kvspec import KVSpec, LayerSpec


def attention_path(spec: KVSpec, mode: Attention, on_progress: OnProgress | None = None) -> AttentionPath:
    """How the pool of `spec` is to be read and written; call it before the pool is made. Raises ConfigError where
    "kernel" is demanded and cannot be had."""
    return choose_path(mode, kernel_templates(spec), on_progress)


def kernel_templates(spec: KVSpec) -> tuple[KernelTemplate, ...]:
    """The kinds of layer of a model, each with its number of layers, in order of appearance."""
    counts = Counter(map(_template, spec.layers))
    return tuple(replace(template, layers=count) for template, count in counts.items())


def _template(layer: LayerSpec) -> KernelTemplate:
    return KernelTemplate(
        dtype=str(layer.dtype).removeprefix("mlx.core."),
        num_kv_heads=layer.heads,
        group=max(1, layer.query_heads // layer.heads),
        key_width=layer.k_width,
        value_width=layer.v_width,
        window=layer.window,
        sinks=layer.sinks,
    )
