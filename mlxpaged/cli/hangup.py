"""What happens when the terminal goes away under a full-screen app: it ends. Owns the watch; draws and saves nothing.

Textual reads a closed terminal again and again and waits for ever to write to it, so a window that was closed where no
SIGHUP is sent (no controlling terminal, or one that was told to ignore it) would leave a process behind that takes a
whole core.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable

GRACE_S = 2.0
"""How long the app may take to leave by itself; what was said is saved while it is said."""

HUNG_UP = 128 + signal.SIGHUP if hasattr(signal, "SIGHUP") else 1


def end_with_terminal(leave: Callable[[], object], fd: int = 0) -> None:
    """From now on the process ends when the terminal behind `fd` is gone: by SIGHUP, or else `leave` is called from a
    thread, and the process ends hard if that does not help. Costs nothing meanwhile."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    threading.Thread(target=_watch, args=(leave, fd), name="terminal-watch", daemon=True).start()


def _watch(leave: Callable[[], object], fd: int) -> None:
    if not hasattr(select, "poll"):
        return
    poller = select.poll()
    poller.register(fd, 0)  # a hang-up is told without being asked for
    found = poller.poll()
    if not any(event & select.POLLHUP for _, event in found):
        return  # macOS cannot poll every terminal, and says so at once
    end = threading.Timer(GRACE_S, os._exit, (HUNG_UP,))
    end.daemon = True
    end.start()
    leave()
