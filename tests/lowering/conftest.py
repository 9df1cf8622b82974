"""Fixtures of the tests of lowering."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def x64() -> Iterator[None]:
    """Permits 64-bit types in a test."""
    with jax.enable_x64(True):
        yield
