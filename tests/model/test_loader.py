"""MLX folders load into unmodified mlx-lm models, in the number format that was asked for."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from mlxpaged.errors import ModelNotFound, UnsupportedModel
from mlxpaged.model.blas import HINT, blas_hint, open_system_blas
from mlxpaged.model.loader import Format, LoadedModel, choose_format, load
from mlxpaged.model.memory import free_memory
from mlxpaged.model.sources import resolve
from mlxpaged.model.upstream import import_mlx_lm

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "max_position_embeddings": 640,
    "tie_word_embeddings": False,
    "eos_token_id": 300,
}
PROMPT = mx.array([[5, 9, 77, 130, 8, 200, 31]])


def write_tokenizer(folder: Path, **settings: Any) -> None:
    letters = pre_tokenizers.ByteLevel.alphabet()
    raw = RawTokenizer(BPE(vocab={letter: i for i, letter in enumerate(sorted(letters))}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>", "<|im_end|>", "<|eot_id|>"])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    raw.enable_truncation(8)
    raw.enable_padding(length=8)
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"} | settings))


def write_model(folder: Path, quantised: bool = False, dtype: mx.Dtype = mx.bfloat16) -> Path:
    module = import_mlx_lm("mlx_lm.models.llama")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(CONFIG))
    model.set_dtype(dtype)
    config = dict(CONFIG)
    if quantised:
        nn.quantize(model, group_size=32, bits=4)
        config["quantization"] = {"group_size": 32, "bits": 4, "mode": "affine"}
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def loaded(folder: Path, dtype: Any = "auto") -> LoadedModel:
    return load(resolve(str(folder)), dtype)


def types(model: nn.Module) -> set[mx.Dtype]:
    return {array.dtype for _, array in tree_flatten(model.parameters())}


def test_a_folder_is_read_in_float32_on_the_cpu(tmp_path: Path) -> None:
    model = loaded(write_model(tmp_path / "tiny"))
    assert types(model.model) == {mx.float32}
    assert (model.name, model.context_len, model.notes) == ("tiny", 640, ())
    assert model.weights_bytes == 4 * sum(array.size for _, array in tree_flatten(model.model.parameters()))
    assert type(model.model).__module__ == "mlx_lm.models.llama"


@pytest.mark.parametrize(("dtype", "wanted"), [("keep", mx.bfloat16), ("float16", mx.float16), ("float32", mx.float32)])
def test_dtype_decides(dtype: str, wanted: mx.Dtype, tmp_path: Path) -> None:
    assert types(loaded(write_model(tmp_path / "tiny"), dtype).model) == {wanted}


def test_a_quantised_folder_becomes_dense_without_rounding_or_stays_packed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", quantised=True)
    dense, kept = loaded(folder, "float32"), loaded(folder, "keep")
    assert types(dense.model) == {mx.float32}
    assert types(kept.model) == {mx.float32, mx.uint32}
    assert kept.weights_bytes < 0.4 * dense.weights_bytes
    np.testing.assert_allclose(np.array(dense.model(PROMPT)), np.array(kept.model(PROMPT)), atol=1e-4)


def test_auto_takes_float32_only_up_to_half_of_the_free_memory() -> None:
    assert choose_format("auto", 1_000_000_000, on_cpu=True, free_bytes=8_000_000_000) == Format(mx.float32)
    tight = choose_format("auto", 1_000_000_001, on_cpu=True, free_bytes=8_000_000_000)
    assert (tight.dense, tight.activations) == (None, mx.float32)
    assert tight.note is not None and "3.73 GiB, more than half of the 7.45 GiB free; --dtype" in tight.note
    assert choose_format("auto", 1, on_cpu=False, free_bytes=1 << 60) == Format(None)
    assert choose_format("float16", 1 << 60, on_cpu=True, free_bytes=0) == Format(mx.float16)
    assert choose_format("keep", 1, on_cpu=True, free_bytes=1 << 60) == Format(None, mx.float32)


def test_end_tokens_come_from_every_file_that_names_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    assert loaded(folder).tokenizer.end_token_ids == {300}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [301, 302]}))
    write_tokenizer(folder, eos_token={"content": "<|im_end|>"}, chat_template="{{ m }}<|eot_id|>")
    assert loaded(folder).tokenizer.end_token_ids == {300, 301, 302, 257, 258}


def test_the_template_file_wins_over_the_settings(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    write_tokenizer(folder, chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}])
    assert loaded(folder).tokenizer.chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert loaded(folder).tokenizer.chat_template == "J"


def test_training_time_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    tokenizer = loaded(write_model(tmp_path / "tiny")).tokenizer
    assert len(tokenizer.encode("a")) == 1 and len(tokenizer.encode("a" * 50)) == 50
    assert tokenizer.add_bos and tokenizer.encode("a", add_special=True) == [256, *tokenizer.encode("a")]
    assert tokenizer.special_tokens == {"bos_token": "<s>"}


def test_the_makers_sampling_defaults_are_taken_where_they_make_sense(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    defaults = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": -1,
        "repetition_penalty": "high",
        "do_sample": True,
    }
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    assert loaded(folder).defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}


def test_a_model_mlx_lm_does_not_know_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "martian"}))
    with pytest.raises(UnsupportedModel, match="no model of type 'martian'"):
        loaded(folder)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", b"{not json", "cannot read .*config.json"),
        ("config.json", b"[]", "no JSON object"),
        ("tokenizer.json", b"{}", "cannot read .*tokenizer.json"),
        ("tokenizer_config.json", b"\xff", "cannot read .*tokenizer_config.json"),
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}", "tiny"),
        ("model.safetensors", None, "not a whole model"),
    ],
)
def test_damaged_files_are_one_line(file: str, content: bytes | None, words: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises((ModelNotFound, UnsupportedModel), match=words) as error:
        loaded(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.95])
def test_weights_cut_short_are_one_line(part: float, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: int(weights.stat().st_size * part)])
    with pytest.raises((ModelNotFound, UnsupportedModel), match="tiny") as error:
        loaded(folder)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"has no tokenizer\.json, and transformers cannot build one"):
        loaded(folder)


def test_importing_mlx_lm_is_silent_and_leaves_the_limit_of_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = "import resource; from mlxpaged.model.upstream import import_mlx_lm; import_mlx_lm(); "
    code += "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == (str(before), "")


def test_free_memory_is_within_the_machine() -> None:
    assert 0 < free_memory() < 1 << 50


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_blas_can_be_refused_and_its_absence_is_hinted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPAGED_BLAS", "off")
    assert open_system_blas() is None and blas_hint(None) is None
    monkeypatch.delenv("MLXPAGED_BLAS")
    monkeypatch.setattr("mlxpaged.model.blas._NAMES", ("libnosuchblas.so.0",))
    assert open_system_blas() is None and blas_hint(None) == HINT
    assert blas_hint("libopenblas.so.0") is None
    assert "\n" not in HINT and os.environ.get("MLXPAGED_BLAS") is None


@pytest.mark.smollm2
def test_smollm2_knows_the_capital_of_france(smollm2: LoadedModel) -> None:
    """Greedy, float32, by a plain loop over mlx-lm's own cache."""
    cache = import_mlx_lm("mlx_lm.models.cache").make_prompt_cache(smollm2.model)
    tokenizer = smollm2.tokenizer
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids, detokenizer, text = mx.array([tokenizer.encode(prompt)]), tokenizer.detokenizer(), ""
    for _ in range(16):
        token = int(mx.argmax(smollm2.model(ids, cache=cache)[0, -1]).item())
        if token in tokenizer.end_token_ids:
            break
        text, ids = text + detokenizer.add(token), mx.array([[token]])
    assert text + detokenizer.finish() == "The capital of France is Paris."
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smollm2.context_len == 8192
