"""A short list to begin with, by memory. Owns the names, their sizes and what they need; fetches nothing."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True, slots=True)
class FirstModel:
    """`gigabytes` to download; comfortable from `memory_gb` of memory on; `picked`: the one chat offers there."""

    name: str
    gigabytes: float
    memory_gb: int
    remark: str
    picked: bool = False


FIRST_MODELS = (
    FirstModel("smollm2", 0.1, 0, "tiny; answers on any machine, also without a GPU"),
    FirstModel("mlx-community/Llama-3.2-1B-Instruct-4bit", 0.7, 0, "small and quick"),
    FirstModel("mlx-community/Llama-3.2-3B-Instruct-4bit", 1.8, 0, "for 8 GB", picked=True),
    FirstModel("mlx-community/Qwen3-4B-Instruct-2507-4bit", 2.3, 12, "the best of its size", picked=True),
    FirstModel("mlx-community/Qwen3-8B-4bit", 4.6, 14, "thinks before it answers"),
    FirstModel("mlx-community/gpt-oss-20b-MXFP4-Q8", 12.1, 24, "reasoning and tools, few active weights"),
    FirstModel(
        "mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit", 17.2, 30, "strong, and quick: 3B active weights", picked=True
    ),
    FirstModel("mlx-community/Llama-3.3-70B-Instruct-4bit", 39.7, 60, "large and dense"),
)


def pick_for(memory: int) -> FirstModel:
    """The one to offer on a machine with this many bytes of memory."""
    return next(one for one in reversed(FIRST_MODELS) if one.picked and memory >= one.memory_gb * GB)


def fitting(memory: int) -> list[FirstModel]:
    """Those that are comfortable there, smallest first."""
    return [one for one in FIRST_MODELS if memory >= one.memory_gb * GB]
