"""A GGUF model gives the logits of the same weights handed to mlx-lm directly, whatever kind they are stored in."""

from __future__ import annotations

import importlib
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from mlxpaged.errors import ModelNotFound, UnsupportedModel
from mlxpaged.model.gguf_file import GgufFile, GgufTensor
from mlxpaged.model.gguf_kinds import PACKED_KINDS, dense, packed
from mlxpaged.model.loader import LoadedModel, load
from mlxpaged.model.sources import resolve

from .tiny_gguf import HEAD_DIM, HEADS, LAYERS, ROPE_BASE, TinyModel

PROMPT = mx.array([[5, 9, 77, 130, 8, 8, 200, 31, 4, 90, 17, 251]])


def logits(model: object) -> np.ndarray:
    return np.array(model(PROMPT).astype(mx.float32))  # type: ignore[operator]


def reference(tiny: TinyModel, rounded: bool = True, **config: object) -> object:
    """mlx-lm's own class with the tiny model's float32 weights, each rounded as its kind stores it."""
    module = importlib.import_module(f"mlx_lm.models.{tiny.architecture}")
    model = module.Model(module.ModelArgs.from_dict(tiny.config | config))
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    in_layer = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
    }
    weights = {}
    for name, weight in tiny.weights().items():
        if weight.ndim == 2 and rounded:
            weight = gguf.dequantize(gguf.quantize(weight, tiny.kind), tiny.kind)
        base, ending = (name[:-5], "bias") if name.endswith(".bias") else (name, "weight")
        if base.startswith("blk."):
            _, layer, part = base.split(".")
            group = "mlp" if part.startswith("ffn") else "self_attn"
            short = part.split("_", 1)[1]
            inner = in_layer.get(part) or f"{group}.{short if 'norm' in part else short + '_proj'}"
            base = f"model.layers.{layer}.{inner}"
        else:
            base = names[base]
        weights[f"{base}.{ending}"] = mx.array(weight)
    model.load_weights(list(weights.items()), strict=True)
    return model


def loaded(tiny: TinyModel, folder: Path, dtype: str = "float32") -> LoadedModel:
    return load(resolve(str(tiny.write(folder / "tiny.gguf"))), dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_architecture_gives_the_logits_of_its_weights(architecture: str, tied: bool, tmp_path: Path) -> None:
    tiny = TinyModel(architecture, tied=tied)
    np.testing.assert_allclose(logits(loaded(tiny, tmp_path).model), logits(reference(tiny)), atol=1e-5)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_kind_the_package_can_write_is_exact_as_float32(kind: str, tmp_path: Path) -> None:
    tiny = TinyModel(kind=Kind[kind])
    np.testing.assert_allclose(logits(loaded(tiny, tmp_path).model), logits(reference(tiny)), atol=1e-5)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)])
def test_packed_kinds_stay_packed_when_kept(kind: str, bits: int, tmp_path: Path) -> None:
    tiny = TinyModel(kind=Kind[kind])
    model = loaded(tiny, tmp_path, "keep")
    projection = model.model.layers[0].self_attn.q_proj
    assert (projection.bits, projection.group_size, projection.weight.dtype) == (bits, 32, mx.uint32)
    assert model.weights_bytes < 0.4 * loaded(tiny, tmp_path).weights_bytes
    np.testing.assert_allclose(logits(model.model), logits(reference(tiny)), atol=2e-4)
    assert model.notes == ()


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_kinds_without_an_mlx_form_are_requantised_to_8_bits_and_said_so(kind: str, tmp_path: Path) -> None:
    tiny = TinyModel(kind=Kind[kind])
    model = loaded(tiny, tmp_path, "keep")
    assert model.model.layers[0].mlp.up_proj.bits == 8
    assert f"MLX has no {kind}" in model.notes[0] and "8 bits" in model.notes[0]
    np.testing.assert_allclose(logits(model.model), logits(reference(tiny)), atol=0.15)


@pytest.mark.parametrize(("kind", "stored"), [("F16", mx.float16), ("BF16", mx.bfloat16), ("F32", mx.float32)])
def test_unpacked_kinds_are_kept_in_their_own_type(kind: str, stored: mx.Dtype, tmp_path: Path) -> None:
    model = loaded(TinyModel(kind=Kind[kind]), tmp_path, "keep").model
    assert model.layers[1].mlp.down_proj.weight.dtype == stored
    assert model.layers[1].input_layernorm.weight.dtype == stored


