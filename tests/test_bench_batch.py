"""The bench script: its figures from made-up arrival times, and the whole program on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from bench_figures import (
    Load,
    Run,
    SlotUse,
    agreement,
    decode_rate,
    figures,
    medians,
    occupancy,
    own_ratio,
    paired_ratios,
)

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
RATIO_KEYS = {
    "out_tok_s_ratio",
    "decode_tok_s_ratio",
    "prefill_tok_s_ratio",
    "ttft_p50_ratio",
    "itl_p95_ratio",
    "peak_memory_ratio",
}


def bench(*flags: str, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench_batch.py"), "--model", "tiny", *flags]
    environment = {"MLXPAGED_CACHE": str(cache), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=cache)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    flags = ("--json", "--batch", "3", "--prompt", "3-40", "--new", "6", "--repeats", "2", "--shared-prefix", "33")
    classic = ("--against", "static,sequential", "--each", "2", "--scale", "0.04")
    done = bench(*flags, *classic, cache=tmp_path_factory.mktemp("bench"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, "one JSON line and nothing else"
    return json.loads(done.stdout)


def test_the_report_has_every_ratio_and_what_was_run(report: dict[str, Any]) -> None:
    assert report.keys() >= RATIO_KEYS
    assert all(report[key] > 0 for key in RATIO_KEYS)
    assert report["ratio_ranges"].keys() == RATIO_KEYS
    ours, theirs = report["ours"]["decode_tok_s"], report["theirs"]["own_gen_tok_s"]
    assert report["decode_own_ratio"] == pytest.approx(ours / theirs, rel=0.5)
    assert (report["model"], report["bits"], report["batch"], report["new_tokens"]) == ("tiny", 32, 3, 6)
    assert 33 + 3 <= report["prompt_tokens"]["least"] <= report["prompt_tokens"]["most"] <= 33 + 40
    for engine in ("ours", "theirs"):
        assert report[engine]["wall_s"] > 0 and report[engine]["above_weights_bytes"] > 0


def test_both_engines_reply_with_the_same_greedy_tokens(report: dict[str, Any]) -> None:
    assert report["greedy_agreement"] == {"replies": 3, "equal_replies": 3, "equal_token_share": 1.0}


def test_a_shared_prefix_is_found_within_a_run_but_nothing_of_the_run_before(report: dict[str, Any]) -> None:
    # The first of three prompts computes the prefix, two find at least its whole blocks; a leftover of the run before
    # would let all three find everything.
    assert 2 * 32 <= report["ours"]["cached_tokens"] <= 2 * 34


def test_slots_allocated_and_used_are_counted_on_both_sides(report: dict[str, Any]) -> None:
    ours, theirs = report["ours"], report["theirs"]
    assert 0 < ours["kv_slots_allocated"] <= report["pool_slots"]
    assert ours["kv_slots_allocated"] % 16 == 0
    assert theirs["kv_slots_allocated"] == 3 * 256, "three rows of a dense cache that grows by 256 tokens"
    assert theirs["kv_slots_used"] < 3 * (33 + 40 + 6)


def test_the_classic_load_is_served_four_ways(report: dict[str, Any]) -> None:
    classic = report["classic"]
    assert classic["requests"] == 6 and classic["new_tokens"] == 2 * (8 + 2 + 20)
    assert classic["sequential"]["occupancy"] == pytest.approx(1 / 3, abs=1e-4)
    assert classic["static"]["occupancy"] < classic["ours"]["occupancy"] <= 1
    assert 0 < classic["batch_generator"]["occupancy"] <= 1
    assert classic["ours"]["ours_ratio"] == 1


def test_a_sampled_run_in_four_bits_prints_a_table(tmp_path: Path) -> None:
    flags = ("--bits", "4", "--batch", "2", "--new", "3", "--repeats", "1", "--temperature", "0.7", "--top-p", "0.9")
    done = bench(*flags, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tiny, 4 bits" in done.stdout and "temperature 0.7" in done.stdout
    assert all(f"\n{name} " in done.stdout for name in ("out_tok_s", "ttft_p50_s", "peak_memory_gb", "kv_used_share"))
    assert "\nits own decode rate " in done.stdout
    assert "greedy" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--prompt", "9-3"), "give one such as 512, or a range such as 64-2048"),
        (("--against", "statik"), "'statik' is unknown; give static or sequential"),
        (("--new", "1"), "1 is too small; 2 or more"),
        (("--prompt", "140000"), "the context of tiny holds 131072"),
        (("--temperature", "-1"), "temperature is -1.0; it must be from 0"),
    ],
)
def test_a_bad_flag_ends_with_two_and_a_line_that_says_what_works(
    flags: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = bench(*flags, cache=tmp_path)
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1]
    assert done.stdout == ""


def test_decode_is_the_rate_while_no_prompt_is_left_and_no_reply_has_ended() -> None:
    # Both run from 2 s to 4 s: three tokens at 3, 3.5 and 4 of the one, two at 3 and 4 of the other.
    early, late = [1.0, 2.0, 3.0, 3.5, 4.0], [2.0, 3.0, 4.0, 9.0]
    assert decode_rate([early, late]) == (2.5, 2)
    assert decode_rate([[1.0, 2.0, 3.0]]) == (1.0, 1)
    one_after_another = [[1.0, 2.0], [2.0, 3.0]]
    assert decode_rate(one_after_another) == (1.0, 1)


def test_figures_of_a_run_follow_from_its_arrivals() -> None:
    run = Run(
        Load([[1] * 30, [1] * 70], [3, 2]), 2, [[1.0, 1.5, 2.0], [2.0, 3.0]], [[5, 6, 7], [8, 9]], steps=4, wall_s=4
    )
    found = figures(run)
    assert found["out_tok_s"] == 5 / 4
    assert found["prefill_tok_s"] == 100 / 2, "all prompts are done when the last first token comes"
    assert (found["ttft_p50_s"], found["ttft_max_s"]) == (1.5, 2.0)
    assert (found["itl_p50_s"], found["itl_p95_s"]) == (0.5, 1.0)
    assert occupancy(run) == 5 / 8


def test_ratios_pair_the_runs_that_stood_beside_each_other() -> None:
    figure = {"decode_tok_s": 1, "prefill_tok_s": 1, "ttft_p50_s": 1, "itl_p95_s": 1, "peak_memory_bytes": 1}
    ours = [{**figure, "out_tok_s": rate} for rate in (20, 2, 30)]
    theirs = [{**figure, "out_tok_s": rate} for rate in (10, 1, 10)]  # the machine was ten times slower in the second
    found = paired_ratios(ours, theirs)
    assert found["out_tok_s_ratio"] == 2 and found["ratio_ranges"]["out_tok_s_ratio"] == [2, 3]
    assert medians(ours)["out_tok_s"] == 20


def test_their_own_decode_rate_is_paired_alike() -> None:
    ours = [{"decode_tok_s": rate} for rate in (20, 2, 30)]
    assert own_ratio(ours, [{"own_gen_tok_s": rate} for rate in (10, 1, 10)]) == 2


def test_slot_use_keeps_the_peak_and_the_share_over_all_steps() -> None:
    use = SlotUse()
    for allocated, used in ((32, 20), (64, 40), (16, 4)):
        use.note(allocated, used)
    assert use.figures() == {"kv_slots_allocated": 64, "kv_slots_used": 40, "kv_used_share": 0.5714}


def test_agreement_counts_up_to_each_reply_s_first_difference() -> None:
    found = agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 0, 7, 8]])
    assert found == {"replies": 2, "equal_replies": 1, "equal_token_share": 0.625}
