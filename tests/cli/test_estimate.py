"""`mlxpaged load MODEL --estimate`: the plan in words and as JSON, and its exit code."""

from __future__ import annotations

import json

import pytest

from mlxpaged.model import estimate as module
from mlxpaged.model.memplan import Machine
from tests.cli.conftest import Program

pytestmark = pytest.mark.smollm2


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, smollm2_source: object) -> None:
    monkeypatch.setattr(module, "machine", lambda: Machine(total=16 * 2**30, free=8 * 2**30))
    monkeypatch.setattr("mlxpaged.model.sources.resolve", lambda name, *_, **__: smollm2_source)


def test_it_says_what_a_model_takes_and_loads_nothing(program: Program) -> None:
    done = program("load", "smollm2", "--estimate", "--dtype", "float32")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[:3] == [
        "model        smollm2, served paged",
        "limit        7.00 GiB, by the free memory",
        "weights      0.50 GiB",
    ]
    assert done.out.splitlines()[4].startswith("K/V          45.0 KiB a token, room for 6.")
    assert done.out.splitlines()[5] == (
        "pool         2,048 blocks of 16 tokens at most (1.41 GiB), 256 to begin with; "
        "that is 4 full contexts, a CPU's limit unless --memory-budget is given"
    )
    assert "context      8,192 tokens of 8,192" in done.out and done.out.endswith("it fits\n")


def test_a_context_above_the_models_own_is_told(program: Program) -> None:
    done = program("load", "smollm2", "--estimate", "--dtype", "float32", "--ctx", "20000")
    told = "mlxpaged: --ctx 20000 is more than smollm2 was made for; its context is 8,192 tokens\n"
    assert (done.code, done.err) == (0, told) and "8,192 tokens of 8,192" in done.out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory-budget", "1GB"], "; there is no room for more"),
        (["--max-num-seqs", "2"], "1,024 blocks of 16 tokens at most (0.70 GiB), 256 to begin with; that is 2 full"),
        (["--max-num-seqs", "1"], "; that is 1 full context, --max-num-seqs 1"),
        (["--memory-budget", "7GB", "--max-num-seqs", "8"], "; that is 8 full contexts, --max-num-seqs 8"),
    ],
)
def test_it_says_what_bounds_the_pool(program: Program, flags: list[str], words: str) -> None:
    assert words in program("load", "smollm2", "--estimate", "--dtype", "float32", *flags).out


def test_json_has_every_number(program: Program) -> None:
    done = program("load", "smollm2", "--estimate", "--json", "--dtype", "float32", "--memory-budget", "1GB")
    plan = json.loads(done.out)
    assert (plan["fits"], plan["served_by"], plan["refusal"]) == (True, "paged", None)
    assert (plan["limit_bytes"], plan["limited_by"]) == (2**30, "--memory-budget")
    assert plan["token_bytes"] == 30 * 2 * 3 * 64 * 4 and plan["weights_bytes"] == 538_060_032
    spent = plan["weights_bytes"] + plan["chunk_bytes"] + plan["cache_bytes"] + plan["kv_bytes"]
    assert spent == plan["limit_bytes"]
    assert plan["most_bytes"] == plan["most_blocks"][0] * 16 * plan["token_bytes"] <= plan["kv_bytes"]
    assert plan["most_contexts"] is None
    done = program("load", "smollm2", "--estimate", "--json", "--dtype", "float32")
    assert json.loads(done.out)["most_contexts"] == 4


def test_a_model_that_would_not_fit_is_exit_1_with_the_way_out(program: Program) -> None:
    done = program("load", "smollm2", "--estimate", "--dtype", "float32", "--memory-budget", "512MB")
    assert done.code == 1 and "raise --memory-budget to " in done.out.splitlines()[-1]
    assert "weights      0.50 GiB" in done.out and "its weights take 0.50 GiB" in done.out.splitlines()[-1]
    named = done.out.split("raise --memory-budget to ")[1].split()[0]
    assert program("load", "smollm2", "--estimate", "--dtype", "float32", "--memory-budget", named).code == 0


def test_a_tiny_budget_is_told_as_it_was_given(program: Program) -> None:
    done = program("load", "smollm2", "--estimate", "--dtype", "float32", "--memory-budget", "1")
    assert done.code == 1 and "--memory-budget allows 1 byte, so" in done.out
    done = program("load", "smollm2", "--estimate", "--dtype", "float32", "--memory-budget", "100MB")
    assert "limit        100.0 MiB, by --memory-budget" in done.out and "allows 100.0 MiB, so" in done.out


def test_json_alone_is_a_wrong_flag(program: Program) -> None:
    done = program("load", "smollm2", "--json")
    assert (done.code, done.err) == (2, "mlxpaged: --json goes with --estimate; add --estimate, or leave it out\n")
