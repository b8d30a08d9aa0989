"""The soak and the agents' bench: what they call wrong, and that both drive a real server over a scripted engine."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_agents  # noqa: E402
import soak  # noqa: E402
from served import Told, quantile, served  # noqa: E402

from tests.cli.conftest import SCRIPTED  # noqa: E402

GREEDY = soak.Case("greedy", ({"role": "user", "content": "hi"},), {"temperature": 0})
SAMPLED = soak.Case("sampled", ({"role": "user", "content": "hi"},), {"temperature": 0.8, "seed": 1})


@pytest.mark.parametrize(
    ("case", "said", "gaps", "wrong", "near_ties"),
    [
        (GREEDY, Told("one two"), [3.0, 3.0], 0, 0),
        (GREEDY, Told("one", outcome="left"), [3.0, 3.0], 0, 0),
        (GREEDY, Told("one", outcome="whole"), [3.0, 3.0], 1, 0),  # too short
        (GREEDY, Told("one too"), [3.0, 3.0], 1, 0),
        (GREEDY, Told("one too"), [3.0, 0.001], 0, 1),
        (GREEDY, Told("own", outcome="left"), [3.0, 3.0], 1, 0),
        (SAMPLED, Told("one too"), [0.001], 1, 0),  # its noise decides, not the gap
    ],
)
def test_a_reply_is_judged_by_what_it_is_alone(
    case: Any, said: Told, gaps: list[float], wrong: int, near_ties: int
) -> None:
    seen = soak.Findings()
    soak.judge(case, said, Told("one two", gaps_to_second=gaps), seen)
    assert (len(seen.wrong), seen.near_ties) == (wrong, near_ties)


def test_the_slope_is_taken_after_the_warm_up() -> None:
    warming = [(minute, 100.0 * minute, 4, 9) for minute in range(10)]
    level = [(10.0 + minute, 1000.0 + 2.5 * minute, 6, 9) for minute in range(20)]
    assert soak.slope(warming + level) == pytest.approx(2.5)
    assert soak.warm(warming + level)[2] == 6


CLEAN = {
    "outcomes": {"whole": 90, "left": 10},
    "wrong": [],
    "unsure_alone": [],
    "still_live": 0,
    "blocks_left_used": 0,
    "threads": [8, 8],
    "descriptors": [10, 9],
    "survived": True,
    "minutes": 30,
    "memory_slope_mb_a_minute": 0.2,
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"wrong": [{}]}, ["1 wrong answers"]),
        ({"outcomes": {"whole": 1, "stuck": 2, "503": 3}}, ["2 stuck requests", "3 refused requests"]),
        ({"blocks_left_used": 4}, ["4 blocks held at the end"]),
        ({"threads": [8, 9]}, []),
        ({"threads": [8, 11], "survived": False}, ["3 threads more than after the warm-up", "1 crashes"]),
        ({"memory_slope_mb_a_minute": 1.5}, ["memory grows by 1.5 MB a minute"]),
        ({"memory_slope_mb_a_minute": 9.0, "minutes": 1}, []),
    ],
)
def test_findings_are_named_with_numbers(changed: dict[str, Any], said: list[str]) -> None:
    assert soak.findings(CLEAN | changed) == said


def test_cases_are_the_same_for_the_same_seed_and_of_every_kind() -> None:
    made = soak.cases(50, seed=3)
    assert made == soak.cases(50, seed=3) != soak.cases(50, seed=4)
    assert {case.name.split()[0] for case in made} == {"short", "turns", "long"}
    assert {case.asked["temperature"] for case in made} == {0, 0.8}


def test_a_prefill_is_cold_when_less_than_half_of_it_was_found() -> None:
    told = [
        Told("a", ttft_s=2.0, prompt_tokens=1000, cached_tokens=0, completion_tokens=5),
        Told("b", ttft_s=1.0, gaps_s=[0.1, 0.3], prompt_tokens=1000, cached_tokens=900, completion_tokens=5),
        Told("", outcome="broken"),
    ]
    found = bench_agents.figures(told, wall_s=2.0)
    assert (found["cold_prefills"], found["failed"], found["cached_share"]) == (1, 1, 0.45)
    assert (found["ttft_p50_s"], found["ttft_p95_s"], found["itl_p95_s"], found["out_tok_s"]) == (2.0, 2.0, 0.3, 5.0)


def test_quantiles_are_values_that_were_seen() -> None:
    assert [quantile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.95)] == [1.0, 3.0, 4.0]
    assert quantile([], 0.5) is None


def test_both_scripts_drive_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STATE", "CACHE", "DATA", "CONFIG"):
        monkeypatch.setenv(f"MLXPAGED_{name}", str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS.parent))
    args = argparse.Namespace(seed=0, system_tokens=20, turns=3, result_tokens=5, new_tokens=8, pause=0.0, branch=0.5)

    async def drive() -> tuple[list[Told], Told, Told, dict[str, Any]]:
        async with served("scripted", "--ctx", "100000", program=SCRIPTED) as server:
            told: list[Told] = []
            await asyncio.gather(*(bench_agents.agent(server, number, args, told) for number in range(3)))
            left = await server.chat([{"role": "user", "content": "stall"}], leave_after=1)
            refused = await server.chat([{"role": "user", "content": "hi"}], temperature=-1)
            return told, left, refused, await server.idle()

    told, left, refused, at_end = asyncio.run(drive())
    assert len(told) == 9 and {one.outcome for one in told} == {"whole"}
    assert all(one.text.startswith("You said: ") and one.ttft_s is not None for one in told)
    assert (left.outcome, left.text, refused.outcome) == ("left", "Once upon ", "400")
    assert at_end["num_running"] == 0
