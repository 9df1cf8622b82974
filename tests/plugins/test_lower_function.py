"""A rule that is a JAX function: ``lower_function``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from pallasite import gpu as plgpu
from pallasite import plugins
from pallasite.plugin import RuleSet, Semantics, hookimpl
from pallasite.plugin.lowering import lower_function

softplus_p = Primitive("softplus_of_a_test")
softplus_p.def_abstract_eval(lambda x: x)

rules = RuleSet()


@rules.lowering(softplus_p, Semantics.LANE)
def _softplus(ctx, x):
    (result,) = lower_function(ctx, lambda x: jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-abs(x))), x)
    return result


class Plugin:
    @hookimpl
    def pallasite_lowering_rules(self):
        return rules.lowering_rules


@pytest.fixture
def plugin():
    plugins.register(Plugin(), name="softplus")
    yield
    plugins.unregister("softplus")


def test_a_function_is_lowered_in_place(plugin, semantics):
    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((64, 32), jnp.float32))
    def kernel(x_ref, o_ref):
        o_ref[...] = softplus_p.bind(x_ref[...]) * 2

    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32) * 4
    expected = 2 * np.logaddexp(0, x.astype(np.float64))
    np.testing.assert_allclose(np.asarray(kernel(x)), expected, rtol=1e-5)
