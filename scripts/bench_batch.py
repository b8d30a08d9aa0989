#!/usr/bin/env python3
"""mlxpaged against mlx-lm's BatchGenerator in one process: same weights, same prompts, in turns, medians of repeats.

    python scripts/bench_batch.py                                      smollm2, 8 prompts of 16-512 tokens, 64 new each
    python scripts/bench_batch.py --batch 1 --json                     one prompt of 64 tokens; one JSON line
    python scripts/bench_batch.py --model 1b --bits 4 --batch 32 --temperature 0.7 --top-p 0.95
    python scripts/bench_batch.py --against static,sequential          also the classic load, served four ways

Rates, latencies and ratios are defined in bench_figures.py. Ratios are ours / theirs: rates above 1 and latencies and
memory below 1 are in our favour. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_figures import RATIOS, Figures, Load, Run, agreement, figures, medians, occupancy, own_ratio, paired_ratios
from bench_flags import add_model_flags, at_least, length_range, report_of

from mlxpaged.errors import ConfigError

if TYPE_CHECKING:
    from bench_engines import Ours, Theirs

AGAINST = ("static", "sequential")


def main() -> int:
    arguments = parse_arguments()
    report = report_of(bench, arguments)
    print(json.dumps(report) if arguments.json else table(report))
    return 0


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser, "smollm2")
    parser.add_argument("--batch", type=at_least(1), metavar="B", help="prompts at once (default: 8; tiny: 4)")
    parser.add_argument("--prompt", type=length_range, metavar="LO-HI", help="tokens of a prompt, or of each: N")
    parser.add_argument("--new", type=at_least(2), metavar="N", help="tokens of each reply (default: 64; 1b, 8b: 128)")
    parser.add_argument("--shared-prefix", type=at_least(0), default=0, metavar="N", help="ids before every prompt")
    parser.add_argument(
        "--repeats", type=at_least(1), default=3, metavar="N", help="measured runs of each (default: 3)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=at_least(0), default=0, help="of weights, prompts and sampling")
    parser.add_argument("--step-budget", type=at_least(1), metavar="N", help="tokens of one of our steps")
    parser.add_argument("--against", type=_names, default=(), metavar="NAMES", help="static, sequential or both")
    parser.add_argument("--each", type=at_least(1), default=10, metavar="N", help="requests of each classic kind")
    parser.add_argument("--scale", type=_above_zero, default=1.0, metavar="F", help="times the classic lengths")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    return parser.parse_args(given)


def bench(arguments: argparse.Namespace) -> Figures:
    """Build both engines on one set of weights and measure; raises MlxpagedError."""
    from mlxpaged.model.upstream import import_mlx_lm

    import_mlx_lm("mlx_lm.generate")
    import bench_models as models
    from bench_engines import Ours, Sampling, Theirs

    sampling = Sampling(arguments.temperature, arguments.top_p, arguments.seed)
    defaults = models.DEFAULTS[arguments.model]
    width, new = arguments.batch or defaults.batch, arguments.new or defaults.new
    bits = arguments.bits or (16 if models.on_gpu() else 32)
    lengths = defaults.lengths(width, arguments.prompt)
    loaded = models.load_model(arguments.model, bits, arguments.seed)
    if lengths.high + arguments.shared_prefix + new > loaded.context_len:
        raise ConfigError(
            f"--shared-prefix, --prompt and --new make {lengths.high + arguments.shared_prefix + new} tokens; "
            f"the context of {loaded.name} holds {loaded.context_len}"
        )
    vocab_size = loaded.config["vocab_size"]
    load = models.batch_load(lengths, width, new, arguments.shared_prefix, vocab_size, arguments.seed)
    classic = models.classic_load(arguments.each, arguments.scale, vocab_size, arguments.seed)
    stock = models.stock_twin(loaded.model)  # before our engine wraps parts of its own
    ours = Ours(loaded, width, [load, classic] if arguments.against else [load], sampling, arguments.step_budget)
    models.share_weights(stock, loaded.model)
    theirs = Theirs(stock, width, ours, loaded.weights_bytes, sampling)
    report = settings(arguments, load, bits) | {"pool_slots": ours.pool_slots} | compare(ours, theirs, load, arguments)
    if arguments.against:
        report["classic"] = compare_classic(ours, theirs, classic, arguments)
    return report


def settings(arguments: argparse.Namespace, load: Load, bits: int) -> Figures:
    """What was run, on what."""
    from importlib.metadata import version

    counts = [len(prompt) for prompt in load.prompts]
    return {
        "model": arguments.model,
        "bits": bits,
        "device": _backend(),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "batch": len(load.prompts),
        "prompt_tokens": {"total": sum(counts), "least": min(counts), "most": max(counts)},
        "new_tokens": load.new[0],
        "shared_prefix": arguments.shared_prefix,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "seed": arguments.seed,
        "repeats": arguments.repeats,
    }


def _backend() -> str:
    import mlx.core as mx

    if mx.default_device().type != mx.DeviceType.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def compare(ours: Ours, theirs: Theirs, load: Load, arguments: argparse.Namespace) -> Figures:
    """Ratios, both engines' medians and, when greedy, how far their replies agree."""
    runs = take_turns({"ours": ours.serve, "theirs": theirs.serve}, load, arguments.repeats)
    measured = {name: [figures(run) for run in found] for name, found in runs.items()}
    greedy = arguments.temperature == 0
    return {
        **paired_ratios(measured["ours"], measured["theirs"]),
        "decode_own_ratio": own_ratio(measured["ours"], measured["theirs"]),
        "greedy_agreement": agreement(runs["ours"][-1].replies, runs["theirs"][-1].replies) if greedy else None,
        **{name: medians(found) for name, found in measured.items()},
    }


