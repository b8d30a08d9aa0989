"""The models and loads of scripts/bench_batch.py: what "tiny", "1b" and "8b" are, how weights are held, which prompts
are drawn. Measures nothing. Importing this imports mlx.core; call `before_mlx` before."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from bench_figures import Load
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama

from mlxpaged.config import BLOCK_SIZE
from mlxpaged.model.loader import LoadedModel, load
from mlxpaged.model.sources import resolve

GROUP_SIZE = 64

_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "vocab_size": 128256}
_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_LLAMA,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
    },
    "1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
    },
    "8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0,
    },
}
"""Llama-shaped models with random weights: a step costs what it costs with trained ones."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt lengths from `low` to `high` tokens; `log`: short ones as likely as long ones per octave, as chats are."""

    low: int
    high: int
    log: bool = False

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        if self.low == self.high:
            return [self.low] * count
        if self.log:
            logs = rng.uniform(math.log(self.low), math.log(self.high), count)
            return [round(math.exp(value)) for value in logs]
        return rng.integers(self.low, self.high + 1, count).tolist()


@dataclass(frozen=True, slots=True)
class Defaults:
    """A model's workload when no flag says otherwise; `alone` is the prompt length at a batch of one."""

    batch: int
    low: int
    high: int
    alone: int
    new: int
    log: bool = False

    def lengths(self, batch: int, asked: tuple[int, int] | None) -> Lengths:
        low, high = asked or ((self.alone, self.alone) if batch == 1 else (self.low, self.high))
        return Lengths(low, high, self.log)


DEFAULTS = {
    "smollm2": Defaults(batch=8, low=16, high=512, alone=64, new=64, log=True),
    "tiny": Defaults(batch=4, low=4, high=48, alone=16, new=8, log=True),
    "1b": Defaults(batch=8, low=64, high=2048, alone=512, new=128),
    "8b": Defaults(batch=8, low=64, high=2048, alone=512, new=128),
}


def on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def load_model(name: str, bits: int, seed: int) -> LoadedModel:
    """The model with weights of `bits` bits: 32 is float32, 16 bfloat16, 8 and 4 MLX's affine groups of 64 (beside them
    all else is float32 on the CPU, bfloat16 on a GPU). Raises MlxpagedError where smollm2 cannot be fetched."""
    wide = bits == 32 or (bits < 16 and not on_gpu())
    if name in _SHAPES:
        loaded = _random_llama(name, mx.float32 if wide else mx.bfloat16, seed)
    else:
        loaded = load(resolve(name), dtype="float32" if wide else "bfloat16")
    if bits < 16:
        nn.quantize(loaded.model, group_size=GROUP_SIZE, bits=bits)
    _evaluate(loaded.model)
    loaded.weights_bytes = sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    return loaded


def stock_twin(model: nn.Module) -> nn.Module:
    """The same weights in modules of their own: our engine wraps the norm and the linears of its model, and mlx-lm must
    be measured without."""
    shared = {id(array): array for _, array in tree_flatten(model.parameters())}
    return copy.deepcopy(model, shared)


def share_weights(twin: nn.Module, model: nn.Module) -> None:
    """Let `twin` hold the arrays of `model`, whose engine may have laid them out anew: nothing lies in memory twice."""
    names = {name for name, _ in tree_flatten(twin.parameters())}
    twin.update(tree_unflatten([pair for pair in tree_flatten(model.parameters()) if pair[0] in names]))


def batch_load(lengths: Lengths, batch: int, new: int, shared_prefix: int, vocab_size: int, seed: int) -> Load:
    """`batch` prompts of random ids, `new` tokens to each; the first `shared_prefix` ids are common to all and come
    before the drawn length."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, vocab_size, shared_prefix).tolist()
    counts = lengths.draw(batch, rng)
    return Load([prefix + rng.integers(0, vocab_size, count).tolist() for count in counts], [new] * batch)


WARM_STEPS = 12
"""Steps that every row decodes before any is measured."""

DECODING_BUDGET = 2048
"""Tokens of an engine's step for which decoding_load() is made."""


def decoding_load(lengths: Lengths, batch: int, steps: int, vocab_size: int) -> Load:
    """Prompts as batch_load() draws them, and replies so long that all rows decode in each of `steps` steps after the
    last prompt's row took its WARM_STEPS: a short prompt's reply begins while the others are still computed."""
    load = batch_load(lengths, batch, 0, 0, vocab_size, 0)
    prompt_steps = -(-load.num_prompt_tokens // max(DECODING_BUDGET - batch, BLOCK_SIZE))
    return Load(load.prompts, [prompt_steps + steps + 2 * WARM_STEPS] * batch)


CLASSIC = ((50, 200), (30, 20), (100, 500))
"""(prompt, new tokens) of the load that static batching is classically compared on."""


def classic_load(each: int, scale: float, vocab_size: int, seed: int) -> Load:
    """`each` requests of every kind of CLASSIC in random order, all lengths times `scale` (2 tokens at least)."""
    rng = np.random.default_rng(seed)
    kinds = [CLASSIC[index] for index in rng.permutation(np.repeat(np.arange(len(CLASSIC)), each))]
    sized = [tuple(max(2, round(length * scale)) for length in kind) for kind in kinds]
    return Load([rng.integers(0, vocab_size, prompt).tolist() for prompt, _ in sized], [new for _, new in sized])


def _random_llama(name: str, dtype: mx.Dtype, seed: int) -> LoadedModel:
    """Lazy: nothing is in memory before _evaluate()."""
    config = _SHAPES[name]
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    model.eval()
    context_len = config["max_position_embeddings"]
    return LoadedModel(name, Path(name), config, model, cast(Any, None), context_len, weights_bytes=0)


def _evaluate(model: nn.Module) -> None:
    """Layer by layer, so that a model made in float32 and kept in 4 bits never stands in memory whole."""
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
