"""What the warp-specialised pipeline refuses, and what it says."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from tests.hopper.pipeline_support import BLOCK, on_threads, pipeline

from pallasite import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite import gpu as plgpu

SPEC = plgpu.BlockSpec(BLOCK, lambda i: (i, 0))
ARRAY = jax.ShapeDtypeStruct((64, 32), jnp.float32)


def refused(kind, body, *, num_threads=2, **options):
    kernel = on_threads(num_threads - 1, (64, 32), body, **options)
    with pytest.raises(kind) as caught:
        jax.eval_shape(kernel, ARRAY)
    message = str(caught.value)
    assert "/tests/hopper/" in message.splitlines()[0]  # Here, or in the helper that emits it.
    return message


def arguments_refused(kind, **options):
    def body(x, o):
        pipeline(lambda *_: None, **(dict(grid=(4,), in_specs=[SPEC]) | options))(x)

    return refused(kind, body)


@pytest.mark.parametrize(
    ("kind", "options", "texts"),
    [
        (
            UnsupportedError,
            dict(memory_thread_idx=0),
            ["is not the last thread", "got: memory_thread_idx=0", "memory_thread_idx=1"],
        ),
        (InvalidValueError, dict(grid=(4, 0)), ["grid[1] of a pipeline is not positive"]),
        (InvalidValueError, dict(max_concurrent_steps=0), ["max_concurrent_steps is too small"]),
        (InvalidValueError, dict(num_compute_wgs=0), ["num_compute_wgs is too small"]),
        (
            InvalidValueError,
            dict(in_specs=[plgpu.BlockSpec(BLOCK, lambda i: (i, 0), delay_release=2)]),
            ["delay_release is not below max_concurrent_steps", "try: max_concurrent_steps=3"],
        ),
        (
            InvalidValueError,
            dict(out_specs=[plgpu.BlockSpec(BLOCK, lambda i: (i, 0), collective_axes=("x",))]),
            ["an output of a pipeline has collective_axes"],
        ),
        (
            InvalidValueError,
            dict(in_specs=[plgpu.BlockSpec(BLOCK, lambda i: (i, 0), collective_axes=("x",))]),
            ["there is no axis named 'x'"],
        ),
        (
            InvalidTypeError,
            dict(in_specs=[SPEC, SPEC]),
            ["2 inputs and 0 outputs got 1 references"],
        ),
        (InvalidValueError, dict(in_specs=[None]), ["do not have the structure"]),
        (InvalidValueError, dict(in_specs=[[SPEC]]), ["do not have the structure of the input"]),
        (InvalidTypeError, dict(in_specs=["a"]), ["input 0 has no block spec"]),
        (
            InvalidValueError,
            dict(in_specs=[plgpu.BlockSpec((16,), lambda i: (i,))]),
            ["the block shape of input 0 does not have the rank of the array"],
        ),
        (InvalidValueError, dict(wg_axis="warp"), ["no axis named 'warp'", "thread_name"]),
        (
            InvalidValueError,
            dict(num_compute_wgs=2),
            ["num_compute_wgs=2 needs 3 threads", "got: num_threads=2"],
        ),
        (InvalidValueError, dict(pipeline_state=7), ["pipeline_state is unknown", "got: 7"]),
        (InvalidTypeError, dict(pipeline_state=1.0), ["pipeline_state is not an integer scalar"]),
        (
            InvalidValueError,
            dict(pipeline_state=plgpu.PipelinePipeline.START),
            ["a pipeline with a pipeline_state has no allocations", "get_allocations"],
        ),
        (
            InvalidValueError,
            dict(compute_context=lambda run: None),
            ["compute_context of a pipeline does not call the pipeline"],
        ),
        (
            InvalidValueError,
            dict(compute_context=lambda run: (run(None), run(None))),
            ["calls the pipeline more than once"],
        ),
    ],
)
def test_arguments(kind, options, texts):
    message = arguments_refused(kind, **options)
    for text in texts:
        assert text in message, message


def test_operand_in_shared_memory():
    def body(x, o, scratch):
        pipeline(lambda *_: None, grid=(4,), in_specs=[SPEC])(scratch)

    scratch = [plgpu.SMEM((64, 32), jnp.float32)]
    assert "input 0 of a pipeline is not in global memory" in refused(
        InvalidValueError, body, scratch_types=scratch
    )


@pytest.mark.parametrize("other", [dict(in_specs=[SPEC, SPEC]), dict(max_concurrent_steps=3)])
def test_allocations_of_another_pipeline(other):
    def body(x, o):
        one = pipeline(lambda *_: None, grid=(4,), in_specs=[SPEC])
        two = pipeline(lambda *_: None, **(dict(grid=(4,), in_specs=[SPEC]) | other))
        count = len(other.get("in_specs", [SPEC]))
        pl.run_scoped(
            lambda allocations: two(*[x] * count, allocations=allocations),
            one.get_allocations(x),
            collective_axes="wg",
        )

    assert "allocations " in refused(InvalidValueError, body)


def test_signature():
    """It takes the parameters that upstream's takes, and has its states."""
    import jax.experimental.pallas.mosaic_gpu as upstream

    ours = inspect.signature(plgpu.emit_pipeline_warp_specialized).parameters
    theirs = inspect.signature(upstream.emit_pipeline_warp_specialized).parameters
    # A former name of a parameter comes last.
    assert list(ours) == [*theirs, "manual_ready_barriers"]
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    for state in upstream.PipelinePipeline:
        assert plgpu.PipelinePipeline[state.name] == state.value
