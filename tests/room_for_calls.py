"""Room for the frames of calls, so that none of them needs memory of its own.

Python keeps frames in pieces of 16 KiB. A call that begins a piece gets it from the system, and its
end gives it back: where such a call is in a loop, under the many of pytest and JAX, each round
takes two system calls and a page fault or more. A frame that says it needs much gets a large piece,
where those above it find room as well.
"""

from __future__ import annotations

from typing import Any

import _pytest.main as pytest_main

_SLOTS = (1 << 17) + (1 << 10)
"""Of 8 bytes. A piece has a power of two of them: the other half is for the frames above."""


def call(function: Any, *operands: Any) -> Any:
    """Calls a function where there is room for a thousand frames; what is not used is no memory."""
    return function(*operands)


call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)


def have() -> None:
    """This process collects and runs its tests where there is room."""
    main = pytest_main._main
    pytest_main._main = lambda config, session: call(main, config, session)
