"""`mlxpaged tui`: several live sessions on a full screen, answered by a server, kept in the store."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

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


def tui(
    model: options.OptionalModelArgument = None,
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
    from . import compose

    server_flags = options.as_flags(dtype=dtype, ctx=ctx, memory_budget=memory_budget, attention=attention)
    progress = LoadProgress()
    store = Store(None) if ephemeral else Store.open()
    with compose.opened_for_chat(_model(model, url), url, api_key, server_flags, progress) as opened:

        async def connect(say: Callable[[str], None]) -> Link:
            return Link(opened, progress)

        given = flags.given()
        app = TuiApp(store, connect, session=session, theme=theme, system=system, params=given, keys=key_settings())
        end_with_terminal(lambda: app.call_from_thread(app.exit))
        app.run()
    if app.rescued:
        complain(f"{store.problem}; what could not be saved is in {app.rescued}")
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

    async def ready(self, on_status: Callable[[str], None]) -> ModelCard:
        """Waits until the model can answer, saying meanwhile how far it is."""
        import asyncio

        waiting = asyncio.ensure_future(self._opened.ready())
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


def _model(named: str | None, url: str | None) -> str | None:
    """The model to ask for; None: whichever the server holds."""
    from ..chat.servers import records

    if named or url or records():
        return named
    if sys.platform != "darwin":
        return DEFAULT_MODEL
    from .pick import pick_model

    return pick_model()
