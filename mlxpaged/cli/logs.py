"""What the library logs, as a person sees it. Owns the one handler: a line on stderr per warning, the traceback only
with --debug."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PACKAGE = "mlxpaged"


class _Lines(logging.Handler):
    """Gives every record's message to `say`."""

    def __init__(self, say: Callable[[str], None], debug: bool) -> None:
        super().__init__(logging.WARNING)
        self.say = say
        self._debug = debug

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())
        if self._debug and record.exc_info:
            print(logging.Formatter().formatException(record.exc_info), file=sys.stderr)


@contextmanager
def logged_to(say: Callable[[str], None], debug: bool = False) -> Iterator[None]:
    """Inside, warnings of ours go to `say` (called on any thread) and nowhere else."""
    logger = logging.getLogger(_PACKAGE)
    before, propagated = logger.handlers[:], logger.propagate
    logger.handlers, logger.propagate = [_Lines(say, debug)], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before, propagated
