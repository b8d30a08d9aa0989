"""What the seam changes in a model, and what it leaves alone."""

from __future__ import annotations

import sys

import mlx.core as mx
import numpy as np
from mlx_lm.models import base

from mlxpaged.model.seam import (
    install_attention,
    install_gather_norm,
    remove_attention,
    remove_gather_norm,
)

from .families import tiny_model


def modules_with_attention() -> list[str]:
    name = "scaled_dot_product_attention"
    return [
        key
        for key, module in list(sys.modules.items())
        if key.startswith("mlx_lm.models.") and key != "mlx_lm.models.base" and hasattr(module, name)
    ]


def test_every_module_that_imports_the_attention_function_gets_ours_and_gets_it_back() -> None:
    model, _ = tiny_model("llama")
    tiny_model("gpt_oss")
    using = modules_with_attention()
    assert install_attention(model) == len(using) >= 2
    assert all(sys.modules[key].scaled_dot_product_attention is not base.scaled_dot_product_attention for key in using)
    remove_attention()
    assert all(sys.modules[key].scaled_dot_product_attention is base.scaled_dot_product_attention for key in using)


def test_the_gather_norm_lets_wanted_rows_through_and_can_be_removed() -> None:
    model, _ = tiny_model("llama")
    ids = mx.array([[1], [2], [3]])
    full = np.array(model(ids))

    def agrees(got: mx.array, expected: np.ndarray) -> bool:  # a BLAS of many threads adds in no fixed order
        return np.allclose(np.array(got), expected, rtol=1e-4, atol=1e-5)

    norm = install_gather_norm(model)
    assert norm is not None and install_gather_norm(model) is norm
    with norm.picking(slice(2)):
        assert agrees(model(ids), full[:2])
    with norm.picking(mx.array([2, 0])):
        assert agrees(model(ids), full[[2, 0]])
    assert agrees(model(ids), full)
    remove_gather_norm(model)
    assert agrees(model(ids), full)
