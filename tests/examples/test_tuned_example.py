"""The example that is tuned: all its configurations work, and the one that was measured is used."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from examples import tuned


def test_default_configuration():
    x = jax.ShapeDtypeStruct((2**14,), jnp.float32)
    kernel = pallasite.compile(tuned.swish, x, target="sm_90a")
    assert kernel.launch.block == (128, 1, 1)
    assert kernel.launch.grid == (16, 1, 1)


@pytest.mark.runs_kernels
def test_what_was_measured_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLASITE_CACHE_DIR", str(tmp_path))
    ran = []

    def measure(trials, repeats):
        ran.append(len(trials))
        return [
            1 / (trial.configuration.warpgroups * trial.configuration.elements) for trial in trials
        ]

    x = jnp.asarray(np.random.default_rng(0).normal(size=2**13).astype(jnp.float32))
    name, version, configs = "examples.swish", tuned.VERSION, tuned.CONFIGS
    with pallasite.config.scoped(autotune="on"):
        best = pallasite.choose(
            name,
            version,
            (x,),
            configs,
            configs[0],
            tuned.swish_with,
            measure=measure,
            check=jax.nn.swish,
        )
    assert best == tuned.Config(4, 2048) and ran[0] == len(configs)
    with pallasite.config.scoped(autotune="cached"):
        kernel = pallasite.compile(tuned.swish, x)
        np.testing.assert_allclose(jax.jit(tuned.swish)(x), jax.nn.swish(x), rtol=1e-5, atol=1e-6)
    assert kernel.launch.block == (512, 1, 1)
    assert kernel.launch.grid == (1, 1, 1)
