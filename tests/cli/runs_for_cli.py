"""Kernels that the tests of ``pallasite run`` name, with checks and mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu

OUT = jax.ShapeDtypeStruct((512,), jnp.float32)


@plgpu.kernel(out_type=OUT, grid=(4,), grid_names=("i",))
def triple(x_ref, out_ref):
    window = pl.ds(jax.lax.axis_index("i") * 128, 128)
    out_ref[window] = x_ref[window] * 3


def triple_args():
    return (OUT,)


def triple_check(inputs, output):
    return np.array_equal(np.asarray(output), 3 * np.asarray(inputs[0]))


def thrice(x):
    return triple(triple(triple(x)))


def thrice_args():
    return (jnp.ones(512, jnp.float32),)


def thrice_check(inputs, output):
    assert np.asarray(output)[0] == 26, "27, not 26"


@plgpu.kernel(out_type=OUT)
def beyond(x_ref, out_ref):
    out_ref[...] = x_ref[pl.ds(jnp.int32(x_ref[0]), 512)]


@plgpu.kernel(out_type=OUT, scratch_types=[plgpu.SMEM((512,), jnp.float32)])
def forgetful(x_ref, out_ref, tile):
    out_ref[...] = tile[...] + x_ref[...]


@plgpu.kernel(out_type=OUT)
def talkative(x_ref, out_ref):
    pl.debug_print("first: {}", x_ref[0])
    out_ref[...] = x_ref[...]


def fails(x):
    raise RuntimeError("no luck")


class Case:
    def __init__(self, name, function, factor):
        self.name = name
        self.function = function
        self.factor = factor

    def make_inputs(self, key):
        return (jax.random.normal(key, (512,)),)

    def check(self, inputs, output):
        error = float(np.max(np.abs(np.asarray(output) - self.factor * np.asarray(inputs[0]))))
        assert error < 1e-3, f"error {error:.1f}"
        return error


EXAMPLES = [Case("right", triple, 3), Case("wrong", triple, 300)]
