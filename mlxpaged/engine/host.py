"""Which models are resident. Owns loading and unloading and the core of each; lives on the MLX thread. One model for
now: another name replaces it once it is idle."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from ..config import EngineConfig
from ..model.estimate import require_room
from ..model.loader import load
from ..model.memory import unwire
from ..model.serving import end_thread
from ..model.sources import Progress, resolve
from .build import build
from .core import EngineCore
from .events import ModelInfo


class ModelHost:
    """The resident model, its core, and what faces may know of it."""

    def __init__(self, config: EngineConfig, notes: tuple[str, ...] = ()) -> None:
        """`notes`: lines about this machine, told with every model."""
        self._config = config
        self._notes = notes
        self.core: EngineCore | None = None
        self.info: ModelInfo | None = None

    def load(self, name: str, on_progress: Callable[[Progress], None] | None = None, fetch: bool = True) -> ModelInfo:
        """Make `name` resident; returns at once when it is. Raises what resolving and loading raise. Without `fetch`
        nothing is downloaded."""
        if self.info is not None and self.info.name == name:
            return self.info
        source, begun = resolve(name, on_progress, fetch), time.monotonic()
        require_room(source, self._config)
        self.unload()
        loaded = load(source, self._config.dtype)
        built = build(loaded, self._config)
        self.core = built.core
        self.info = ModelInfo(
            name=name,
            context_len=built.context_len,
            max_prompt=built.core.scheduler.max_prompt,
            vocab_size=built.vocab_size,
            tokenizer=loaded.tokenizer,
            created=int(time.time()),
            served_by=built.served_by,
            notes=(*self._notes, *loaded.notes, *built.notes),
            defaults=loaded.defaults,
            load_s=time.monotonic() - begun,
            quantisation=loaded.quantisation,
            family=loaded.config.get("model_type"),
            longest_context=loaded.context_len,
        )
        return self.info

    def close(self) -> None:
        """Unload, and part with MLX on this thread."""
        self.unload()
        end_thread()

    def unload(self) -> None:
        """Drop the resident model and give its memory back."""
        self.core = self.info = None
        gc.collect()  # a model's modules refer to each other
        unwire()
