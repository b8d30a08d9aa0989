"""The real command line over a scripted engine, as a program: `python -m tests.cli.program ARGS`.

Models: `scripted`; `untemplated` (no chat template); `missing` and `broken` fail to load; `fifo:PATH` is loaded once
somebody writes to that pipe. What the last user message is decides the reply: see `answer`.

A chat holds its engine in its own process here, unless ATTACHES is set: then servers are started as they are for real.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlxpaged.__main__ import main
from mlxpaged.chat import attach, background
from mlxpaged.cli import compose
from mlxpaged.cli.progress import LoadProgress
from mlxpaged.config import EngineConfig
from mlxpaged.engine.events import Delta, ModelInfo, Progress
from mlxpaged.errors import ModelNotFound
from mlxpaged.sched.requests import FinishReason, SamplingParams
from tests.scripted import ByteTokenizer, ScriptedService, says

STALL = Delta(text="(stalls)")
"""A reply stops here until it is cancelled."""

MARKDOWN = """# Title

Some **bold** text.

- one
- two

```python
def f():
    return 1
```

The end.
"""


def answer(prompt_ids: Sequence[int], sampling: SamplingParams) -> list[Delta]:
    """The script: a reply per last user message."""
    prompt = b"".join(ByteTokenizer().token_bytes(token_id) for token_id in prompt_ids).decode(errors="replace")
    last = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    match last:
        case "stall" if prompt.endswith("Once upon a time"):
            return says(" there was a fox")
        case "stall":
            return [*says("Once upon ", "a time")[:-1], STALL]
        case "long" if prompt.endswith("It was a dark"):
            return says(" and stormy night")
        case "long":
            return says("It was ", "a dark", finish=FinishReason.LENGTH)
        case "silence":
            return [STALL]
        case "queue":
            return [Delta(progress=Progress(0, 9, 0, queue_position=3)), STALL]
        case "fail":
            return says("half an ans", finish=FinishReason.ERROR, error="the device is gone")
        case "markdown":
            return says(*(MARKDOWN[index : index + 3] for index in range(0, len(MARKDOWN), 3)))
        case "escape":
            return says("red \x1b[31mtext\x1b]0;owned\x07 and \x9b2J more")
        case _ if last.startswith("show"):
            shown = prompt.replace("<|im_start|>", "[").replace("<|im_end|>\n", "] ").replace("\n", "/")
            return says(f"PROMPT {shown}")
        case "values":
            return says(f"temperature={sampling.temperature} top_p={sampling.top_p} seed={sampling.seed}")
    return says("You said: ", last)


class StallingService(ScriptedService):
    """Leaves stalled replies alone until they are cancelled, and loads models by name."""

    def load(self, name: str, on_progress: object = None, fetch: bool = True) -> Future[ModelInfo]:
        loading: Future[ModelInfo] = Future()
        self._name = name
        self.model = None
        match name.partition(":"):
            case ["missing", *_]:
                loading.set_exception(ModelNotFound("no model at 'missing'"))
            case ["broken", *_]:
                loading.set_exception(KeyError("layers"))
            case ["fifo", _, pipe]:
                threading.Thread(target=self._load_after, args=(loading, Path(pipe)), daemon=True).start()
            case _:
                self._loaded(loading)
        return loading

    def _load_after(self, loading: Future[ModelInfo], pipe: Path) -> None:
        pipe.read_bytes()
        self._loaded(loading)

    def _loaded(self, loading: Future[ModelInfo]) -> None:
        template = None if self._name == "untemplated" else ByteTokenizer().chat_template
        tokenizer = ByteTokenizer(chat_template=template)
        self.model = replace(self._info, name=self._name, tokenizer=tokenizer)
        loading.set_result(self.model)

    def _turn(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(not self._stalls(row) for row in self._rows))
                if self._closed:
                    return
                stalled = [row for row in self._rows if self._stalls(row)]
                self._rows = [row for row in self._rows if row not in stalled]
                self.step()
                self._rows += stalled

    @staticmethod
    def _stalls(row: object) -> bool:
        return row.deltas[0] is STALL and not row.cancelled  # type: ignore[attr-defined]


@contextmanager
def scripted_engine(config: EngineConfig) -> Iterator[StallingService]:
    service = StallingService(answer, context_len=config.context_len or 512, quantisation="Q4_1")
    try:
        yield service
    finally:
        service.close()


@contextmanager
def scripted_chat(
    model: str | None, url: str | None, api_key: str | None, flags: tuple[str, ...], progress: LoadProgress
) -> Iterator[compose.Opened]:
    """What a chat speaks through: the server at `url`, else a scripted engine in this process."""
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    if url:
        yield compose.OpenedAttached(model, url, api_key, flags, progress)
        return
    with scripted_engine(EngineConfig(context_len=int(given.get("--ctx", 0)) or None)) as service:
        yield compose.OpenedLocally(service, model or "scripted", progress)


def over_scripts() -> None:
    """Scripted engines in place of real ones, in this process and in the servers that it starts."""
    compose.started_engine = scripted_engine
    compose.fetch_model = lambda name, progress: None
    if os.environ.get("ATTACHES"):
        attach.Start = background.Start = partial(background.Start, program=(sys.executable, "-m", "tests.cli.program"))
    else:
        compose.opened_for_chat = scripted_chat


if __name__ == "__main__":
    over_scripts()
    sys.argv[0] = "mlxpaged"
    main()
