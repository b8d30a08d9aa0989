"""`mlxpaged bench engine`: one JSON line whose figures follow from the token arrivals."""

from __future__ import annotations

import json

import pytest

from mlxpaged.cli.bench import percentile
from tests.cli.conftest import Program


def test_one_json_line_with_rates_and_latencies(program: Program) -> None:
    ended = program("bench", "engine", "scripted", "--batch", "3", "--prompt-tokens", "20", "--repeats", "1")
    assert ended.code == 0 and ended.out.count("\n") == 1
    figures = json.loads(ended.out)
    assert (figures["model"], figures["batch"], figures["prompt_tokens"]) == ("scripted", 3, 20)
    assert figures["tokens_per_s"] == pytest.approx(figures["completion_tokens"] / figures["wall_s"], rel=0.3)
    assert 0 <= figures["ttft_p50_s"] <= figures["ttft_p95_s"] <= figures["wall_s"] + 0.001
    assert 0 <= figures["itl_p50_s"] <= figures["itl_p95_s"]


def test_what_is_measured_and_each_run_is_a_line_on_stderr(program: Program) -> None:
    ended = program("bench", "engine", "scripted", "--batch", "3", "--prompt-tokens", "20", "--repeats", "2")
    told = ended.err.splitlines()
    assert told[0].startswith("mlxpaged: scripted: a warm-up and 2 more; each run answers 3 prompts of 20 tokens")
    assert [line.split(":")[1] for line in told[1:]] == [" warm-up", " run 1 of 2", " run 2 of 2"]
    assert all(line.endswith(" tokens/s") for line in told[1:])


def test_a_batch_over_the_context_is_refused_with_the_flag(program: Program) -> None:
    ended = program("bench", "engine", "scripted", "--prompt-tokens", "500", "--max-tokens", "64")
    assert ended.code == 2
    assert "--prompt-tokens 500" in ended.err and "--ctx" in ended.err


@pytest.mark.parametrize(("share", "value"), [(0.5, 5), (0.95, 10), (0.05, 1), (1.0, 10)])
def test_percentiles(share: float, value: int) -> None:
    assert percentile([float(number) for number in range(10, 0, -1)], share) == value
