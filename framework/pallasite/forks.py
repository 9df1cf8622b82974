"""Forking a process in which several threads compile.

A child has only the thread that forked. Locks that another one held stay locked in it for ever:
those of this package, of Python's imports and of LLVM. So a fork waits until no other thread is in
the middle of something that holds some.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_MOST_SECONDS = 20.0
"""How long a fork waits. Whoever waits for the thread that forks would wait for ever otherwise."""

_lock = threading.RLock()  # Whose ways in and out no interrupt divides, as it does a condition's.
_state = threading.Condition(_lock)
_busy: dict[object, int] = {}
"""The blocks of :func:`unforked` that threads are in, and the numbers of these."""
_waiting = 0
"""How many threads are about to fork; no other one enters a block until they have."""


@contextlib.contextmanager
def unforked() -> Iterator[None]:
    """Within the block no other thread forks this process, but for a very long block."""
    thread, block = threading.get_ident(), object()
    try:
        with _lock:
            if thread not in _busy.values():
                _state.wait_for(lambda: not _waiting, _MOST_SECONDS)
            _busy[block] = thread
        yield
    finally:
        _busy.pop(block, None)  # Before anything that an interrupt could keep from happening.
        with _lock:
            _state.notify_all()


def _before() -> None:
    global _waiting
    own = {threading.get_ident()}
    _state.acquire()
    _waiting += 1
    _state.wait_for(lambda: own.issuperset(_busy.values()), _MOST_SECONDS)


def _in_parent() -> None:
    global _waiting
    _waiting -= 1
    _state.notify_all()
    _state.release()


def _in_child() -> None:
    global _lock, _state, _waiting
    _lock, _waiting = threading.RLock(), 0
    _state = threading.Condition(_lock)
    own = threading.get_ident()
    for block in [one for one, thread in _busy.items() if thread != own]:
        del _busy[block]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
