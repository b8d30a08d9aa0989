"""`mlxpaged pull`, `list`, `show`, `rm` and `cp`: models come, are checked, described, named and go."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpaged.model.smollm2 import smollm2_path
from mlxpaged.model.sources import ModelSource
from tests.cli.conftest import Ended, Program
from tests.cli.hub import Hub, running

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "quantization": {"bits": 4, "group_size": 64},
}
TOKENIZER = {"chat_template": "{{ messages }}"}
WEIGHTS = random.Random(1).randbytes(300_000)


def repository() -> dict[str, bytes]:
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer_config.json": json.dumps(TOKENIZER).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": WEIGHTS,
        "picture.png": b"not wanted",
    }


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub("org/tiny", repository())) as hub:
        yield hub


@pytest.fixture
def online(process: Program, hub: Hub, tmp_path: Path) -> Program:
    """The program with that hub and a cache of its own."""

    def run(*args: str, **variables: str) -> Ended:
        ours = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        return process(*args, real=True, **(ours | variables))

    return run


def test_a_model_is_pulled_checked_listed_shown_named_and_removed(online: Program, hub: Hub, tmp_path: Path) -> None:
    pulled = online("pull", "org/tiny")
    assert (pulled.code, pulled.out) == (0, "")
    assert pulled.err == "mlxpaged: org/tiny is on this disk (0 MB, 1 files checked)\n"
    assert "picture.png" not in {name for name, _ in hub.served}
    (listed,) = json.loads(online("list", "--json").out)
    assert (listed["name"], listed["source"], listed["ours"]) == ("org/tiny", "mlxpaged", True)
    assert listed["num_bytes"] == 300_000
    shown = json.loads(online("show", "org/tiny", "--json").out)
    assert (shown["family"], shown["quantisation"], shown["context_len"]) == ("qwen3", "4 bits, groups of 64", 4096)
    assert (shown["kv_bytes_per_token"], shown["template_bytes"]) == (None, 14)  # these weights cannot be loaded
    assert online("cp", "org/tiny", "mini").code == 0
    shown_again = online("show", "mini").out
    assert "qwen3" in shown_again
    assert "0 MB of weights on disk; " in shown_again
    assert "`mlxpaged load org/tiny --estimate` says what it takes on this machine" in shown_again
    assert online("list").out.splitlines()[1].split() == ["org/tiny", "0", "MB", "mlxpaged", "mini"]
    assert online("rm", "mini").err == "mlxpaged: the alias mini is gone; the model stays\n"
    assert online("rm", "org/tiny").code == 0
    assert json.loads(online("list", "--json").out) == []
    assert not any((tmp_path / "hf").rglob("model.safetensors"))


def test_a_loose_file_with_an_alias_is_listed_under_it(program: Program, tmp_path: Path) -> None:
    blob, file = tmp_path / "0123abcd", tmp_path / "own.gguf"
    blob.write_bytes(b"GGUF")
    file.symlink_to(blob)  # as the hub's cache has it
    assert program("cp", "own.gguf", "mine").code == 0
    (listed,) = json.loads(program("list", "--json").out)
    assert (listed["name"], listed["source"], listed["aliases"]) == (str(file), "alias", ["mine"])
    assert program("list").out.splitlines()[1].split() == ["~/own.gguf", "0", "MB", "alias", "mine"]
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "same.gguf").symlink_to(blob)
    (listed,) = json.loads(program("list", "--json").out)
    assert (listed["source"], listed["aliases"]) == ("folder", ["mine"])


def test_a_pull_that_broke_off_goes_on_where_it_stopped(online: Program, hub: Hub, tmp_path: Path) -> None:
    weights = WEIGHTS * 80  # it is kept in pieces of ten megabytes
    hub.files["model.safetensors"], hub.cut["model.safetensors"] = weights, 15_000_000
    first = online("pull", "org/tiny")
    resumed = [start for name, start in hub.served if name == "model.safetensors"]
    if first.code:
        assert first.code == 4 and first.err.endswith("what was fetched is kept, try again to resume\n")
        assert online("pull", "org/tiny").code == 0
        resumed = [start for name, start in hub.served if name == "model.safetensors"]
    assert resumed == [0, 10 * 2**20]
    (file,) = (tmp_path / "hf").rglob("model.safetensors")
    assert file.read_bytes() == weights


def test_damaged_weights_are_removed_and_said(online: Program, hub: Hub, tmp_path: Path) -> None:
    hub.wrong.add("model.safetensors")
    ended = online("pull", "org/tiny")
    assert (ended.code, ended.err) == (
        3,
        "mlxpaged: org/tiny: model.safetensors arrived damaged and was removed; pull it again\n",
    )
    hub.wrong.clear()
    assert online("pull", "org/tiny").code == 0


def test_too_little_room_is_said_with_numbers_before_anything_is_fetched(online: Program, hub: Hub) -> None:
    hub.sizes["model.safetensors"] = 10**15
    ended = online("pull", "org/tiny")
    assert ended.code == 2
    assert "org/tiny needs 1000000.0 GB more and 1 GB to spare, but the disk of" in ended.err
    assert "set HF_HOME to another disk" in ended.err
    assert hub.served == []


def test_progress_as_json_lines(online: Program, hub: Hub) -> None:
    *progress, last = [json.loads(line) for line in online("pull", "org/tiny", "--json").out.splitlines()]
    assert progress and all({"label", "done_bytes", "total_bytes"} == set(line) for line in progress)
    assert progress[-1] == {"label": "checking org/tiny", "done_bytes": 300_000, "total_bytes": 300_000}
    assert (last["done"], last["name"], last["files_checked"]) == (True, "org/tiny", 1)
    assert online("pull", "org/tiny", "--quiet") == Ended(0, "", "")


def test_a_name_the_hub_does_not_know_and_no_network(online: Program) -> None:
    missing = online("pull", "org/none")
    assert missing.code == 3 and "no model org/none on the Hugging Face Hub" in missing.err
    offline = online("pull", "org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert offline.code == 4 and "the Hugging Face Hub does not answer" in offline.err


def test_models_of_other_programs_are_listed_with_their_source_and_never_removed(
    online: Program, hub: Hub, tmp_path: Path
) -> None:
    lm_studio = tmp_path / ".lmstudio" / "models" / "org" / "mlx-model"
    loose = tmp_path / "elsewhere"
    for folder in (lm_studio, loose, tmp_path / ".cache" / "llama.cpp"):
        folder.mkdir(parents=True)
    (lm_studio / "config.json").write_text("{}")
    (lm_studio / "model.safetensors").write_bytes(b"x" * 10)
    (loose / "fine.Q4_0.gguf").write_bytes(b"GGUF")
    (loose / "mmproj-fine.gguf").write_bytes(b"GGUF")
    (loose / "big-00002-of-00003.gguf").write_bytes(b"GGUF")
    (tmp_path / ".cache" / "llama.cpp" / "down.gguf").write_bytes(b"GGUF")
    assert online("config", "set", "model_folders", f'["{loose}"]').code == 0
    found = {one["name"]: one["source"] for one in json.loads(online("list", "--json").out)}
    assert found == {
        str(lm_studio): "LM Studio",
        str(tmp_path / ".cache" / "llama.cpp" / "down.gguf"): "llama.cpp",
        str(loose / "fine.Q4_0.gguf"): "folder",
    }
    assert "~/.lmstudio/models/org/mlx-model" in online("list").out
    kept = online("rm", str(loose / "fine.Q4_0.gguf"))
    assert kept.code == 2 and "was not downloaded by mlxpaged" in kept.err
    assert (loose / "fine.Q4_0.gguf").exists()


def test_a_model_that_was_in_the_cache_before_is_not_ours(online: Program, hub: Hub, tmp_path: Path) -> None:
    assert online("pull", "org/tiny").code == 0
    (tmp_path / "data" / "models.json").unlink()
    (listed,) = json.loads(online("list", "--json").out)
    assert (listed["source"], listed["ours"]) == ("hub cache", False)
    assert online("pull", "org/tiny").code == 0
    kept = online("rm", "org/tiny")
    assert kept.code == 2 and "another program put org/tiny into the hub's cache" in kept.err


def test_models_to_begin_with_fit_the_machine(program: Program) -> None:
    listed = json.loads(program("pull", "--json").out)
    assert listed[0]["name"] == "smollm2"
    shown = program("pull")
    fits = [one["name"] for one in listed if one["fits"]]
    assert [line.split()[0] for line in shown.out.splitlines()[1:]] == fits
    assert "`mlxpaged pull NAME` fetches one" in shown.err


@pytest.mark.parametrize(
    ("alias", "words"),
    [
        ("smollm2", "smollm2 is the name of the embedded model; choose another"),
        *((name, "cannot be an alias") for name in ("a/b", "x.gguf", "", "default")),
    ],
)
def test_an_alias_that_means_something_else_is_refused(
    program: Program, tmp_path: Path, alias: str, words: str
) -> None:
    (tmp_path / "own.gguf").write_bytes(b"GGUF")
    ended = program("cp", str(tmp_path / "own.gguf"), alias)
    assert ended.code == 2 and words in ended.err


@pytest.mark.smollm2
def test_the_embedded_model_is_described(program: Program, smollm2_source: ModelSource) -> None:
    cache = str(smollm2_path().parent.parent)
    shown = json.loads(program("show", "smollm2", "--json", MLXPAGED_CACHE=cache).out)
    assert (shown["family"], shown["quantisation"], shown["context_len"], shown["num_layers"]) == (
        "llama",
        "Q4_1",
        8192,
        30,
    )


@pytest.mark.smollm2
def test_show_counts_the_kv_of_the_weights_that_this_machine_loads(
    program: Program, smollm2_source: ModelSource
) -> None:
    cache = str(smollm2_path().parent.parent)

    def told(*command: str) -> str:
        return program(*command, MLXPAGED_CACHE=cache).out

    for dtype, size in ("float32", 4), ("float16", 2):
        shown = json.loads(told("show", "smollm2", "--json", "--dtype", dtype))
        token = 2 * 30 * 3 * 64 * size
        assert (shown["kv_bytes_per_token"], shown["kv_bytes_per_context"]) == (token, token * 8192)
    words = "K/V 46 MB per 1,000 tokens (377 MB for a full context)"
    assert words in told("show", "smollm2", "--dtype", "float32")
    shown = json.loads(told("show", "smollm2", "--json"))
    estimated = json.loads(told("load", "smollm2", "--estimate", "--json"))
    assert shown["kv_bytes_per_token"] == estimated["token_bytes"]
