"""`mlxpaged tui`: several live sessions on a full screen, answered by a server, kept in the store."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..config import DEFAULT_MODEL
from ..errors import ConfigError
from . import options
from .exits import complain
from .hangup import end_with_terminal
from .options import SamplingFlags
from .progress import LoadProgress
from .settings import key_settings

if TYPE_CHECKING:
    from ..chat.backend import Backend, ModelCard
    from .compose import Opened

Result = TypeVar("Result")

LOOK_S = 0.25
"""How often the progress of a fetch or a load is looked at."""

SessionName = Annotated[
    str | None,
    typer.Option("--session", envvar="MLXPAGED_SESSION", help="Open this conversation first (its title or id)."),
]
Ephemeral = Annotated[
    bool, typer.Option("--ephemeral", envvar="MLXPAGED_EPHEMERAL", help="Save nothing, and show nothing saved.")
]
ThemeName = Annotated[str | None, typer.Option("--theme", envvar="MLXPAGED_THEME", help="Colours [the last used].")]


MoreModels = Annotated[
    list[str] | None, typer.Argument(metavar="[MODEL]...", help="Further ones; a session is opened for each.")
]


def tui(
    model: options.OptionalModelArgument = None,
    also: MoreModels = None,
    session: SessionName = None,
    theme: ThemeName = None,
    ephemeral: Ephemeral = False,
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    dtype: options.DtypeFlag = "auto",
    ctx: options.ContextFlag = None,
    memory_budget: options.MemoryBudget = None,
    attention: options.AttentionFlag = "auto",
    url: options.Url = None,
    api_key: options.ApiKey = None,
) -> int:
    """Talk in several sessions at once, full screen, and see what the engine does. Answers come from a server that
    chats share; one is started in the background where none runs."""
    flags = SamplingFlags(max_tokens, temperature, top_p, top_k, min_p, seed)
    flags.check()
    options.engine_config(dtype, ctx, memory_budget, attention=attention)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("tui needs a terminal; `mlxpaged chat` and `mlxpaged run` work in pipes")
    from ..chat.store import Store
    from ..tui.app import TuiApp
    from ..tui.state import Given
    from . import compose

    server_flags = options.as_flags(dtype=dtype, ctx=ctx, memory_budget=memory_budget, attention=attention)
    named = _model(model, url)
    models = [named, *(also or ())] if named else []
    store = Store(None) if ephemeral else Store.open()
    with ExitStack() as ends:
        links: dict[str | None, Link] = {}

        async def connect(model: str | None, say: Callable[[str], None]) -> Link:
            if model not in links:
                progress = LoadProgress()
                flags = (*server_flags, *_listed([one for one in models if one != model]))
                opened = compose.opened_for_chat(model, url, api_key, flags, progress)
                links[model] = Link(ends.enter_context(opened), progress)
            return links[model]

        app = TuiApp(store, connect, session, theme, Given(system, flags.given()), key_settings(), models)
        end_with_terminal(lambda: app.call_from_thread(app.exit))
        app.run()
    if app.rescued:
        complain(f"{store.problem}; what could not be saved is in {app.rescued}")
    if app.broken:
        raise app.broken
    return app.return_code or 0


class Link:
    """The app's tie to a server, made by the first `ready`."""

    def __init__(self, opened: Opened, progress: LoadProgress) -> None:
        self._opened = opened
        self._progress = progress

    @property
    def backend(self) -> Backend:
        """What answers."""
        return self._opened.backend

    @property
    def notice(self) -> str:
        """One line on where the answers come from."""
        return self._opened.notice

    async def look(self, on_status: Callable[[str], None]) -> None:
        """Fetches the model where it has to be, and finds out whether the server would load it."""
        await self._told(self._opened.look(), on_status)

    async def ready(self, on_status: Callable[[str], None]) -> ModelCard:
        """Waits until the model can answer."""
        return await self._told(self._opened.ready(), on_status)

    async def _told(self, work: Coroutine[Any, Any, Result], on_status: Callable[[str], None]) -> Result:
        """The result of `work`; says meanwhile how far it is."""
        import asyncio

        waiting = asyncio.ensure_future(work)
        try:
            while not waiting.done():
                on_status(self._progress.in_words())
                await asyncio.wait([waiting], timeout=LOOK_S)
        finally:
            waiting.cancel()
        return waiting.result()

    async def close(self) -> None:
        """Lets go of the server, which goes on for others."""
        await self._opened.close()


def _listed(models: Sequence[str]) -> tuple[str, ...]:
    """Flags for a server that is started: what it finds by no name of its own, folders and files, it has to be told."""
    paths = [Path(model).expanduser() for model in models]
    return tuple(word for path in paths if path.exists() for word in ("--also", str(path.resolve())))


def _model(named: str | None, url: str | None) -> str | None:
    """The model to ask for; None: whichever the server holds."""
    from ..chat.servers import records

    if named or url or records():
        return named
    if sys.platform != "darwin":
        return DEFAULT_MODEL
    from .pick import pick_model

    return pick_model()
