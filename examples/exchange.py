"""Two devices exchange what they have: each stores its part in the memory of the other.

    pallasite run examples/exchange.py::exchange --arg 'f32[1024]' --devices 2 --statistics

The kernel runs on every device of a mesh, inside `jax.shard_map`. `plgpu.remote_ref` is the same
array on another device, and `pl.semaphore_signal` with `device_id` tells that device that its
array is complete. Where JAX has no GPU, the simulator runs all devices at once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec

from pallasite import gpu as plgpu


def _swap(x_ref, out_ref, arrived):
    other = 1 - lax.axis_index("x")
    # Until all devices have begun, the kernel does not: the other one's array is there.
    plgpu.remote_ref(out_ref, other)[...] = x_ref[...]
    # A signal makes what was stored before it visible to the device that waits for it.
    pl.semaphore_signal(arrived, device_id=other)
    pl.semaphore_wait(arrived)


def exchange(x: jax.Array) -> jax.Array:
    """Swaps the halves of an array that lie on two devices."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    half = jax.ShapeDtypeStruct((x.shape[0] // 2, *x.shape[1:]), x.dtype)
    kernel = plgpu.kernel(_swap, out_type=half, scratch_types=[plgpu.SemaphoreType.REGULAR])
    parts = PartitionSpec("x")
    swapped = jax.shard_map(kernel, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False)
    result: jax.Array = swapped(x)
    return result


def main() -> None:
    """Exchanges, and compares."""
    x = jnp.arange(1024, dtype=jnp.float32)
    np.testing.assert_array_equal(jax.jit(exchange)(x), np.roll(x, 512))
    print("exchanged")


if __name__ == "__main__":
    main()
