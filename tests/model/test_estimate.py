"""What a model takes, found without reading its weights, against what it then does take."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.config import EngineConfig
from mlxpaged.errors import ModelTooLarge
from mlxpaged.model import estimate as module
from mlxpaged.model.estimate import estimate, groups_of, need_of, require_room
from mlxpaged.model.kvspec import probe
from mlxpaged.model.loader import load, unread
from mlxpaged.model.memplan import Machine
from mlxpaged.model.sources import ModelSource

from .families import SOLO, tiny_model

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "rope_theta": 5e5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def lazy(config: dict[str, Any]) -> Any:
    family = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    return family.Model(family.ModelArgs.from_dict(config))


def test_a_70b_model_is_measured_without_making_one_weight_of_it() -> None:
    model = lazy(LLAMA_70B)
    model.set_dtype(mx.float16)
    mx.reset_peak_memory()
    before = mx.get_peak_memory()
    need = need_of("llama", model, LLAMA_70B, 0, 131072, probe(model))
    assert need.token_bytes == 327_680 and need.layer_token_bytes == 4096
    assert (need.work.widest, need.work.query_heads, need.work.head_width, need.work.item_bytes) == (28672, 64, 128, 2)
    assert mx.get_peak_memory() - before < 2**20


def test_latent_attention_keeps_the_latent_and_the_rotated_key() -> None:
    model, config = tiny_model("deepseek_v3")
    need = need_of("tiny", model, config, 0, 512, None)
    latent, rotated = SOLO["deepseek_v3"]["kv_lora_rank"], SOLO["deepseek_v3"]["qk_rope_head_dim"]
    assert need.token_bytes == config["num_hidden_layers"] * (latent + rotated) * 4


def test_recurrent_layers_keep_a_state_of_fixed_size() -> None:
    model, config = tiny_model("qwen3_next")
    need = need_of("tiny", model, config, 0, 512, None)
    assert need.token_bytes == 2 * 2 * 16 * 4  # of one layer in four: two heads of 16, K and V
    assert need.fixed_bytes == 3 * 18432


def test_windows_are_groups_of_their_own() -> None:
    model, _ = tiny_model("gpt_oss")
    groups = groups_of(probe(model))
    assert [(group.window, group.layers, group.token_bytes) for group in groups] == [(None, 2, 512), (24, 2, 512)]


@pytest.mark.smollm2
@pytest.mark.parametrize("dtype", ["float32", "keep", "float16"])
def test_the_weights_of_a_gguf_file_are_known_to_the_byte(smollm2_source: ModelSource, dtype: Any) -> None:
    seen = unread(smollm2_source, dtype)
    loaded = load(smollm2_source, dtype)
    assert seen.weights_bytes == loaded.weights_bytes
    assert probe(seen.model) == probe(loaded.model)
    assert seen.context_len == loaded.context_len == 8192


@pytest.mark.smollm2
def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    smollm2_source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "machine", lambda: Machine(total=2**30, free=2**28))
    with pytest.raises(ModelTooLarge, match=r"smollm2 does not fit: .* free memory allows 0\.19 GiB, so no context"):
        require_room(smollm2_source, EngineConfig(dtype="float32"))
    monkeypatch.setattr(module, "machine", lambda: Machine(total=2**34, free=2**33))
    require_room(smollm2_source, EngineConfig(dtype="float32"))
    with pytest.raises(ModelTooLarge, match=r"raise --memory-budget to 0\.\d\dGiB or"):
        require_room(smollm2_source, EngineConfig(dtype="float32", memory_budget=10**8))


@pytest.mark.smollm2
def test_the_estimate_says_which_path_serves(smollm2_source: ModelSource) -> None:
    plan, paged = estimate(smollm2_source, EngineConfig(dtype="float32"))
    assert paged and plan.token_bytes == 46_080 and plan.context_len == 8192
