#!/usr/bin/env python3
"""Which kernels a decode step runs on an NVIDIA GPU, and how long each takes there, whatever the host adds.

    python scripts/profile_step.py --model 8b --bits 16 --batch 32 --context 64-2048
    python scripts/profile_step.py --model 1b --json                                    one JSON line

By torch's profiler (CUPTI), which sees every kernel of the process: needs a torch with CUDA beside MLX's CUDA build.
Microseconds a step, means over --steps steps in which every row decodes. `span`: from the first kernel's begin to the
last one's end; `idle`: of it, what no kernel runs; `waits`: what calls that take more than twice the median of their
kernel take beyond it, above all those first to touch a page after the host did. The profiler slows the host: `idle`
is an upper bound, and nothing timed in the same process afterwards is to be trusted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_flags import add_model_flags, at_least, length_range, report_of

from mlxpaged.errors import ConfigError

Figures = dict[str, Any]

LONGEST_NAME = 60
"""Characters of a kernel's name in the table."""


class KernelCall(NamedTuple):
    """One kernel, or copy, on the device; microseconds."""

    begin: float
    length: float
    name: str


def main() -> int:
    arguments = parse_arguments()
    report = report_of(bench, arguments)
    print(json.dumps(report) if arguments.json else table(report))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser, "1b")
    parser.add_argument("--batch", type=at_least(1), default=32, metavar="B", help="rows at once (default: 32)")
    parser.add_argument(
        "--context", type=length_range, default=(64, 2048), metavar="LO-HI", help="tokens of each prompt"
    )
    parser.add_argument("--steps", type=at_least(1), default=12, metavar="N", help="profiled steps (default: 12)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    return parser.parse_args()


def bench(arguments: argparse.Namespace) -> Figures:
    """Raises MlxpagedError."""
    profiled = device_profiler()
    from mlxpaged.model.upstream import import_mlx_lm

    import_mlx_lm("mlx_lm.generate")
    import bench_models as models
    from bench_engines import Ours, Sampling

    bits = arguments.bits or 16
    loaded = models.load_model(arguments.model, bits, 0)
    sampling = Sampling(arguments.temperature, arguments.top_p, 0)
    lengths = models.Lengths(*arguments.context)
    load = models.decoding_load(lengths, arguments.batch, arguments.steps, loaded.config["vocab_size"])
    ours = Ours(loaded, arguments.batch, [load], sampling, models.DECODING_BUDGET)
    run = ours.decode(load, models.WARM_STEPS)
    calls = profiled(lambda: run(arguments.steps))
    return {"model": arguments.model, "bits": bits, "rows": arguments.batch, **step_figures(calls, arguments.steps)}


def device_profiler() -> Callable[[Callable[[], None]], list[KernelCall]]:
    """Runs something and gives the kernels it ran. Raises ConfigError where torch cannot see any."""
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        raise ConfigError("this needs torch with CUDA, whose profiler it uses; there is no torch here") from None
    if not torch.cuda.is_available():
        raise ConfigError(f"this needs torch with CUDA, whose profiler it uses; torch {torch.__version__} finds no GPU")

    def profiled(run: Callable[[], None]) -> list[KernelCall]:
        import mlx.core as mx

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            mx.synchronize()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiler.export_chrome_trace(file.name)
            return kernel_calls(json.loads(Path(file.name).read_bytes()))

    return profiled


def kernel_calls(trace: Figures) -> list[KernelCall]:
    """What ran on the device, in order, from a Chrome trace."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = (event for event in trace["traceEvents"] if event.get("cat") in kinds)
    return sorted(KernelCall(event["ts"], event["dur"], event["name"]) for event in events)


def step_figures(calls: list[KernelCall], steps: int) -> Figures:
    """Microseconds a step, kernels by their share of it."""
    if not calls:
        raise ConfigError("no kernel was seen: MLX runs on the CPU, or another profiler holds the device")
    by_name: dict[str, list[float]] = defaultdict(list)
    for call in calls:
        by_name[short_name(call.name)].append(call.length)
    kernels = [
        {
            "name": name,
            "calls": len(times) / steps,
            "us": sum(times) / steps,
            "median": median(times),
            "most": max(times),
        }
        for name, times in sorted(by_name.items(), key=lambda pair: -sum(pair[1]))
    ]
    waits = sum(time - median(times) for times in by_name.values() for time in times if time > 2 * median(times))
    span = max(call.begin + call.length for call in calls) - calls[0].begin
    figures = {"span": span, "busy": sum(call.length for call in calls), "idle": idle_us(calls), "waits": waits}
    rounded = [{name: value if name == "name" else round(value, 2) for name, value in one.items()} for one in kernels]
    return {name: round(value / steps, 1) for name, value in figures.items()} | {"kernels": rounded}


def idle_us(calls: Sequence[KernelCall]) -> float:
    """Time between the first begin and the last end in which nothing runs."""
    idle, end = 0.0, calls[0].begin
    for call in calls:
        idle += max(0.0, call.begin - end)
        end = max(end, call.begin + call.length)
    return idle


def short_name(name: str) -> str:
    """Without the return type, namespaces and arguments that a C++ name carries; template arguments stay, which tell
    one kernel from another."""
    for part in ("void ", "(anonymous namespace)::", "mlx::core::cu::", "custom_kernel_"):
        name = name.replace(part, "")
    depth = 0
    for place, sign in enumerate(name):
        depth += (sign == "<") - (sign == ">")
        if sign == "(" and depth == 0:
            return name[:place].rstrip()
    return name


def cut(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


def table(report: Figures) -> str:
    """For a person."""
    lines = [
        f"{report['model']}, {report['bits']} bits, {report['rows']} rows: {report['span']:.0f} us a step, kernels "
        f"{report['busy']:.0f}, idle {report['idle']:.0f}, waits {report['waits']:.0f}",
        f"{'us a step':>10} {'calls':>6} {'median':>8} {'most':>8}  kernel",
    ]
    lines += [
        f"{one['us']:>10.1f} {one['calls']:>6.1f} {one['median']:>8.2f} {one['most']:>8.2f}  {cut(one['name'])}"
        for one in report["kernels"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
