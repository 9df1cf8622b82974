"""Programs on two GPUs, of one process or of two: what the tests of both begin with and run."""

from __future__ import annotations

START = """
    import os, sys, time
    import jax, jax.numpy as jnp, numpy as np
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from acting import Acting, kernel_of
    from pallasite import config, plugins
    from pallasite import gpu as plgpu
    import pallasite_multigpu
    from pallasite_multigpu import ops

    plugins.register(Acting(), name="acting")
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def on(function, in_specs=P("x"), out_specs=P("x"), mesh=mesh):
        return jax.shard_map(
            function, mesh=mesh, check_vma=False, in_specs=in_specs, out_specs=out_specs
        )

    def put(x, spec=P("x"), mesh=mesh):
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda at: x[at])

    def swapped(x):
        return np.roll(np.asarray(x), len(x) // 2, axis=0)

    def check(array, whole, tolerance=0.0):
        for shard in array.addressable_shards:
            found = np.asarray(shard.data).astype(np.float64)
            np.testing.assert_allclose(found, np.asarray(whole)[shard.index], tolerance, tolerance)

    def done(what):
        print("done", what, flush=True)

    random = np.random.default_rng(0)
    x = random.standard_normal(8192).astype(np.float32)
    pull = kernel_of("pull", size=4096)
"""

LOOPS = """
    f = jax.jit(on(pull))
    y = put(x)
    for _ in range(1000):
        y = f(y)
    check(y, x)
    done("1000 launches")
    f = jax.jit(on(lambda x: lax.fori_loop(0, 1001, lambda i, y: pull(y), x)))
    check(f(put(x)), swapped(x))
    done("loop")
    f = jax.jit(on(pull), donate_argnums=0)
    y = put(x)
    for _ in range(101):
        y = f(y)
    check(y, swapped(x))
    done("donated")
"""

MIXED = """
    other = kernel_of("pull", size=4096, name="another")

    def several(x):
        for _ in range(3):
            x = lax.psum(x, "x") * 0.5 + pull(x)
            x = other(x * 0.5)
        return x

    z = x.astype(np.float64)
    for _ in range(3):
        z = np.tile((z[:4096] + z[4096:]) * 0.5, 2) + swapped(z)
        z = swapped(z * 0.5)
    check(jax.jit(on(several))(put(x)), z, 1e-4)
    done("mixed")
    cold = [kernel_of("pull", size=4096, name=f"cold_{i}") for i in range(6)]

    def all_of_them(x):
        for kernel in cold:
            x = kernel(x) + 0
        return x

    check(jax.jit(on(all_of_them))(put(x)), x)
    done("cold")
    large = random.standard_normal(1 << 21).astype(np.float32)
    f, g = jax.jit(on(pull)), jax.jit(on(kernel_of("pull", size=1 << 20)))
    a, b = put(x), put(large)
    for _ in range(50):
        a, b = f(a), g(b)  # More blocks than fit on the GPU.
    check(a, x)
    check(b, large)
    done("large")
"""

KILLED = """
    import signal
    f = jax.jit(on(pull))
    y = f(put(x)).block_until_ready()
    done("first")
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.time()
    try:
        for _ in range(3):
            y = f(y)
        y.block_until_ready()
        print("no error")
    except BaseException as error:
        time.sleep(1)
        print("ended after", time.time() - start, type(error).__name__, flush=True)
    os._exit(0)
"""

GRAPHS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE"
    " --xla_gpu_graph_min_graph_size=1"
)
