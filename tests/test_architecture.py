"""The arrows between packages, held against every import in every file: who may know of whom, and who may see mlx."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

BASE = {"errors", "config", "paths"}
NOUNS = {"sched.requests", "engine.events"}
"""Frozen values that every layer above sched speaks in."""

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "paths": {"errors"},
    "metal": set(),
    "kernels": {"metal"} | BASE,
    "sched": BASE,
    "model": {"kernels", "sched"} | BASE,
    "engine": {"sched", "model"} | BASE,
    "chat": {"engine", "model.tokenizer"} | NOUNS | BASE,
    "server": {"chat"} | NOUNS | BASE,
    "tui": {"chat"} | NOUNS | BASE,
    "cli": {"server", "tui", "chat", "engine", "model"} | NOUNS | BASE,
    "__main__": {"cli"} | BASE,
}
"""Package -> the packages or modules of ours it may import. Whatever is not named here is a wrong arrow."""

MLX_HOMES = {"model", "kernels"}


def source_files() -> Iterator[tuple[str, Path]]:
    """(module path below mlxpaged, file): the linked folders are walked once, where they really are."""
    for file in sorted((ROOT / "mlxpaged").rglob("*.py")):
        parts = file.relative_to(ROOT / "mlxpaged").with_suffix("").parts
        if parts[0] not in {"metal", "tui"}:
            yield ".".join(parts), file
    for linked in ("metal", "tui"):
        for file in sorted((ROOT / linked).rglob("*.py")):
            yield ".".join(file.relative_to(ROOT).with_suffix("").parts), file


def imports_of(module: str, tree: ast.AST) -> Iterator[str]:
    """Every imported name, absolute: relative imports are resolved, `from x import y` gives x.y."""
    package = ["mlxpaged", *module.removesuffix(".__init__").split(".")]
    if not module.endswith("__init__"):
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def top(module: str) -> str:
    return module.split(".")[0]


def is_allowed(module: str, imported: str) -> bool:
    """`imported` is below mlxpaged: inside the same package, the package root itself, or on the list."""
    if top(imported) == top(module) or imported in {"", "__version__"}:
        return True
    return any(imported == name or imported.startswith(f"{name}.") for name in ALLOWED[top(module)])


FILES = [(module, file) for module, file in source_files() if module != "__init__"]


@pytest.mark.parametrize(("module", "file"), FILES, ids=[module for module, _ in FILES])
def test_every_import_follows_an_arrow(module: str, file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    ours = [name.removeprefix("mlxpaged").lstrip(".") for name in imports_of(module, tree) if top(name) == "mlxpaged"]
    wrong = sorted({name for name in ours if not is_allowed(module, name)})
    assert wrong == [], f"{module} may import {sorted(ALLOWED[top(module)])}"


@pytest.mark.parametrize(("module", "file"), FILES, ids=[module for module, _ in FILES])
def test_mlx_is_seen_only_under_model_and_kernels(module: str, file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    seen = sorted({name for name in imports_of(module, tree) if top(name) in {"mlx", "mlx_lm"}})
    assert seen == [] or top(module) in MLX_HOMES


def test_the_reader_of_imports_resolves_relative_ones() -> None:
    tree = ast.parse("from ..errors import ConfigError\nfrom . import x\nimport mlx.core as mx\nfrom .a.b import c")
    assert list(imports_of("sched.blocks", tree)) == [
        "mlxpaged.errors.ConfigError",
        "mlxpaged.sched.x",
        "mlx.core",
        "mlxpaged.sched.a.b.c",
    ]


def test_a_wrong_arrow_is_found() -> None:
    assert not is_allowed("sched.blocks", "model.runner")
    assert not is_allowed("server.app", "engine.core.EngineCore")
    assert is_allowed("server.app", "engine.events.Delta")
    assert is_allowed("model.runner", "sched.requests.StepPlan")
