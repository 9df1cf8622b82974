"""Registers of the threads of a pipeline, and what its loops compile to."""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from tests.hopper.pipeline_support import BLOCK, pipeline

import pallasite
from pallasite import InvalidTypeError, InvalidValueError
from pallasite import gpu as plgpu
from pallasite.codegen.tools import find_tool


def compiled(num_compute_wgs, *, params=None, target="sm_90a", steps=8, **options):
    def body(x, y, o):
        def context(run):
            o[jax.lax.axis_index("wg")] = run(jnp.zeros(BLOCK))

        def step(_, x_block, y_block, total):
            return total + x_block[...] * y_block[...]

        pipeline(
            step,
            num_compute_wgs,
            grid=(steps,),
            in_specs=[plgpu.BlockSpec(BLOCK, lambda i: (i, 0))] * 2,
            compute_context=context,
            max_concurrent_steps=4,
            **options,
        )(x, y)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_compute_wgs, *BLOCK), jnp.float32),
        num_threads=num_compute_wgs + 1,
        thread_name="wg",
        compiler_params=params,
    )
    x = jax.ShapeDtypeStruct((steps * 16, 32), jnp.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assemble = find_tool("ptxas").path is not None
        return pallasite.compile(kernel, x, x, target=target, assemble=assemble)


@pytest.mark.parametrize(
    ("num_compute_wgs", "memory", "min_blocks", "at_launch", "compute"),
    [
        (2, 24, 1, 168, 240),
        (2, 40, 1, 168, 232),
        (2, 168, 1, 168, None),  # Nothing is left over.
        (3, 32, 1, 128, 160),
        (4, 24, 1, 96, 112),
        (6, 24, 1, 72, 80),
        (1, 24, 1, None, None),  # Two threads have all registers that they can address.
        (1, 24, 2, 128, 232),
        (2, 24, 2, 80, 104),
        (2, None, 1, None, None),
    ],
)
def test_split(num_compute_wgs, memory, min_blocks, at_launch, compute):
    """The sum does not exceed what the block is launched with, or a thread would wait forever."""
    params = plgpu.CompilerParams(min_blocks=min_blocks)
    kernel = compiled(num_compute_wgs, memory_registers=memory, params=params)
    changes = re.findall(r"setmaxnreg\.(\w+)\.sync\.aligned\.u32 (\d+);", kernel.ptx)
    if compute is None:
        assert changes == []
        return
    assert sorted(changes) == [("dec", str(memory)), ("inc", str(compute))]
    assert memory + num_compute_wgs * compute <= at_launch * (num_compute_wgs + 1)
    if kernel.resources.registers is not None:
        # With setmaxnreg, ptxas takes the whole share; without, only what is needed.
        assert kernel.resources.registers == at_launch
        assert kernel.resources.spill_store_bytes == 0


def test_targets_that_cannot_move_registers():
    assert "setmaxnreg" not in compiled(2, memory_registers=40, target="sm_90").ptx


def test_more_than_at_the_launch():
    with pytest.raises(InvalidValueError) as caught:
        compiled(3, memory_registers=136)
    lines = str(caught.value).splitlines()
    assert (
        "the producer warpgroup of a pipeline would have more registers than at the launch"
        in lines[0]
    )
    assert "test_pipeline_registers.py" in lines[0]
    assert lines[1] == "  got: memory_registers=136"
    assert lines[2] == (
        "  expected: at most 128: 4 threads share sm_90a's 65536 registers, min_blocks=1"
    )


@pytest.mark.parametrize(("count", "kind"), [(41, InvalidValueError), (16, InvalidValueError)])
def test_number_that_the_hardware_refuses(count, kind):
    with pytest.raises(kind, match=r"None, or a multiple of 8 from 24 to 256"):
        compiled(2, memory_registers=count)
    with pytest.raises(InvalidTypeError, match="memory_registers must be known while tracing"):
        compiled(2, memory_registers=40.0)


def test_loop_of_the_memory_thread_is_lean():
    """It waits for a slot, announces all bytes at once, and starts the copies; nothing else."""
    kernel = compiled(2, memory_registers=24)
    loops = re.split(r"\n(?=\$L__BB\d+_\d+:)", kernel.ptx)
    text = "".join(part for part in loops if "cp.async.bulk.tensor" in part)
    assert text.count("cp.async.bulk.tensor") == 2
    assert text.count("mbarrier.expect_tx") == 1
    assert kernel.ptx.count("mbarrier.try_wait") == 3  # For a slot, at the end, for the data.
    for absent in ("bar.sync", "div.", "rem.", "fence", "membar"):
        assert absent not in text
    # Barriers of the block: one for the initialisation of barriers; of a warpgroup: two for the
    # exchange of registers, two around the region of warps.
    assert kernel.ptx.count("bar.sync") <= 6
