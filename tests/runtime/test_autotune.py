"""Choosing configurations: the policy, what is kept on disk, and what is measured."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import pallasite
from pallasite import config
from pallasite.errors import ConfigError
from pallasite.runtime.tuning import encoding, policy


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A configuration like those of operations."""

    rows: int
    stages: int = 2


CANDIDATES = (Tiles(64), Tiles(128), Tiles(64, stages=4))
X = jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)


@pytest.fixture(autouse=True)
def _cache_of_the_test(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLASITE_CACHE_DIR", str(tmp_path / "cache"))
    policy._memory.clear()


def never(*_):
    raise AssertionError("nothing is to be run")


def remember(best, *args, name="op", version=1, key=None, candidates=CANDIDATES):
    """Writes what a measurement would."""
    listed = encoding.distinct(candidates, name)
    found = policy.entry_key(name, version, args, listed, key)
    policy.keep(name, found, {"best": encoding.encode(best)})


def choose(*args, name="op", version=1, key=None, candidates=CANDIDATES, default=Tiles(8)):
    return pallasite.choose(name, version, args, candidates, default, never, key=key)


# The policy ---------------------------------------------------------------------------------------


def test_off_is_the_default():
    remember(Tiles(128), X)
    assert config.get("autotune") == "off"
    assert choose(X) == Tiles(8)
    assert choose(X, candidates=never) == Tiles(8)


def test_cached_uses_what_was_measured():
    with config.scoped(autotune="cached"):
        assert choose(X) == Tiles(8)
        remember(Tiles(64, stages=4), X)
        assert choose(X) is CANDIDATES[2]
        assert choose(X, candidates=lambda: CANDIDATES) is CANDIDATES[2]


def test_what_the_choice_depends_on():
    remember(Tiles(128), X, 3)
    other = jax.ShapeDtypeStruct((256, 64), jnp.float16)
    with config.scoped(autotune="cached"):
        assert choose(X, 3) == Tiles(128)
        assert choose(jnp.zeros(X.shape, X.dtype), 3) == Tiles(128)
        assert choose(X, 4) == choose(other, 3) == choose(X) == Tiles(8)
        assert choose(X, 3, version=2) == choose(X, 3, name="op2") == Tiles(8)
        assert choose(X, 3, key="causal") == choose(X, 3, candidates=CANDIDATES[1:]) == Tiles(8)
        assert choose([X], 3) == choose([X, 3]) == Tiles(8)
        with pallasite.target("sm_90"):
            assert choose(X, 3) == Tiles(8)


def test_cached_while_tracing():
    remember(Tiles(128), X)
    seen = []

    def op(x):
        seen.append(choose(x))
        return x

    with config.scoped(autotune="cached"):
        jax.jit(op)(jnp.zeros(X.shape, X.dtype))
        jax.vmap(op)(jnp.zeros((3, *X.shape), X.dtype))
    assert seen == [Tiles(128)] * 2


def test_without_the_disk_cache_the_process_remembers(tmp_path):
    with config.scoped(autotune="cached", cache=False):
        remember(Tiles(128), X)
        assert choose(X) == Tiles(128)
    assert not (tmp_path / "cache").exists()
    with config.scoped(autotune="cached"):
        assert choose(X) == Tiles(8)


@pytest.mark.parametrize(
    ("given", "value"),
    [("off", "off"), ("0", "off"), ("On", "on"), ("true", "on"), (" cached ", "cached")],
)
def test_values_of_the_option(monkeypatch, given, value):
    monkeypatch.setenv("PALLASITE_AUTOTUNE", given)
    assert config.get("autotune") == value


def test_wrong_value_of_the_option():
    with pytest.raises(ConfigError, match="cached") as raised:
        config.update("autotune", "always")
    assert "measure what was not" in str(raised.value)
