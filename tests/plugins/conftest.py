"""What tests of plugins share."""

from __future__ import annotations

import pytest

from pallasite import plugins


@pytest.fixture
def registered():
    """A function that registers a plugin until the test ends."""
    names = []

    def register(one, name="bad"):
        names.append(plugins.register(one, name))

    yield register
    for name in names:
        plugins.unregister(name)
