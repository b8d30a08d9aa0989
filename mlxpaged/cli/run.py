"""`mlxpaged run`: one prompt, one answer on stdout."""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..chat.foreign import neutralise
from ..errors import ConfigError, EngineError
from . import options
from .exits import INTERRUPTED, complain
from .options import SamplingFlags

if TYPE_CHECKING:
    from ..chat.backend import Backend, Reply
    from ..engine.events import Delta, ModelInfo

_PATIENCE_S = 2.0
"""A pipe that nobody has written to for so long may be one that nobody will ever write to."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: the prompt, and how it is to be put and answered."""

    prompt: str
    flags: SamplingFlags
    system: str | None = None
    raw: bool = False
    as_json: bool = False


def run(
    model: options.ModelArgument,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="What to ask; a piped stdin goes before it.")
    ] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    system: options.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is: no chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with text, ids and figures.")] = False,
    dtype: options.DtypeFlag = "auto",
    ctx: options.ContextFlag = None,
    memory_budget: options.MemoryBudget = None,
    attention: options.AttentionFlag = "auto",
) -> int:
    """Answer one prompt and leave.

    Text that is piped in is the prompt. With a PROMPT beside it the text goes first, then a blank line, then PROMPT:
    cat notes.txt | mlxpaged run smollm2 "Summarise this."
    """
    import asyncio

    from .compose import opened_locally
    from .progress import LoadProgress, wait_with_bar

    flags = SamplingFlags(max_tokens, temperature, top_p, top_k, min_p, seed)
    flags.check()
    config = options.engine_config(dtype, ctx, memory_budget, attention=attention)
    if raw and system:
        raise ConfigError("--system needs the chat template, which --raw leaves out; give one of the two")
    question = Question(_prompt_text(prompt, raw), flags, system, raw, as_json)
    progress = LoadProgress()
    with opened_locally(model, config, progress) as opened:
        info = wait_with_bar(opened.loading, progress)
        for note in info.notes:
            complain(note)
        return asyncio.run(_answer(opened.backend, info, question))


def _prompt_text(argument: str | None, raw: bool) -> str:
    """The prompt as given after what is piped in, or all of stdin (its last line break is no part of a question);
    ConfigError when empty."""
    if argument is None and sys.stdin.isatty():
        complain("reading the prompt from the keyboard; Ctrl-D ends it")
    try:
        # Bytes, so that no locale decides what they mean; an argument's stray bytes are the shell's surrogates.
        given = "" if argument is None else argument.encode().decode()
        piped = sys.stdin.buffer.read().decode() if argument is None else _piped_in().decode()
    except UnicodeError as error:
        raise ConfigError(f"the prompt is not UTF-8 text: {error}") from None
    if not given.strip() and not piped.strip():
        raise ConfigError('the prompt is empty; write it after the model, as in: mlxpaged run smollm2 "Hello"')
    if not piped.strip():
        return given
    text = piped if raw and not given else piped.removesuffix("\n")
    return f"{text}\n\n{given}" if given else text


def _piped_in() -> bytes:
    """All of stdin where it is a pipe or a file; nothing of a terminal, of /dev/null or of what else cron and services
    give a program for its stdin."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # no stdin at all
        return b""
    if not stat.S_ISFIFO(mode) and not stat.S_ISREG(mode):
        return b""
    if not select.select([sys.stdin], [], [], _PATIENCE_S)[0]:
        complain("waiting for the end of stdin, which is a pipe; `< /dev/null` goes without it")
    return sys.stdin.buffer.read()


async def _answer(backend: Backend, info: ModelInfo, question: Question) -> int:
    from asyncio import get_running_loop

    from ..chat.messages import Messages
    from ..sched.requests import FinishReason, SamplingParams

    sampling = SamplingParams(**options.sampling_values(question.flags.given(), info.defaults))
    templated = not question.raw and info.tokenizer.chat_template is not None
    if question.system and not templated:
        raise ConfigError(f"--system needs a chat template, and {info.name} has none; put it into the prompt")
    prompt = Messages(_turns(question)) if templated else question.prompt
    reply = await backend.start(prompt, sampling)
    get_running_loop().add_signal_handler(signal.SIGINT, reply.cancel)
    text, token_ids, last = await _printed(reply, stream=not question.as_json)
    if question.as_json:
        print(json.dumps(_record(text, token_ids, last), ensure_ascii=False))
    elif last.finish is FinishReason.ERROR:
        raise EngineError(last.error or "the engine failed while it answered")
    return INTERRUPTED if last.finish is FinishReason.CANCELLED else int(last.finish is FinishReason.ERROR)


def _turns(question: Question) -> tuple[dict[str, str], ...]:
    system = ({"role": "system", "content": question.system},) if question.system else ()
    return (*system, {"role": "user", "content": question.prompt})


async def _printed(reply: Reply, stream: bool) -> tuple[str, list[int], Delta]:
    """Reads the reply to its end, printing it as it comes where `stream`; its text, ids and last delta."""
    for_a_person = sys.stdout.isatty()
    pieces: list[str] = []
    token_ids: list[int] = []
    last: Delta | None = None
    async for delta in reply:
        pieces.append(delta.text)
        token_ids.extend(delta.token_ids)
        last = delta
        if stream and delta.text:
            sys.stdout.write(neutralise(delta.text) if for_a_person else delta.text)
            sys.stdout.flush()
    if stream:
        print(flush=True)
    if last is None:
        raise EngineError("the reply ended before it began")
    return "".join(pieces), token_ids, last


def _record(text: str, token_ids: list[int], last: Delta) -> dict[str, Any]:
    """What --json prints; figures are null where the engine gave none."""
    usage, timing = last.usage, last.timing
    record: dict[str, Any] = {
        "text": text,
        "token_ids": token_ids,
        "finish_reason": last.finish,
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "completion_tokens": usage.completion_tokens if usage else len(token_ids),
        "cached_tokens": usage.cached_tokens if usage else None,
        "ttft_s": round(timing.ttft_s, 4) if timing else None,
        "tokens_per_s": round(timing.tokens_per_s(usage.completion_tokens), 2) if timing and usage else None,
    }
    return record | ({"error": last.error} if last.error else {})
