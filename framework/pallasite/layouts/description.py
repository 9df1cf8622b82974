"""Short names of register layouts for messages."""

from __future__ import annotations

from collections.abc import Callable

from pallasite.layouts.construct import strided
from pallasite.layouts.registers import Layout, RegisterLayout, SplatLayout

type Namer = Callable[[RegisterLayout], str | None]

_namers: list[Namer] = []


def name_layouts_by(namer: Namer) -> None:
    """Adds a function that knows names of layouts; asked after those added before it."""
    _namers.append(namer)


def describe(layout: Layout) -> str:
    """A short name: one that a plugin contributed, ``strided(vector 4)``, ``splat``, or the digits.

    This module knows none by itself, so that values and their messages do not depend on plugins.
    """
    if isinstance(layout, SplatLayout):
        return "splat"
    assert isinstance(layout, RegisterLayout)
    for namer in _namers:
        name = namer(layout)
        if name is not None:
            return name
    if not layout.is_padded and layout == strided(layout.shape, layout.vector_length):
        return f"strided(vector {layout.vector_length})"
    return str(layout)
