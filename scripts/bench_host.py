#!/usr/bin/env python3
"""Where the time of a decode step goes: the host's part by stage, beside the least that the device needs.

    python scripts/bench_host.py --batch 1,8,32,64                    a tiny model; a table
    python scripts/bench_host.py --model 1b --bits 16 --json          one JSON line; needs a GPU to tell anything
    python scripts/bench_host.py --model 8b --context 64-2048         rows of mixed length

Milliseconds a step, means over --steps steps in which every row decodes: schedule, gather, graph (forward and
sampling, built but not run), dispatch (handing the graph to MLX), wait (for the device), commit, deliver. Beside them,
run back to back: a bare forward of as many tokens without cache or attention, and all layers' attention by the kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_flags import add_model_flags, at_least, length_range, report_of

if TYPE_CHECKING:
    import mlx.nn as nn
    from bench_engines import Ours
    from bench_figures import Load

    from mlxpaged.engine.core import EngineCore
    from mlxpaged.model.loader import LoadedModel

Figures = dict[str, Any]

STAGES = ("schedule", "gather", "graph", "dispatch", "wait", "commit", "deliver")


def main() -> int:
    arguments = parse_arguments()
    report = report_of(bench, arguments)
    print(json.dumps(report) if arguments.json else table(report))
    return 0


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser, "tiny")
    parser.add_argument("--batch", type=_batches, default=(1, 8, 32, 64), metavar="B,...", help="rows at once")
    parser.add_argument("--context", type=length_range, default=(64, 64), metavar="LO-HI", help="tokens of each prompt")
    parser.add_argument("--steps", type=at_least(1), default=60, metavar="N", help="measured steps (default: 60)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    return parser.parse_args(given)


def _batches(text: str) -> tuple[int, ...]:
    return tuple(at_least(1)(part) for part in text.split(","))


def bench(arguments: argparse.Namespace) -> Figures:
    """Every size on one set of weights; raises MlxpagedError."""
    from mlxpaged.model.upstream import import_mlx_lm

    import_mlx_lm("mlx_lm.generate")
    import bench_models as models
    from bench_batch import _backend
    from bench_engines import Ours, Sampling

    bits = arguments.bits or (16 if models.on_gpu() else 32)
    loaded = models.load_model(arguments.model, bits, 0)
    stock = models.stock_twin(loaded.model)
    sampling = Sampling(arguments.temperature, arguments.top_p, 0)
    rows = []
    for batch in arguments.batch:
        lengths = models.Lengths(*arguments.context)
        load = models.decoding_load(lengths, batch, arguments.steps, loaded.config["vocab_size"])
        ours = Ours(loaded, batch, [load], sampling, models.DECODING_BUDGET)
        models.share_weights(stock, loaded.model)
        found = step_times(ours, load, arguments.steps)
        context = round(sum(map(len, load.prompts)) / batch) + models.WARM_STEPS + arguments.steps // 2
        found["floor"] = {
            "forward": round(bare_forward_ms(stock, batch), 3),
            "attention": attention_ms(loaded, ours.core, batch, context),
        }
        rows.append({"rows": batch, "mean_context": context, **found})
        print(f"{batch} rows: {found['step']} ms a step", file=sys.stderr, flush=True)
        del ours
    return {
        "model": arguments.model,
        "bits": bits,
        "device": _backend(),
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "batches": rows,
    }


def step_times(ours: Ours, load: Load, steps: int) -> Figures:
    """Milliseconds a step of `steps` steps that only decode, by stage."""
    from bench_models import WARM_STEPS

    core, run = ours.core, ours.decode(load, WARM_STEPS)
    spent = dict.fromkeys(STAGES, 0.0)
    with stages_timed(core, spent):
        began = time.perf_counter()
        run(steps)
        wall = time.perf_counter() - began
    for live in core.scheduler.live():
        core.cancel(live.request.request_id)
    while not core.idle:
        run(1)
    found = {name: round(seconds / steps * 1000, 3) for name, seconds in spent.items()}
    return {"step": round(wall / steps * 1000, 3), **found}


@contextmanager
def stages_timed(core: EngineCore, spent: dict[str, float]) -> Iterator[None]:
    """While it lasts, each stage of a step adds its seconds to `spent`; a stage within another counts once."""
    import mlx.core as mx

    from mlxpaged.model import runner as runner_module
    from mlxpaged.model.runner import PendingStep
    from mlxpaged.model.sampling import Sampler

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - began

        return call

    places = (
        (core.scheduler, "schedule", "schedule"),
        (runner_module, "gather_inputs", "gather"),
        (type(core.runner), "forward", "graph"),
        (Sampler, "__call__", "graph"),
        (mx, "async_eval", "dispatch"),
        (PendingStep, "wait", "wait"),
        (core.scheduler, "commit", "commit"),
        (core.scheduler, "take_events", "deliver"),
    )
    with ExitStack() as stack:
        for owner, attribute, stage in places:
            stack.enter_context(patch.object(owner, attribute, timed(stage, getattr(owner, attribute))))
        yield


def bare_forward_ms(model: nn.Module, rows: int, calls: int = 20) -> float:
    """One forward of `rows` tokens through stock mlx-lm, attention left out, the next one built while one runs."""
    import mlx.core as mx

    ids = mx.zeros((1, rows), mx.int32)
    with patch.object(sys.modules[type(model).__module__], "scaled_dot_product_attention", lambda q, *_, **__: q):

        def run(count: int) -> float:
            began = time.perf_counter()
            last = None
            for _ in range(count):
                out = mx.argmax(model(ids), axis=-1)
                mx.async_eval(out)
                if last is not None:
                    mx.eval(last)
                last = out
            mx.eval(last)
            return (time.perf_counter() - began) / count * 1000

        run(3)
        return min(run(calls) for _ in range(2))


def attention_ms(loaded: LoadedModel, core: EngineCore, rows: int, context: int) -> float | None:
    """All layers' attention by the kernel, a chain of calls; None where the engine runs without kernels."""
    import mlx.core as mx

    from mlxpaged.config import BLOCK_SIZE
    from mlxpaged.kernels.choose import Device
    from mlxpaged.kernels.timing import LayerWays
    from mlxpaged.model.attention_path import kernel_templates
    from mlxpaged.model.kernelpool import KernelPool
    from mlxpaged.model.kvspec import probe

    launch = Device.current().launcher()
    if launch is None or not isinstance(core.runner.pool, KernelPool):  # type: ignore[attr-defined]
        return None
    total = 0.0
    for template in kernel_templates(probe(loaded.model)):
        layer = LayerWays(launch, template, rows, -(-context // BLOCK_SIZE) * BLOCK_SIZE, calls=template.layers)
        layer.by_kernel()
        times = []
        for _ in range(5):
            began = time.perf_counter()
            layer.by_kernel()
            times.append(time.perf_counter() - began)
        total += min(times)
        mx.clear_cache()
    return round(total * 1000, 3)


def table(report: Figures) -> str:
    """The report for a person."""
    head = f"{report['model']}, {report['bits']} bits, {report['device']}: milliseconds a decode step"
    columns = ("rows", "mean_context", "step", *STAGES)
    lines = [head, "  ".join(f"{name:>8}" for name in (*columns, "forward", "attention"))]
    for row in report["batches"]:
        values = [row[name] for name in columns] + list(row["floor"].values())
        lines.append("  ".join(f"{'-' if value is None else value:>8}" for value in values))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