def compare_classic(ours: Ours, theirs: Theirs, load: Load, arguments: argparse.Namespace) -> Figures:
    """Rate and occupancy on the classic load of ours, BatchGenerator and the ways asked for; `ours_ratio` is our rate
    over theirs, the median of pairs."""
    ways: dict[str, Callable[[Load], Run]] = {"ours": ours.serve, "batch_generator": theirs.serve}
    asked = {"static": theirs.serve_static, "sequential": theirs.serve_sequential}
    ways |= {name: asked[name] for name in arguments.against}
    runs = take_turns(ways, load, arguments.repeats)
    rates = {
        name: [{"out_tok_s": run.num_tokens / run.wall_s, "occupancy": occupancy(run)} for run in found]
        for name, found in runs.items()
    }
    report: Figures = {"requests": len(load.prompts), "new_tokens": sum(load.new)}
    for name, found in rates.items():
        pairs = [
            {"ours_ratio": mine["out_tok_s"] / other["out_tok_s"]}
            for mine, other in zip(rates["ours"], found, strict=True)
        ]
        report[name] = {key: round(value, 4) for key, value in (medians(found) | medians(pairs)).items()}
    return report


def take_turns(ways: dict[str, Callable[[Load], Run]], load: Load, repeats: int) -> dict[str, list[Run]]:
    """A warm-up run of each, then `repeats` rounds in which all run beside each other, every other round backwards."""
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            run = ways[name](load)
            label = f"run {turn} of {repeats}" if turn else "warm-up"
            print(f"{label}: {name} {run.num_tokens / run.wall_s:.1f} tok/s", file=sys.stderr, flush=True)
            if turn:
                runs[name].append(run)
    return runs


def table(report: Figures) -> str:
    """The report for a person."""
    ours, theirs, prompts = report["ours"], report["theirs"], report["prompt_tokens"]
    chosen = "greedy" if report["temperature"] == 0 else f"temperature {report['temperature']} top-p {report['top_p']}"
    lengths = f"{prompts['least']}" if prompts["least"] == prompts["most"] else "{least} to {most}".format(**prompts)
    lines = [
        f"{report['model']}, {report['bits']} bits, {report['device']}, mlx {report['mlx']}, mlx-lm {report['mlx_lm']}",
        f"batch {report['batch']}, prompts of {lengths} tokens ({prompts['total']} in all), "
        f"{report['new_tokens']} new each, {chosen}; medians of repeats: {report['repeats']}",
        "",
        f"{'':<20} {'mlxpaged':>10} {'mlx-lm':>10} {'ratio':>7}",
    ]
    scales = {"peak_memory_bytes": (1e-9, "peak_memory_gb")}
    for figure, key in RATIOS.items():
        scale, label = scales.get(figure, (1, figure))
        ratio = f"{report[key]:7.2f}" if report[key] is not None else f"{'-':>7}"
        lines.append(f"{label:<20} {ours[figure] * scale:10.4g} {theirs[figure] * scale:10.4g} {ratio}")
    own = report["decode_own_ratio"]
    lines.append(f"{'its own decode rate':<20} {ours['decode_tok_s']:10.4g} {theirs['own_gen_tok_s']:10.4g} {own:7.2f}")
    slots = ("kv_slots_allocated", "kv_slots_used", "kv_used_share")
    lines += [f"{figure:<20} {ours[figure]:10.4g} {theirs[figure]:10.4g}" for figure in slots]
    if agreed := report["greedy_agreement"]:
        lines += ["", f"greedy replies equal: {agreed['equal_replies']} of {agreed['replies']}"]
    return "\n".join([*lines, *_classic_lines(report.get("classic"))])


def _classic_lines(classic: Figures | None) -> list[str]:
    if classic is None:
        return []
    lines = ["", f"classic load: {classic['requests']} requests, {classic['new_tokens']} new tokens"]
    lines.append(f"{'':<20} {'tok/s':>10} {'occupancy':>10} {'ours/it':>7}")
    for name, found in classic.items():
        if isinstance(found, dict):
            lines.append(f"{name:<20} {found['out_tok_s']:10.4g} {found['occupancy']:10.1%} {found['ours_ratio']:7.2f}")
    return lines


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is out of range; above 0, up to 1000")
    return value


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if wrong := sorted(set(names) - set(AGAINST)):
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)!r} is unknown; give {' or '.join(AGAINST)}, or both")
    return names


if __name__ == "__main__":
    sys.exit(main())
