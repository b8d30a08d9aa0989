"""Measurements of models for a report: stock mlx-lm's decode rate, one product in two layouts, the size of a step. Owns
the tiny random model they run on when none is named. Importing this imports mlx.core; call `startup.before_mlx`
before."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..kernels import bench
from ..kernels.choose import Device
from ..kernels.commits import ModelShape, count_commits, paged_step, stock_step
from ..kernels.encoder import MLX_LIMITS, EncoderLimits
from ..kernels.launch import Launcher
from ..kernels.selftest import run_selftest
from ..kernels.template import KernelTemplate
from .attention_path import kernel_templates
from .estimate import on_gpu
from .kvspec import KVSpec
from .loader import LoadedModel
from .seam import install_attention, remove_attention
from .upstream import import_mlx_lm

TINY = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

Arrivals = list[tuple[float, int]]
"""(seconds on one clock, number of the request) of every token."""


def tiny_model() -> LoadedModel:
    """A llama of 4 layers with random weights: a step costs what it costs with trained ones. It has no tokenizer."""
    llama = cast(Any, import_mlx_lm("mlx_lm.models.llama"))
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(TINY))
    model.set_dtype(mx.bfloat16 if on_gpu() else mx.float32)
    model.eval()
    mx.eval(model.parameters())
    return LoadedModel("tiny random llama", Path("tiny"), TINY, model, cast(Any, None), 4096, weights_bytes=0)


def stock_twin(loaded: LoadedModel) -> nn.Module:
    """The same weights in modules of their own, without what serving installs in a model."""
    shared = {id(array): array for _, array in tree_flatten(loaded.model.parameters())}
    return copy.deepcopy(loaded.model, shared)


def stock_arrivals(model: nn.Module, prompts: list[list[int]], new: int) -> Arrivals:
    """When mlx-lm's BatchGenerator gave each of `new` greedy tokens to each prompt. `model` is a stock twin."""
    generate = cast(Any, import_mlx_lm("mlx_lm.generate"))
    remove_attention()
    try:
        generator = generate.BatchGenerator(
            model, completion_batch_size=len(prompts), prefill_batch_size=min(8, len(prompts))
        )
        uids = generator.insert(prompts, [new] * len(prompts))
        arrivals: Arrivals = []
        while len(arrivals) < new * len(prompts):
            _, tokens = generator.next()
            now = time.perf_counter()
            arrivals += [(now, uids.index(token.uid)) for token in tokens]
        generator.close()
        return arrivals
    finally:
        install_attention(model)


def matmul_layouts(rows: int) -> dict[str, Any]:
    """Microseconds of a 4-bit product over (rows, 1, K), as mlx-lm's models call it, and over (1, rows, K), as our
    flattened linears do."""
    size = 4096 if on_gpu() else 512
    weight, scales, biases = mx.quantize(mx.random.normal((size, size)), group_size=64, bits=4)
    flat = mx.random.normal((1, rows, size)).astype(scales.dtype)
    column = flat.reshape(rows, 1, size)
    mx.eval(weight, scales, biases, flat, column)
    figures: dict[str, Any] = {"rows": rows, "size": size}
    for name, x in (("column_us", column), ("flat_us", flat)):

        def product(x: mx.array = x) -> None:
            mx.eval([mx.quantized_matmul(x, weight, scales, biases, group_size=64, bits=4) for _ in range(4)])

        figures[name] = round(bench.best_s(product) / 4 * 1e6, 1)
    return figures


def commits(loaded: LoadedModel, limits: EncoderLimits | None) -> list[dict[str, Any]]:
    """Predicted command buffers of a decode step of one row at 1024 tokens, by pool size: mlx-lm's, and ours with MLX's
    limits and with our own. Raises KeyError for a model whose config names no llama-like sizes."""
    shape = model_shape(loaded.config)
    rows = []
    for tokens in (2048, 16384, 65536):
        ours = {"ours": count_commits(paged_step(shape, 1, 1024, tokens), limits)} if limits else {}
        own = {
            f"mlx_limits_{chip.replace(' ', '_')}": count_commits(paged_step(shape, 1, 1024, tokens), one)
            for chip, one in MLX_LIMITS.items()
        }
        stock = count_commits(stock_step(shape, 1, 1024), MLX_LIMITS["base and Pro"])
        rows.append({"pool_tokens": tokens, "mlx_lm": stock, **own, **ours})
    return rows


def model_shape(config: dict[str, Any]) -> ModelShape:
    """The sizes a config names; KeyError where it names none."""
    text = config.get("text_config", config)
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    return ModelShape(
        layers=int(text["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(text["intermediate_size"]),
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        width=int(text.get("head_dim") or hidden // heads),
        vocab=int(text["vocab_size"]),
        bits=int((config.get("quantization") or {}).get("bits", 16)),
    )


class KernelLab:
    """The kernels of a GPU, measured for the layers of one model."""

    def __init__(self, launch: Launcher, templates: tuple[KernelTemplate, ...]) -> None:
        self._launch = launch
        self._templates = templates

    @staticmethod
    def here(spec: KVSpec) -> KernelLab | None:
        """None where MLX runs on the CPU."""
        launch = Device.current().launcher()
        return KernelLab(launch, kernel_templates(spec)) if launch else None

    def selftest(self) -> dict[str, Any]:
        """Every case, failed ones in words."""
        report = run_selftest(self._launch, self._templates, every_case=True)
        worst: dict[str, float] = {}
        for result in report.results:
            worst[result.kernel] = max(worst.get(result.kernel, 0.0), result.error)
        failed = [result.line for result in report.results if not result.ok]
        return {"cases": len(report.results), "failed": failed, "worst_error": [worst]}

    def in_place(self) -> dict[str, Any]:
        template = self._templates[0]
        times = [bench.write_times(self._launch, template, tokens) for tokens in (2048, 32768)]
        return {**bench.order_with_and_without_tokens(self._launch, template), "write_one_token": times}

    def first_launches(self) -> dict[str, Any]:
        """On a variant of odd sizes, which no model has asked for."""
        return bench.first_launches(self._launch, KernelTemplate(self._templates[0].dtype, 1, 7, 72, 88))

    def rates(self, budget_s: float) -> list[dict[str, Any]]:
        share_s = budget_s / len(self._templates)
        return [
            {"layers": template.name, **figures}
            for template in self._templates
            for figures in bench.decode_rates(self._launch, template, share_s)
        ]
