"""Interpretation: kernels that run on the CPU whatever the program is for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite.runtime.override import override

OUT = jax.ShapeDtypeStruct((128,), jnp.int32)


def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def is_launched(function):
    """Whether a program for a GPU launches the kernel; a stand-in interprets."""

    def run(compiled, x):
        return [jax.lax.sin(x.astype(jnp.float32)).astype(x.dtype)]

    with override(run=run):
        text = function.trace(X).lower(lowering_platforms=("cuda",)).as_text()
    launched = "triton_kernel_call_ffi" in text
    assert launched != ("sine" in text)
    return launched


X = jnp.arange(128, dtype=jnp.int32)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("interpret", [True, plgpu.InterpretGPUParams(detect_races=True)])
def test_numbers(interpret):
    """An interpreted kernel computes the same."""
    kernel = plgpu.kernel(double, out_type=OUT, interpret=interpret)
    np.testing.assert_array_equal(kernel(X), 2 * np.arange(128))


def test_in_a_program_for_a_gpu():
    """Such a program does not launch; the trace of one mode is not used in the other."""
    kernel = jax.jit(plgpu.kernel(double, out_type=OUT))
    assert is_launched(kernel)
    with plgpu.force_gpu_interpret_mode():
        assert not is_launched(kernel)
    assert is_launched(kernel)
    assert not is_launched(jax.jit(plgpu.kernel(double, out_type=OUT, interpret=True)))
    call = pl.pallas_call(double, out_shape=OUT, compiler_params=plgpu.CompilerParams())
    assert is_launched(jax.jit(call))
    with plgpu.force_gpu_interpret_mode():
        assert not is_launched(jax.jit(call))


def test_process_wide_mode():
    """A ``with`` block wins over it, and None ends it."""
    kernel = jax.jit(plgpu.kernel(double, out_type=OUT))
    plgpu.set_gpu_interpret_mode()
    try:
        assert not is_launched(kernel)
        with plgpu.force_gpu_interpret_mode(None):
            assert is_launched(kernel)
    finally:
        plgpu.set_gpu_interpret_mode(None)
    assert is_launched(kernel)


@pytest.mark.parametrize("made_by", ["kernel", "pallas_call"])
def test_races_are_looked_for(made_by):
    """``detect_races`` is the option ``sanitize`` of the executor."""

    def make(params):
        if made_by == "kernel":
            return plgpu.kernel(double, out_type=OUT, interpret=params)
        return pl.pallas_call(
            double, out_shape=OUT, interpret=params, compiler_params=plgpu.CompilerParams()
        )

    from pallasite import config

    seen = []

    def run(compiled, *operands):
        seen.append(config.get("sanitize"))
        return [jnp.zeros(OUT.shape, OUT.dtype)]

    with override(run=run), config.scoped(sanitize=False):
        for races in (False, True):
            params = plgpu.InterpretGPUParams(detect_races=races)
            jax.jit(make(params))(X)
    assert seen == [False, True]


@pytest.mark.parametrize(
    "arguments, error",
    [
        (dict(skip_floating_point_ops=True), UnsupportedError),
        (dict(uninitialized_memory="zero"), UnsupportedError),
        (dict(out_of_bounds_reads="uninitialized"), UnsupportedError),
        (dict(num_cores_or_threads=0), InvalidValueError),
        (dict(inline_mgpu="run"), InvalidValueError),
    ],
)
def test_refused_parameters(arguments, error):
    """What cannot be done is said where the parameters are made."""
    (name,) = arguments
    with pytest.raises(error, match=name):
        plgpu.InterpretGPUParams(**arguments)


def test_parameters_of_another_backend():
    """They are an error where the kernel is made."""
    with pytest.raises(InvalidTypeError, match="interpret is of no kind"):
        plgpu.kernel(double, out_type=OUT, interpret=object())
    with pytest.raises(InvalidTypeError, match="InterpretGPUParams"):
        plgpu.set_gpu_interpret_mode(3)
