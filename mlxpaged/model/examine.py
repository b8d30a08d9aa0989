"""How a model would be served here, as findings. Owns asking; starts no engine. Importing this imports mlx.core and
mlx-lm; call `startup.before_mlx` before."""

from __future__ import annotations

from collections.abc import Callable

from ..config import Attention, Dtype
from ..errors import ConfigError, MlxpagedError
from ..kernels.choose import AttentionPath, choose_path
from ..kernels.skinny_matmul import MOST_ROWS
from ..kernels.template import KernelTemplate
from .attention_path import attention_path
from .check import differs_from_stock
from .finding import Finding
from .kvspec import KVSpec, NotPaged, probe
from .linear_ways import linear_ways
from .loader import LoadedModel, load
from .memplan import gib
from .replay import Replay
from .serving import replay
from .sources import ModelSource

TYPICAL = KernelTemplate("bfloat16", 8, 4, 128, 128, layers=32)
"""What many models of 7 to 9 billion parameters store: examined when no model is named."""

_REPORT = "please report it with `mlxpaged doctor --report FILE`"

Say = Callable[[str], None]


def examine(
    source: ModelSource, dtype: Dtype, attention: Attention, say: Say
) -> tuple[LoadedModel | None, list[Finding]]:
    """Load the model and find out which path serves it; None and a problem when it cannot be loaded."""
    try:
        loaded = load(source, dtype)
    except MlxpagedError as error:
        return None, [Finding("model", f"{source.name} cannot be loaded", str(error), problem=True)]
    facts = [loaded.name, gib(loaded.weights_bytes), f"context {loaded.context_len:,}", *loaded.notes]
    found = [Finding("model", "; ".join(facts))]
    spec = None
    try:
        spec = probe(loaded.model)
        reason = differs_from_stock(loaded.model, spec, loaded.config)
    except NotPaged as error:
        reason = str(error)
    except Exception as error:  # our bug or the device's: this is where a person looks for it
        return loaded, [*found, _broken("served by", error)]
    if spec is None or reason is not None:
        advice = f"{loaded.name} is answered one request at a time; another model is served in batches"
        return loaded, [*found, Finding("served by", f"stock mlx-lm: {reason}", advice)]
    found.append(Finding("served by", f"the block pool, {len(spec.layers)} layers in {len(spec.windows)} KV groups"))
    path, findings = _attention(lambda: attention_path(spec, attention, say))
    if path is not None and path.launcher is not None:
        findings += _steps(loaded, spec, path)
    return loaded, [*found, *findings]


def examine_typical(attention: Attention, say: Say) -> list[Finding]:
    """The path of a typical model, without loading one."""
    return _attention(lambda: choose_path(attention, [TYPICAL], say))[1]


def _attention(choose: Callable[[], AttentionPath]) -> tuple[AttentionPath | None, list[Finding]]:
    try:
        path = choose()
    except ConfigError as error:
        return None, [Finding("attention", "cannot be had as asked", str(error), problem=True)]
    except Exception as error:  # the kernels' own failures are results; this is the device's, or a bug
        return None, [_broken("attention", error)]
    advice = f"{path.warning}; {_REPORT}" if path.warning else None
    return path, [Finding("attention", "; ".join(path.lines), advice)]


def _steps(loaded: LoadedModel, spec: KVSpec, path: AttentionPath) -> list[Finding]:
    found: list[Finding] = []
    warn = lambda line: found.append(Finding("products", line, _REPORT))  # noqa: E731
    linears = linear_ways(loaded.model, path, warn)
    if linears is not None and linears.skinny is not None:
        found.append(Finding("products", f"of 2 to {MOST_ROWS} rows by skinny_matmul where it is faster"))
    return [*found, _decode_steps(replay(loaded, spec, path, linears))]


def _decode_steps(found: Replay) -> Finding:
    match found.graphs:
        case "fused":
            return Finding("decode steps", "replayed as graphs")
        case "plain":
            return Finding("decode steps", f"replayed as graphs, without rope_write: {found.why}")
    return Finding("decode steps", f"built anew each time: {found.why}", _REPORT)


def _broken(name: str, error: Exception) -> Finding:
    return Finding(name, f"failed: {type(error).__name__}: {error}", "please report this with its text", problem=True)
