"""Kernels that the tests of the command line name."""

import jax
import jax.numpy as jnp

from pallasite import gpu as plgpu

print("the file prints this when it is loaded")


def scale(x, *, factor=2.0):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] * factor

    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=out_type, kernel_name="scale")(x)


def add(x, y):
    def body(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] + y_ref[...]

    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=out_type, kernel_name="add")(x, y)


def add_args():
    return (jax.ShapeDtypeStruct((256,), jnp.float32),) * 2


def both(x):
    return add(scale(x), x)


both.example_inputs = (jax.ShapeDtypeStruct((128,), jnp.float32),)


def twice(x):
    return scale(x, factor=3.0) + scale(x)


twice.example_inputs = both.example_inputs


@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
    scratch_types=[plgpu.SMEM((64, 64), jnp.bfloat16), plgpu.Barrier()],
)
def copy(x_ref, out_ref, buffer, barrier):
    plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(buffer, out_ref)
    plgpu.wait_smem_to_gmem(0)


@plgpu.kernel(out_type=jax.ShapeDtypeStruct((128,), jnp.int32))
def zeros(out_ref):
    out_ref[...] = jnp.zeros((128,), jnp.int32)


def wrong(x):
    def body(x_ref, out_ref):
        raise ValueError("the body is wrong")

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def no_kernel(x):
    return x + 1


NUMBER = 3


class Case:
    def __init__(self, name, length):
        self.name = name
        self.function = scale
        self.make_inputs = lambda key: (jax.random.normal(key, (length,)),)


EXAMPLES = [Case("scale_128", 128), Case("scale_512", 512)]


@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
    scratch_types=[plgpu.SMEM((64, 64), jnp.bfloat16), plgpu.Barrier()],
    kernel_name="copy",
)
def filled_copy(x_ref, out_ref, buffer, barrier):
    plgpu.copy_gmem_to_smem(x_ref, buffer, barrier, oob_mode=plgpu.OOBFillMode.ZEROS)
    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(buffer, out_ref)
    plgpu.wait_smem_to_gmem(0)
