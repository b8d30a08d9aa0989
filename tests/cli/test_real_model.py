"""The commands over the embedded model: the product's first promise, kept end to end."""

from __future__ import annotations

import json

import pytest

from mlxpaged.model.sources import ModelSource
from mlxpaged.paths import cache_dir
from tests.cli.conftest import Program

pytestmark = pytest.mark.smollm2


@pytest.fixture
def cache(smollm2_source: ModelSource) -> dict[str, str]:
    """The variable that lets a test see the fetched model."""
    return {"MLXPAGED_CACHE": str(cache_dir())}


def test_run_knows_the_capital_of_france(process: Program, cache: dict[str, str]) -> None:
    ended = process("run", "smollm2", "What is the capital of France?", "--temperature", "0", real=True, **cache)
    assert (ended.code, ended.out) == (0, "The capital of France is Paris.\n"), ended.err


def test_chat_answers_every_line_and_finds_the_first_turn_again(program: Program, cache: dict[str, str]) -> None:
    lines = "What is the capital of France?\nAnd of Italy?\n"
    ended = program("chat", "smollm2", "--temperature", "0", stdin=lines, real=True, **cache)
    stopped = program("stop", real=True)
    assert ended.code == 0
    assert ended.err.startswith("mlxpaged: Started a server in the background at http://127.0.0.1:")
    assert "Paris" in ended.out.splitlines()[0] and "Rome" in ended.out
    assert stopped.code == 0 and stopped.err.startswith("mlxpaged: stopped the server at http://127.0.0.1:")


def test_bench_engine_prints_one_line(program: Program, cache: dict[str, str]) -> None:
    flags = ("--batch", "2", "--prompt-tokens", "32", "--max-tokens", "8", "--repeats", "1")
    figures = json.loads(program("bench", "engine", "smollm2", *flags, real=True, **cache).out)
    assert (figures["model"], figures["completion_tokens"], figures["served_by"]) == ("smollm2", 16, "paged")
    assert figures["tokens_per_s"] > 0
