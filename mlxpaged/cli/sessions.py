"""`mlxpaged sessions`: the saved conversations, listed, read, found, written out, rescued, renamed and removed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, MlxpagedError
from .exits import complain
from .listing import age, columns, session_lines

if TYPE_CHECKING:
    from ..chat.sessions import Message, Session
    from ..chat.store import Store

sessions = typer.Typer(
    name="sessions",
    help="The saved conversations.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="JSON, for scripts.")]
Name = Annotated[
    str, typer.Argument(metavar="SESSION", help="Its title, its id, or 4 letters of the id as it is listed.")
]
_EXCERPT = 70


@sessions.command("list")
def list_sessions(as_json: AsJson = False) -> None:
    """List the conversations, the last used first."""
    with _store() as store:
        found = store.sessions()
    if as_json:
        print(json.dumps([_summary(one) for one in found], ensure_ascii=False))
        return
    for line in session_lines(found) or ["No saved conversations yet; `mlxpaged chat` begins one."]:
        print(line)


@sessions.command("show")
def show(name: Name, as_json: AsJson = False) -> None:
    """Print a conversation."""
    with _store() as store:
        _write(store.export(store.find(name).id, "json" if as_json else "md"))


@sessions.command("search")
def search(
    text: Annotated[str, typer.Argument(help="What was said, or a part of the title, in any case.")],
    as_json: AsJson = False,
) -> None:
    """Find conversations by their title or by what is said in them; turns that an undo, a retry or an edit left behind
    are not searched."""
    from ..chat.sessions import short_id

    with _store() as store:
        found = store.search(text)
    if as_json:
        hits = [
            {**_summary(one), **({"message": hit.id, "role": hit.role, "content": hit.content} if hit else {})}
            for one, hit in found
        ]
        print(json.dumps(hits, ensure_ascii=False))
        return
    rows = [
        (short_id(one.id), age(one.updated), one.title, _excerpt(hit, text) if hit else "(in its title)")
        for one, hit in found
    ]
    for line in columns(("ID", "USED", "TITLE", "SAID"), rows) or [f"Nothing with {text!r}."]:
        print(line)


@sessions.command("export")
def export(
    name: Annotated[str | None, typer.Argument(metavar="[SESSION]", help="Its title or id; --all needs none.")] = None,
    kind: Annotated[str, typer.Option("--format", help="md to read, json with everything.")] = "md",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to [standard output].")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every conversation, as one JSON list.")] = False,
) -> None:
    """Write a conversation out as markdown or JSON."""
    if kind not in {"md", "json"}:
        raise ConfigError(f"--format is {kind!r}; it must be md or json")
    if every == (name is not None):
        raise ConfigError("name one SESSION to export, or give --all")
    with _store() as store:
        if every:
            whole = [json.loads(store.export(one.id, "json")) for one in store.sessions()]
            text = json.dumps(whole, ensure_ascii=False, indent=2) + "\n"
        else:
            text = store.export(store.find(str(name)).id, kind)
    if output is None:
        _write(text)
    else:
        _write_new(output, text)


@sessions.command("import")
def take_in(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `export --format json` or a rescue wrote.")],
) -> None:
    """Take conversations in that were written out as JSON."""
    from ..chat.sessions import from_json

    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except ValueError:
        raise ConfigError(f"{file} is not JSON; give what `mlxpaged sessions export --format json` wrote") from None
    try:
        read = [from_json(one) for one in (found if isinstance(found, list) else [found])]
        if not read:
            raise MlxpagedError(f"{file} holds no conversation")
        with _store(makes=True) as store:
            taken = store.take_in(read)
    except ConfigError as error:
        raise ConfigError(f"cannot import {file}: {error}") from error
    known = len(read) - taken
    here = f"; {known} {'was' if known == 1 else 'were'} here already" if known else ""
    complain(f"{taken} conversation{'s' * (taken != 1)} taken in from {file}{here}")


@sessions.command("rescue")
def rescue_damaged(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The damaged file [this user's own].")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to [a new file in the data folder].")
    ] = None,
) -> None:
    """Save what a damaged file still holds, for `import`."""
    from ..chat.rescue import rescue
    from ..chat.salvage import salvage
    from ..chat.session_file import session_path

    damaged = file or session_path()
    found = salvage(damaged)
    if output is not None:
        _write_new(output, json.dumps(found.records, ensure_ascii=False, indent=2) + "\n")
    saved = output or rescue(found.records, "rescued")
    if saved is None:
        raise MlxpagedError("no folder takes what can be read; free some space, or give --output a place")
    print(saved)
    told = f"{_counted(len(found.records), found.num_messages)} saved from {damaged}"
    lost = _counted(found.lost_sessions, found.lost_messages)
    complain(f"{told}; {f'at least {lost} could not be read' if lost else 'nothing is known to be missing'}")
    once = "" if file else f"once {damaged} is moved away with its -wal and -shm files, "
    complain(f"{once}`mlxpaged sessions import {saved}` takes them in")


@sessions.command("rename")
def rename(name: Name, title: Annotated[str, typer.Argument(help="The new title.")]) -> None:
    """Give a conversation a title."""
    from ..chat.sessions import short_id

    if not (title := " ".join(title.split())):
        raise ConfigError("a conversation needs a title to be found by; give it one that is not empty")
    with _store() as store:
        found = store.find(name)
        store.rename(found.id, title)
    complain(f"renamed {found.title!r} ({short_id(found.id)}) to {title!r}")


@sessions.command("rm")
def remove(
    names: Annotated[
        list[str], typer.Argument(metavar="SESSION...", help="Titles, ids, or 4 letters of an id as it is listed.")
    ],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
) -> None:
    """Delete conversations for good, with what is half written for them."""
    from ..tui.drafts import Drafts

    with _store() as store:
        found = list({one.id: one for one in map(store.find, names)}.values())
        if not yes and sys.stdin.isatty():
            typer.confirm(f"Delete {'; '.join(map(_described, found))} for good?", abort=True, err=True)
        for one in found:
            store.remove(one.id)
            Drafts.beside(store.path).drop(one.id)
            complain(f"deleted {_described(one)}")


@sessions.command("path")
def path() -> None:
    """Print where the conversations are kept."""
    from ..chat.session_file import session_path

    print(session_path())


@contextmanager
def _store(makes: bool = False) -> Iterator[Store]:
    """The user's own sessions. A file that cannot be used, or not in every part that was asked for, is an error here;
    where there is none, one is made only if `makes`."""
    from ..chat.session_file import session_path
    from ..chat.store import Store

    store = Store.open() if makes or session_path().exists() else Store(None)
    try:
        if store.problem:
            raise MlxpagedError(store.problem)
        yield store
        if store.problem:
            raise MlxpagedError(store.problem)
    finally:
        store.close()


def _summary(one: Session) -> dict[str, Any]:
    about = asdict(one) | {"interrupted": one.interrupted}
    del about["head"]
    return about


def _described(one: Session) -> str:
    from ..chat.sessions import short_id

    return f"{one.title!r} ({short_id(one.id)}), {_counted(0, one.num_messages) or 'no messages'}"


def _counted(num_sessions: int, num_messages: int) -> str:
    """Both in words, without those that are none; empty: there are neither."""
    counts = ((num_sessions, "conversation"), (num_messages, "message"))
    return " and ".join(f"{count} {noun}{'s' * (count != 1)}" for count, noun in counts if count)


def _excerpt(hit: Message, text: str) -> str:
    """The words around a hit, on one line."""
    content = " ".join(hit.content.split())
    at = max(0, content.casefold().find(text.casefold()))
    start = max(0, at - _EXCERPT // 3)
    cut = content[start : start + _EXCERPT]
    return f"{'…' * (start > 0)}{cut}{'…' * (start + _EXCERPT < len(content))}"


def _write_new(output: Path, text: str) -> None:
    """To a file that is not there yet."""
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{output} exists already; give --output another name") from None
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}; give --output another place") from error


def _write(text: str) -> None:
    """To stdout; a terminal gets no control characters of foreign text."""
    from ..chat.foreign import neutralise

    sys.stdout.write(neutralise(text) if sys.stdout.isatty() else text)
