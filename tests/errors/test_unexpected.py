"""What is nobody's bad input: exceptions of the user's own code, and defects of rules."""

from __future__ import annotations

import traceback

import jax.numpy as jnp
import pytest
from refusals import array, build, make, normalised

from pallasite import gpu as plgpu
from pallasite.errors import InternalError, InvalidValueError
from pallasite.layouts import transforms
from pallasite_std.inference import relations


def test_exceptions_of_the_body_pass_through():
    @make()
    def kernel(x_ref, o_ref):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        build(kernel)


def test_failing_rule(monkeypatch):
    monkeypatch.setattr(transforms, "transpose", lambda layout, permutation: None)
    lane = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)

    @make((64, 128), compiler_params=lane)
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].T  # here

    with pytest.raises(InternalError) as caught:
        build(kernel, array(128, 64))
    assert normalised(str(caught.value), test_failing_rule) == (
        "HERE: the rule of primitive transpose failed: AttributeError:"
        " 'NoneType' object has no attribute 'registers'\n"
        "  got: operands float32[128,64]\n"
        "  try: report this; no kernel should make a rule fail like this"
    )
    assert isinstance(caught.value.__cause__, AttributeError)


def test_failing_inference(monkeypatch):
    monkeypatch.setattr(transforms, "transpose", lambda layout, permutation: None)
    relations.transpose.cache_clear()

    @make((64, 128))
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].T  # here

    with pytest.raises(InternalError) as caught:
        build(kernel, array(128, 64))
    assert normalised(str(caught.value), test_failing_inference) == (
        "HERE: the layout inference of primitive transpose failed: AttributeError:"
        " 'NoneType' object has no attribute 'layout'\n"
        "  got: layouts [128, 64]:[(register 16 warp 4 lane 2/16), (lane 16 vector 4)] and None\n"
        "  try: report this; no kernel should make a rule fail like this"
    )
    assert isinstance(caught.value.__cause__, AttributeError)


def test_tracebacks_show_the_line_of_the_kernel():
    tiles = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    tile = plgpu.SMEM((64, 32), jnp.float32, transforms=tiles)

    @make((64, 63), scratch_types=[tile, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[:, 1:33], tile, barrier)  # here

    with pytest.raises(InvalidValueError) as caught:
        build(kernel, array(64, 64))
    text = "".join(traceback.format_exception(caught.value))
    last = text.rstrip().splitlines()[-1]
    assert last.endswith(": plgpu.copy_gmem_to_smem(x_ref.at[:, 1:33], tile, barrier)  # here")
    assert "# here" not in str(caught.value)
