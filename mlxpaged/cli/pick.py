"""Which model `chat` takes on a Mac when none is named. Owns the offer: what is on disk, one pick by memory, and
smollm2 when the network is out of reach. Downloads nothing itself."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..config import DEFAULT_MODEL
from ..errors import ConfigError
from .first_models import GB, pick_for

_MOST_OF_MEMORY = 0.7
"""Weights above this share of the memory leave no room for K/V and everything else."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One line of the list: the model's name and what to say about it."""

    name: str
    remark: str


def pick_model() -> str:
    """The model the person chooses; without a terminal the first offer that needs no download."""
    memory = psutil.virtual_memory().total
    found = models_on_disk(memory)
    offers = offers_for(found, memory, is_online())
    if not sys.stdin.isatty():
        on_disk = [offer.name for offer in offers if offer.name in found]
        return on_disk[0] if on_disk else DEFAULT_MODEL
    return chosen(offers, _ask)


def _ask(question: str) -> str:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def offers_for(found: dict[str, int], memory: int, online: bool) -> list[Offer]:
    """What is on disk first (name -> bytes, largest first), then a pick by memory, or smollm2 when offline."""
    offers = [Offer(name, f"{size / GB:.1f} GB, on disk") for name, size in found.items()]
    if not online:
        return [*offers, Offer(DEFAULT_MODEL, "tiny; the network is out of reach")]
    pick = pick_for(memory)
    if pick.name not in found:
        offers.append(
            Offer(pick.name, f"{pick.gigabytes} GB to download; fits this Mac's {memory / 2**30:.0f} GB of memory")
        )
    return offers


def chosen(offers: list[Offer], ask: Callable[[str], str]) -> str:
    """Shows the offers and asks for one by number or name; an empty answer takes the first. ConfigError otherwise."""
    for number, offer in enumerate(offers, 1):
        print(f"  {number}  {offer.name}  ({offer.remark})", file=sys.stderr)
    answer = ask(f"Which model? [1: {offers[0].name}] ").strip() or "1"
    if answer.isdecimal() and 1 <= int(answer) <= len(offers):
        return offers[int(answer) - 1].name
    if answer.isdecimal():
        raise ConfigError(f"there is no model {answer} in the list; answer 1 to {len(offers)}, or name a model")
    return answer


def models_on_disk(memory: int, hub: Path | None = None) -> dict[str, int]:
    """Chat models of the Hugging Face cache that fit into `memory`: hub id -> bytes of weights, largest first."""
    found = {}
    for folder in (hub or _hub_folder()).glob("models--*"):
        for snapshot in sorted((folder / "snapshots").glob("*")):
            size = _chat_model_bytes(snapshot)
            if 0 < size <= _MOST_OF_MEMORY * memory:
                found[folder.name.removeprefix("models--").replace("--", "/")] = size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _hub_folder() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _chat_model_bytes(snapshot: Path) -> int:
    """Bytes of weights; 0 where a file of an MLX chat model is missing."""
    try:
        json.loads((snapshot / "config.json").read_text(encoding="utf-8"))["model_type"]
        settings = json.loads((snapshot / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    if "chat_template" not in settings and not (snapshot / "chat_template.jinja").exists():
        return 0
    return sum(file.stat().st_size for file in snapshot.glob("*.safetensors") if file.exists())


def is_online() -> bool:
    """Whether the hub can be reached; HF_HUB_OFFLINE says no without asking."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return False
    try:
        socket.create_connection(("huggingface.co", 443), timeout=2).close()
    except OSError:
        return False
    return True
