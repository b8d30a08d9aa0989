"""How a command ends. Owns the one line an error becomes, its exit code and the traceback log; prints nothing to
stdout."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

import typer

from .. import paths
from ..chat.foreign import neutralise
from ..errors import MlxpagedError

INTERRUPTED = 130
_USAGE = 2
_NOT_WRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""What writing to stdout may raise, without the name of a file; files of our own are told by whoever writes them."""

# Newer typer carries click inside itself, older typer depends on it: the bases are the same classes in both.
_UsageError, _ClickError = typer.BadParameter.__mro__[1:3]


def complain(message: str) -> None:
    """One line on stderr; line breaks and control characters in `message` are made harmless."""
    line = " ".join(neutralise(message).split())
    with contextlib.suppress(BrokenPipeError):
        print(f"mlxpaged: {line}", file=sys.stderr, flush=True)


def fill_missing_streams() -> None:
    """A stream that this process was started without (`>&-`) becomes /dev/null, so that no file or socket opened
    later gets its number. Stdout's refuses what is written: an answer that nobody can read is a failure."""
    for name, mode, flags in (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, flags)
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode, encoding="utf-8", errors="backslashreplace"))


def exit_code_of(command: Callable[[], object], debug: bool) -> int:
    """Runs `command`; every way it can end becomes an exit code and at most one line on stderr.

    `debug` shows the traceback of an unexpected exception instead of only saving it.
    """
    try:
        result = command()
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except MlxpagedError as error:
        complain(str(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return _stdout_closed()
    except SystemExit as ending:  # what click makes of a closed pipe
        if not isinstance(ending.__context__, BrokenPipeError):
            raise
        return _stdout_closed()
    except Exception as error:
        if isinstance(error, _ClickError):
            return _usage_error(error)
        if reason := _not_written(error):
            complain(f"stdout cannot be written: {reason}")
            _abandon_stdout()
            return 1
        return _unexpected(error, debug)


def leave(code: int) -> NoReturn:
    """Ends the process with `code`, at once where weights are still read on the engine's thread: that cannot be
    interrupted, and the interpreter's own slow end would pull Python away from under it."""
    if any(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _not_written(error: Exception) -> str | None:
    """Why stdout did not take what was written; None: the error is about something else."""
    if not isinstance(error, OSError) or error.filename is not None:
        return None
    if error.errno == errno.EBADF and _is_read_only(sys.stdout):
        return "it is closed"
    return error.strerror if error.errno in _NOT_WRITTEN else None


def _is_read_only(stream: TextIO) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return fcntl.fcntl(stream.fileno(), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    return False


def _usage_error(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # a group of commands without one of them
        print(error.format_message(), file=sys.stderr)  # type: ignore[attr-defined]
        return _USAGE
    help_hint = f" (see {context.command_path} --help)" if context else ""
    complain(error.format_message().rstrip(".") + help_hint)  # type: ignore[attr-defined]
    return _USAGE if isinstance(error, _UsageError) else 1


def _unexpected(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
        hint = ""
    elif saved := _save_traceback(error):
        hint = f"; the traceback is in {saved}, --debug shows it"
    else:
        hint = "; mlxpaged --debug COMMAND shows the traceback"
    complain(f"unexpected {type(error).__name__}: {error}{hint}")
    return 1


def _save_traceback(error: Exception) -> Path | None:
    """Writes the log for the last unexpected error only; None where it cannot be written."""
    try:
        folder = paths.state_dir()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = folder / "last-error.log"
        log.unlink(missing_ok=True)
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
        return log
    except OSError:
        return None


def _stdout_closed() -> int:
    """Whoever read stdout has seen enough, which is no failure."""
    _abandon_stdout()
    return 0


def _abandon_stdout() -> None:
    """Nothing can be written to stdout any more: keeps the interpreter from complaining when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
