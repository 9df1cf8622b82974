"""``with pallasite.target(...)``: what is traced and compiled inside is for that target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pallasite import config
from pallasite.target_selection import find_target
from pallasite.targets import Target


def target(name: str) -> contextlib.AbstractContextManager[None]:
    """Compiles for a target within a ``with`` block, in the present thread or task only.

    Raises:
      TargetError: there is no target of that name, or its plugin is missing.
    """
    find_target(name)
    return traced_for(name)


@contextlib.contextmanager
def traced_for(target: str | Target | None) -> Iterator[None]:
    """What is traced inside is for a target; None uses the configuration.

    Operations of ``pallasite.ops`` choose their implementation while they are traced, so the target
    is part of the keys of JAX's caches of traces, as options are.
    """
    if target is None:
        yield
        return
    name = target.name if isinstance(target, Target) else target
    with config.scoped(target=name):
        yield
