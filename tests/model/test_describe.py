"""What a model's files say of how its weights are stored, and that a loaded model says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from mlxpaged.model.describe import describe, folder_quantisation, gguf_quantisation
from mlxpaged.model.gguf_file import GgufFile
from mlxpaged.model.loader import load
from mlxpaged.model.sources import ModelSource
from tests.model.tiny_gguf import TinyModel


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "4 bits, groups of 64"),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, "4 bits (mxfp4), groups of 32"),
        ({"quantization_config": {"bits": 8}}, "8 bits"),
        ({"quantization_config": {"quant_method": "fp8"}, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({"quantization": [4]}, None),
        ({}, None),
    ],
)
def test_a_folders_config_says_how_weights_are_stored(config: dict[str, Any], words: str | None) -> None:
    assert folder_quantisation(config) == words


@pytest.mark.parametrize(
    ("name", "words"), [("tiny.Q4_K_M.gguf", "Q4_K_M"), ("tiny-bf16.gguf", "BF16"), ("tiny.gguf", "Q8_0")]
)
def test_a_gguf_says_it_in_its_name_or_by_most_of_its_bytes(tmp_path: Path, name: str, words: str) -> None:
    path = TinyModel(kind=Kind.Q8_0).write(tmp_path / name)
    assert gguf_quantisation(GgufFile(path)) == words


def test_a_loaded_model_says_what_its_files_say(tmp_path: Path) -> None:
    source = ModelSource("tiny", TinyModel(kind=Kind.Q8_0).write(tmp_path / "tiny.gguf"), "gguf")
    assert load(source, "float32").quantisation == describe(source).quantisation == "Q8_0"