def random_tensor(kind: str, rows: int = 24, columns: int = 512) -> GgufTensor:
    """Any bytes are a tensor, as long as the float16 scales in them are finite."""
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    random = np.random.default_rng(7)
    raw = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    halves = {"Q4_0": 1, "Q8_0": 1, "Q4_1": 2, "Q4_K": 2}[kind]
    scales = random.standard_normal((rows, columns // block, halves)).astype(np.float16)
    raw[..., : 2 * halves] = scales.view(np.uint8)
    return GgufTensor("x", kind, (rows, columns), raw.reshape(-1))


@pytest.mark.parametrize("kind", sorted(PACKED_KINDS))
def test_packing_rounds_nothing(kind: str) -> None:
    tensor = random_tensor(kind)
    pack = packed(tensor)
    values = mx.dequantize(pack.weight, pack.scales, pack.biases, group_size=32, bits=pack.bits)
    wanted = gguf.dequantize(tensor.data.reshape(24, -1), Kind[kind])
    assert np.array_equal(np.array(values), wanted)
    assert np.array_equal(np.array(dense(tensor)), wanted)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packing_equals_what_mx_load_makes_of_the_kinds_it_knows(kind: str, tmp_path: Path) -> None:
    path = TinyModel(kind=Kind[kind]).write(tmp_path / "tiny.gguf")
    theirs, name = mx.load(str(path)), "blk.1.ffn_up"
    ours = packed(GgufFile(path).tensors[f"{name}.weight"])
    assert mx.array_equal(ours.weight, theirs[f"{name}.weight"])
    assert mx.array_equal(ours.scales.astype(mx.float16), theirs[f"{name}.scales"])
    assert mx.array_equal(ours.biases.astype(mx.float16), theirs[f"{name}.biases"])


def test_llama_3s_rotation_factors_give_what_its_config_gives(tmp_path: Path) -> None:
    """The converter writes one factor per pair; mlx-lm computes the same from four numbers in the config."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    factors = []
    for frequency in 1.0 / ROPE_BASE ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM):
        wavelength = 2 * np.pi / frequency
        smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
        factors.append(1.0 if wavelength < 16 else 8.0 if wavelength > 64 else 1 / ((1 - smooth) / 8.0 + smooth))
    tiny = TinyModel(extra={"rope_freqs.weight": np.array(factors, np.float32)})
    plain, scaled = reference(tiny), reference(tiny, rope_scaling={"rope_type": "llama3", **scaling})
    found = logits(loaded(tiny, tmp_path).model)
    np.testing.assert_allclose(found, logits(scaled), atol=1e-4)
    assert np.abs(found - logits(plain)).max() > 1e-2


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
    ids=["linear", "yarn"],
)
def test_rope_scaling_in_metadata_reaches_the_model(
    metadata: dict[str, object], scaling: dict[str, object], tmp_path: Path
) -> None:
    tiny = TinyModel(metadata=metadata)
    found = logits(loaded(tiny, tmp_path).model)
    np.testing.assert_allclose(found, logits(reference(tiny, rope_scaling=scaling)), atol=1e-4)
    assert np.abs(found - logits(reference(tiny))).max() > 1e-3


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "mamba"}, "mamba model"),
        ({"llama.expert_count": 8}, "has experts"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"llama.rope.dimension_count": 16}, "16 of 32 dimensions"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv in each layer"),
        ({"tokenizer.ggml.model": "t5"}, "'t5' tokenizer"),
        ({"tokenizer.ggml.pre": "martian"}, "'martian'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(metadata: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=words) as refused:
        loaded(TinyModel(metadata=metadata), tmp_path)
    assert "\n" not in str(refused.value)


def test_a_kind_without_a_reader_is_refused_by_name(tmp_path: Path) -> None:
    path = TinyModel().write(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16
    data[at : at + 4] = int(Kind.IQ4_NL).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=r"holds IQ4_NL \(1 tensors\).*such as Q4_K_M"):
        load(resolve(str(path)))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.block_count": LAYERS + 1}, "claims 3 layers and holds 2"),
        ({"llama.block_count": 1 << 31}, "claims 2147483648 layers"),
        ({"llama.embedding_length": 128}, "token_embd.weight should have the shape"),
        ({"llama.attention.head_count": HEADS * 2}, "attn_q.weight should have the shape"),
        ({"llama.attention.head_count": 0}, "0 heads"),
        ({"llama.attention.layer_norm_rms_epsilon": "small"}, "not a number"),
        ({"llama.rope.freq_base": float("nan")}, "not a number"),
    ],
)
def test_metadata_at_odds_with_the_tensors_is_one_line(metadata: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=words) as refused:
        loaded(TinyModel(metadata=metadata), tmp_path)
    assert "\n" not in str(refused.value)


def test_sampling_defaults_and_context_come_from_the_file(tmp_path: Path) -> None:
    model = loaded(TinyModel(metadata={"general.sampling.temp": 0.5, "general.sampling.top_k": 40}), tmp_path)
    assert model.defaults == {"temperature": 0.5, "top_k": 40}
    assert model.context_len == 512 and model.name == "tiny"
