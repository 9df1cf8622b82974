"""``plgpu.as_torch_kernel`` with PyTorch itself on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasite import gpu as plgpu

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SHAPE = (256, 128)


def through_shared_memory(x_ref, y_ref, o_ref, x_smem, out_smem, barrier):
    i = jax.lax.axis_index("i")
    window = jax.experimental.pallas.ds(i * 64, 64)
    plgpu.copy_gmem_to_smem(x_ref.at[window], x_smem, barrier)
    plgpu.barrier_wait(barrier)
    out_smem[...] = x_smem[...] + y_ref[window]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, o_ref.at[window])
    plgpu.wait_smem_to_gmem(0)


def kernel(dtype):
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        through_shared_memory,
        out_type=jax.ShapeDtypeStruct(SHAPE, dtype),
        scratch_types=[
            plgpu.SMEM((64, 128), dtype, transforms=transforms),
            plgpu.SMEM((64, 128), dtype, transforms=transforms),
            plgpu.Barrier(),
        ],
        grid=(4,),
        grid_names=("i",),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers(dtype):
    """Copies by TMA, two kernels in a row, a stream of the user's, and a CUDA graph."""
    add = kernel(jnp.dtype(dtype))
    call = plgpu.as_torch_kernel(lambda x, y: add(add(x, y), y))
    x, y = (
        torch.randint(-50, 50, SHAPE, device="cuda").to(getattr(torch, dtype)) for _ in range(2)
    )
    expected = x + y + y
    assert torch.equal(call(x, y), expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = call(x, y)
    stream.synchronize()
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x, y)
    x.copy_(x + 1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected + 1)


def test_in_place():
    """An output that shares memory with an argument is that argument."""

    def increment(x_ref, o_ref):
        o_ref[...] = o_ref[...] + 1

    step = plgpu.kernel(
        increment,
        out_type=jax.ShapeDtypeStruct((128,), jnp.int32),
        input_output_aliases={0: 0},
    )
    x = torch.arange(128, dtype=torch.int32, device="cuda")
    assert plgpu.as_torch_kernel(step)(x) is x
    np.testing.assert_array_equal(x.cpu().numpy(), np.arange(128) + 1)
