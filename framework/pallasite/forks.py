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

_state = threading.Condition()
_busy: dict[int, int] = {}
"""By number of a thread, how many blocks of :func:`unforked` it is in."""
_waiting = 0
"""How many threads are about to fork; no other one enters a block until they have."""


@contextlib.contextmanager
def unforked() -> Iterator[None]:
    """Within the block no other thread forks this process, but for a very long block."""
    thread = threading.get_ident()
    with _state:
        if thread not in _busy:
            _state.wait_for(lambda: not _waiting, _MOST_SECONDS)
        _busy[thread] = _busy.get(thread, 0) + 1
    try:
        yield
    finally:
        with _state:
            _busy[thread] -= 1
            if not _busy[thread]:
                del _busy[thread]
                _state.notify_all()


def _before() -> None:
    global _waiting
    own = {threading.get_ident()}
    _state.acquire()
    _waiting += 1
    _state.wait_for(lambda: _busy.keys() <= own, _MOST_SECONDS)


def _in_parent() -> None:
    global _waiting
    _waiting -= 1
    _state.notify_all()
    _state.release()


def _in_child() -> None:
    global _state, _waiting
    _state, _waiting = threading.Condition(), 0
    own = threading.get_ident()
    for thread in [one for one in _busy if one != own]:
        del _busy[thread]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
