"""Which models a Mac is offered when `chat` names none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxpaged.cli.pick import Offer, chosen, models_on_disk, offers_for
from mlxpaged.errors import ConfigError

GB = 10**9


def cached(hub: Path, name: str, weights: int, template: bool = True) -> None:
    """A model in the layout of the hub's cache, its weights a sparse file."""
    snapshot = hub / f"models--{name.replace('/', '--')}" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (snapshot / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"} if template else {}))
    with (snapshot / "model.safetensors").open("wb") as file:
        file.truncate(weights)


def test_chat_models_that_fit_are_found_largest_first(tmp_path: Path) -> None:
    cached(tmp_path, "org/small", 1000)
    cached(tmp_path, "org/large-4bit", 6000)
    cached(tmp_path, "org/too-large", 8000)
    cached(tmp_path, "org/no-template", 500, template=False)
    (tmp_path / "models--org--half" / "snapshots" / "abc").mkdir(parents=True)
    (tmp_path / "datasets--org--data").mkdir()
    assert models_on_disk(memory=10_000, hub=tmp_path) == {"org/large-4bit": 6000, "org/small": 1000}


def test_no_cache_is_no_models(tmp_path: Path) -> None:
    assert models_on_disk(10_000, tmp_path / "absent") == {}


@pytest.mark.parametrize(("memory", "words"), [(8, "3B"), (16, "4B"), (36, "30B"), (128, "30B")])
def test_one_pick_by_memory_follows_what_is_on_disk(memory: int, words: str) -> None:
    offers = offers_for({"org/mine": 2 * GB}, memory * 2**30, online=True)
    assert offers[0] == Offer("org/mine", "2.0 GB, on disk")
    assert len(offers) == 2 and words in offers[1].name


def test_the_pick_is_not_offered_twice() -> None:
    name = offers_for({}, 16 * 2**30, online=True)[0].name
    assert [offer.name for offer in offers_for({name: 2 * GB}, 16 * 2**30, online=True)] == [name]


def test_smollm2_is_offered_only_offline() -> None:
    assert [offer.name for offer in offers_for({}, 16 * 2**30, online=False)] == ["smollm2"]
    assert "smollm2" not in [offer.name for offer in offers_for({}, 16 * 2**30, online=True)]


def test_an_answer_is_a_number_a_name_or_nothing() -> None:
    offers = [Offer("a/a", "x"), Offer("b/b", "y")]
    assert chosen(offers, lambda _: "\n") == "a/a"
    assert chosen(offers, lambda _: "2\n") == "b/b"
    assert chosen(offers, lambda _: "c/c\n") == "c/c"
    with pytest.raises(ConfigError, match="answer 1 to 2"):
        chosen(offers, lambda _: "3\n")
