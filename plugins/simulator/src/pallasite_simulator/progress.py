"""A progress bar for long grids."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

PATIENCE_SECONDS = 2.0
"""A run that is over before shows no bar, unless one was asked for."""


@contextlib.contextmanager
def bar(name: str, blocks: int, wanted: bool | None) -> Iterator[Callable[[int], None] | None]:
    """A function to be called with the number of blocks that have ended.

    Args:
      name: of the kernel.
      blocks: how many there are.
      wanted: whether to show a bar; None for a terminal only, and only if the run takes long.
    """
    if wanted is None and not sys.stderr.isatty():
        wanted = False
    if wanted is False:
        yield None
        return
    from tqdm import tqdm

    with tqdm(
        total=blocks,
        desc=name,
        unit="block",
        file=sys.stderr,
        delay=0 if wanted else PATIENCE_SECONDS,
        dynamic_ncols=True,
        leave=bool(wanted),
    ) as shown:

        def update(done: int) -> None:
            shown.update(done - shown.n)

        yield update
