"""How many kernels a decode step starts, counted on the exported graph and compared with stock mlx-lm's decode step.
Each kernel costs the host more than anything Python does for it, so a layer may start two more at most, and a
fused one starts fewer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from mlxpaged.model.attention import AttentionStep
from mlxpaged.model.compiled import BucketRows, Graphs
from mlxpaged.model.fusedstep import FusedStep
from mlxpaged.model.kernelpool import KernelPool
from mlxpaged.model.kvspec import probe
from mlxpaged.model.linears import LinearWays, flatten_linears
from mlxpaged.model.rotation import install_rotations
from mlxpaged.model.seam import attention_hook

VIEWS = {"Reshape", "Transpose", "Squeeze", "ExpandDims", "Slice", "Broadcast", "Split", "Flatten", "Unflatten"}
"""What only looks at an array another way. Depends and Full are the stand-ins' own."""
BATCH = 4


def one_node_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU these are made of many operations; on a GPU each is one kernel."""
    monkeypatch.setattr(mx.fast, "rope", lambda x, *_, **__: mx.sin(x))
    monkeypatch.setattr(mx.fast, "rms_norm", lambda x, *_, **__: mx.cos(x))
    monkeypatch.setattr(
        mx.fast, "scaled_dot_product_attention", lambda q, k, v, **_: mx.depends([mx.exp(q)], [k, v])[0]
    )


def model_of(layers: int) -> llama.Model:
    arguments = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 64,
        "tie_word_embeddings": False,
    }
    return llama.Model(llama.ModelArgs.from_dict(arguments))


def kernels(outputs: list[mx.array], folder: Path) -> int:
    """Operations of the graph that start a kernel."""
    file = folder / "graph.dot"
    mx.export_to_dot(str(file), *outputs)
    names = re.findall(r'label ?= ?"(\w+)", shape=rectangle', file.read_text())
    return sum(name not in VIEWS | {"Depends", "Full"} for name in names)


def stock_step(layers: int, folder: Path) -> int:
    model = model_of(layers)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((BATCH, 3), mx.int32), cache=cache))
    with pytest.MonkeyPatch.context() as patch:
        one_node_each(patch)
        return kernels([model(mx.zeros((BATCH, 1), mx.int32), cache=cache)], folder)


def our_step(layers: int, folder: Path, context: int, graphs: Graphs) -> int:
    launched: list[str] = []

    def launch(spec, inputs, *, shapes, dtypes, **_) -> list[mx.array]:
        launched.append(spec.name)
        return mx.depends([mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)], list(inputs))

    model = model_of(layers)
    spec = probe(model)
    pool = KernelPool(spec, [8], launch)
    flatten_linears(model, LinearWays(join=True))
    if graphs == "fused":
        assert install_rotations(model) == layers
    rows = BucketRows(mx.zeros((BATCH, 128), mx.int32), mx.zeros((8,), mx.int32), context)
    kind = FusedStep if graphs == "fused" else AttentionStep
    step = kind(pool, BATCH, [rows], [()], mx.zeros((BATCH,), mx.int32), [mx.zeros((8,), mx.int32)])
    with pytest.MonkeyPatch.context() as patch, attention_hook(model):
        one_node_each(patch)
        logits = model(mx.zeros((BATCH, 1), mx.int32), cache=step.layers())
        nodes = kernels([logits, pool.token], folder)
    # What joined linears give lies in strides. MLX makes it contiguous for rope (q, k) and kv_write (v), not for
    # rope_write.
    return nodes + len(launched) + 3 * launched.count("kv_write")


def a_layer(step: Callable[[int], int]) -> int:
    """Kernels that one more layer adds."""
    return step(3) - step(2)


@pytest.mark.parametrize("context", [300, 2000])
def test_a_layer_starts_few_kernels_more_than_stock_and_fewer_where_fused(tmp_path: Path, context: int) -> None:
    stock = a_layer(lambda n: stock_step(n, tmp_path))
    plain, fused = (a_layer(lambda n, kind=kind: our_step(n, tmp_path, context, kind)) for kind in ("plain", "fused"))
    assert stock > 10 and plain <= stock + 2, (stock, plain)
    assert fused == plain - 5, (stock, plain, fused)  # two ropes, three copies
