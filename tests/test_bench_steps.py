"""scripts/bench_host.py and scripts/bench_latency.py on the tiny model: that they run and their figures add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def report(script: str, *flags: str) -> dict:
    ran = subprocess.run(
        [sys.executable, str(SCRIPTS / script), "--json", *flags],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = ran.stdout.splitlines()
    assert len(lines) == 1, ran.stderr
    return json.loads(lines[0])


def test_the_stages_of_a_step_are_parts_of_it() -> None:
    found = report("bench_host.py", "--batch", "1,3", "--steps", "8", "--context", "4-40")
    assert [row["rows"] for row in found["batches"]] == [1, 3]
    for row in found["batches"]:
        stages = [row[name] for name in ("schedule", "gather", "graph", "dispatch", "wait", "commit", "deliver")]
        assert all(stage >= 0 for stage in stages) and 0 < sum(stages) <= row["step"] + 0.01
        assert row["floor"]["forward"] > 0 and row["floor"]["attention"] is None  # no kernels on a CPU


def test_replies_go_on_beside_a_long_prompt_and_a_shared_beginning_is_found() -> None:
    found = report("bench_latency.py", "--prompt", "600", "--shared", "100", "--repeats", "1", "--replies", "2")
    # 600 tokens at 64 a step, some of them the replies': both replies get a token in each.
    assert found["stall"]["tokens_beside"] >= 2 * 9
    assert found["prefix"]["found"] == 100
    assert found["prefix"]["warm_ttft_ms"] > 0


def test_a_wrong_number_is_refused() -> None:
    for script in ("bench_host.py", "bench_latency.py"):
        ran = subprocess.run(
            [sys.executable, str(SCRIPTS / script), "--model", "none"], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 2 and "--model" in ran.stderr
