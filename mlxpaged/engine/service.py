"""The one thread that owns MLX. Owns the inbox, the requests' text and their sinks; everything that crosses it is an
int, a string, a numpy array or a frozen value.

    service = EngineService(EngineConfig())
    info = service.load("smollm2").result()
    handle = service.submit(prompt_ids, SamplingParams(), sink)
"""

from __future__ import annotations

import itertools
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from ..config import EngineConfig
from ..errors import MlxpagedError, Overloaded
from ..sched.requests import FinishReason, Grammar, Request, SamplingParams
from .checking import checked_prompt, require_room
from .events import EngineStats, Loading, ModelInfo, Sink
from .replies import Replies
from .stats import snapshot

log = logging.getLogger(__name__)

_STATS_EVERY_S = 0.1
_PLACES_EVERY_S = 0.5
"""How often those that wait are told their place: hundreds may wait, and each word is an event of a stream."""


@dataclass(frozen=True, slots=True)
class Handle:
    """One submitted request. cancel() is idempotent, from any thread; the request is gone within one step and its
    sink gets a last delta with finish CANCELLED."""

    request_id: int
    _service: EngineService

    def cancel(self) -> None:
        self._service._post(lambda: self._service._cancel(self.request_id))


class EngineService:
    """Starts its thread when made; close() ends it. `pressed` tells whether the system wants memory back; None: the
    system is asked."""

    def __init__(self, config: EngineConfig, pressed: Callable[[], bool] | None = None) -> None:
        self._config = config
        self._pressed = pressed
        self._upkeep: Any = None  # made with the host
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ids = itertools.count(1)
        self._replies = Replies()
        self._host: Any = None  # ModelHost, made on the thread: importing it imports mlx
        self._info: ModelInfo | None = None
        self._stats = snapshot(None, None, self._replies, 0.0)
        self._turned = self._stats_at = self._places_at = self._used_at = time.monotonic()
        self._loading: Loading | None = None
        self._switches: deque[Callable[[], None]] = deque()  # loads and unloads that wait for running replies
        self._closing = False
        self._draining = False
        self._thread = threading.Thread(target=self._run, name="mlxpaged-engine", daemon=True)
        self._thread.start()

    # -- any thread --------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo | None:
        """The resident model; None before the first load, and after an unload."""
        return self._info

    @property
    def loading(self) -> Loading | None:
        """The load that was asked for and is not done, None when there is none."""
        return self._loading

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread.is_alive()

    def load(
        self, name: str, on_progress: Callable[[Any], None] | None = None, fetch: bool = True
    ) -> Future[ModelInfo]:
        """Make a model resident. Running replies finish first; what is submitted for the old model after them fails.
        `on_progress` may be called on any thread. Without `fetch` nothing is downloaded."""
        self._loading = Loading(name)
        return self._call(lambda: self._load(name, on_progress, fetch), after_replies=True)

    def unload(self) -> Future[None]:
        """Give the resident model's memory back, once running replies have finished."""
        return self._call(self._unload, after_replies=True)

    def submit(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, sink: Sink, grammar: Grammar | None = None
    ) -> Handle:
        """Queue a request. Everything about it is checked here: raises BadParameter, PromptTooLong or Overloaded.
        `grammar` belongs to this request alone."""
        info = self._info
        if info is None:
            raise Overloaded("no model is loaded; try again soon")
        if self._closing or self._draining:
            raise Overloaded("the server is shutting down")
        if not self.alive:
            raise Overloaded("the engine has stopped; restart the server")
        prompt = checked_prompt(prompt_ids, sampling, info)
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        self.require_room(1)
        request = Request(next(self._ids), prompt, sampling, info.tokenizer.end_token_ids, grammar=grammar)
        self._replies.open(request, info.tokenizer, sink)
        self._post(lambda: self._add(request, info))
        return Handle(request.request_id, self)

    def require_room(self, count: int) -> None:
        """For `count` requests that belong together; see checking.require_room."""
        require_room(count, len(self._replies), self._config.max_queue + self._config.max_rows)

    def stats(self) -> EngineStats:
        """The last snapshot (at most 0.1 s old while the engine works) with a fresh heartbeat."""
        return replace(self._stats, heartbeat_s=time.monotonic() - self._turned if self._busy else 0.0)

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for up to `drain_s` seconds, cancel the rest, end the thread."""
        self._draining = True
        deadline = time.monotonic() + drain_s
        while len(self._replies) and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.01)
        self._closing = True
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _call(self, action: Callable[[], Any], after_replies: bool = False) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:  # the caller's to handle
                future.set_exception(error)

        self._post((lambda: self._switches.append(run)) if after_replies else run)
        return future

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)

    # -- the engine thread -------------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        return len(self._replies) > 0

    @property
    def _working(self) -> bool:
        return self._host is not None and self._host.core is not None and not self._host.core.idle

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
            self._replies.end_all(FinishReason.CANCELLED, "the engine was closed")
        except Exception:
            log.critical("the engine has stopped", exc_info=True)
        finally:
            self._replies.end_all(FinishReason.ERROR, "the engine has stopped; restart the server")
            if self._host is not None:
                self._host.close()

    def _turn(self) -> None:
        # No local name holds the core: it would keep an unloaded model's memory.
        self._take_inbox(block=not self._working and not self._switches)
        self._turned = time.monotonic()
        if self._working:
            self._attempt(lambda: self._host.core.step(self._deliver))
            self._tell_places()
        elif self._switches:
            self._switches.popleft()()
        self._unload_idle()
        if self._upkeep is not None:
            self._attempt(lambda: self._upkeep.turn(self._host.core, self._working))
        self._refresh_stats(force=not self._working)

    def _take_inbox(self, block: bool) -> None:
        try:
            while not self._closing:
                action = self._inbox.get(block, self._idle_left() if block else None)
                if action is not None:
                    action()
                block = False
        except queue.Empty:
            return

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do `work`, which may wait for steps; one that fails costs its own requests, or in the end the model."""
        try:
            work()
            return
        except Exception as error:
            log.exception("a step failed")
            said = f"a step failed on the device: {error}"
        try:
            self._host.core.fail(said, self._deliver)
            return
        except Exception:
            log.exception("no other pool could be made; the model is given up until it is asked for again")
        self._replies.end_all(FinishReason.ERROR, said)
        self._unload()

    def _deliver(self, events: Sequence[Any]) -> None:
        for request_id in self._replies.take(events):
            self._host.core.cancel(request_id)

    def _tell_places(self) -> None:
        now = time.monotonic()
        if self._working and now - self._places_at >= _PLACES_EVERY_S:
            self._places_at = now
            self._replies.tell_places(self._host.core.scheduler.queue.places())

    def _idle_left(self) -> float | None:
        """Seconds until something is to be done although nothing is asked; None: as things are, never."""
        core = self._host.core if self._host is not None else None
        due = [self._unload_left(), self._upkeep.wait_s(core) if self._upkeep is not None else None]
        return min((seconds for seconds in due if seconds is not None), default=None)

    def _unload_left(self) -> float | None:
        """Seconds until the model is to be given up; None: never, as things are."""
        if self._config.idle_unload_s is None or self._info is None or self._busy:
            return None
        return max(0.0, self._used_at + self._config.idle_unload_s - time.monotonic())

    def _unload_idle(self) -> None:
        if self._busy or self._switches:
            self._used_at = time.monotonic()
        elif self._unload_left() == 0:
            assert self._info is not None
            log.info("%s gives its memory back: no request for %g s", self._info.name, self._config.idle_unload_s)
            self._unload()

    def _unload(self) -> None:
        if self._host is not None:
            self._info = None
            self._host.unload()
            self._refresh_stats(force=True)

    def _load(self, name: str, on_progress: Callable[[Any], None] | None, fetch: bool) -> ModelInfo:
        if self._host is None:
            from ..model.startup import before_mlx
            from ..model.upstream import import_mlx_lm

            startup = before_mlx()
            import_mlx_lm()  # first and quietly: a plain import lowers the limit of open files for good
            from ..model.machine import startup_notes
            from .host import ModelHost
            from .upkeep import Upkeep

            self._host = ModelHost(self._config, startup_notes(startup))
            self._upkeep = Upkeep(self._pressed) if self._pressed else Upkeep()

        def told(progress: Any) -> None:
            self._loading = Loading(name, progress.label, progress.done_bytes, progress.total_bytes)
            if on_progress is not None:
                on_progress(progress)

        try:
            self._info = self._host.load(name, told, fetch)
        finally:
            self._info, self._used_at = self._host.info, time.monotonic()
            if self._loading is not None and self._loading.model == name:
                self._loading = None
            self._refresh_stats(force=True)
        return self._info

    def _add(self, request: Request, info: ModelInfo) -> None:
        if info is not self._info:
            self._replies.end(request.request_id, FinishReason.ERROR, f"{info.name} was unloaded; send it again")
            return
        try:
            self._host.core.add(request)
        except MlxpagedError as error:
            self._replies.end(request.request_id, FinishReason.ERROR, str(error))

    def _cancel(self, request_id: int) -> None:
        if self._host is not None and self._host.core is not None:
            self._host.core.cancel(request_id)
        self._replies.end(request_id, FinishReason.CANCELLED)

    def _refresh_stats(self, force: bool) -> None:
        now = time.monotonic()
        if force or now - self._stats_at >= _STATS_EVERY_S:
            self._stats_at = now
            self._stats = snapshot(self._host and self._host.core, self._info, self._replies, now)
