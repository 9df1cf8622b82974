"""The end of processes that pytest-xdist has started: without freeing what they have.

Python would look for garbage in some GiB of objects and free them one by one, which takes as long
as hundreds of tests do.
"""

from __future__ import annotations

import atexit
import os
import sys

_processes: set[int] = set()


def be_quick() -> None:
    """This process ends as soon as all has been done that is to be done at its end.

    Its exit status is 0 then, at which pytest-xdist does not look.
    """
    _processes.add(os.getpid())


def _leave() -> None:
    if os.getpid() in _processes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


# What is registered later is done earlier: this module is imported before those that do so.
atexit.register(_leave)
