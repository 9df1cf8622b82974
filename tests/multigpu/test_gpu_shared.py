"""More processes than GPUs: the GPUs run the kernels of theirs by turns, which shows nothing of
their speed, but that meshes of four and eight devices work where there are one or two GPUs."""

from __future__ import annotations

import sys
import textwrap

import gpu_programs
import jax
import pytest
from processes import FOLDER, run

pytestmark = pytest.mark.gpu

START = (
    gpu_programs.START.replace("jax.devices()[:2]", "jax.devices()")
    + """
    config.update("peer_timeout", 60)
    config.update("symmetric_heap", "1G")
    config.update("peer_memory", "ipc")
    N = len(jax.devices())
    assert N == COUNT and len(jax.local_devices()) == 1

    def of(shape, dtype=np.float32):
        return random.standard_normal(shape).astype(dtype)

    def wide(x):
        return np.asarray(x).astype(np.float64)
"""
)

LAUNCHES = """
    x = of(4096 * N)
    f = jax.jit(on(pull))
    y = put(x)
    for _ in range(50 * N):
        y = f(y)
    check(y, x)
    done("launches")
    f = jax.jit(on(lambda x: lax.fori_loop(0, 10 * N + 1, lambda i, y: pull(y), x)))
    check(f(put(x)), np.roll(x, -4096))
    done("loop")
    f = jax.jit(on(pull), donate_argnums=0)
    y = put(x)
    for _ in range(2 * N + 1):
        y = f(y)
    check(y, np.roll(x, -4096))
    done("donated")

    def send(x_ref, out_ref, arrived):
        rank, count = lax.axis_index("x"), lax.axis_size("x")
        there = lax.rem(rank + 3, count)
        plgpu.remote_ref(out_ref, there)[...] = x_ref[...]
        pl.semaphore_signal(arrived, device_id=there)
        pl.semaphore_wait(arrived)

    part = jax.ShapeDtypeStruct((4096,), jnp.float32)
    sent = plgpu.kernel(send, out_type=part, scratch_types=[plgpu.SemaphoreType.REGULAR])
    check(jax.jit(on(sent))(put(x)), np.roll(x, 3 * 4096))
    done("store")
    cold = [kernel_of("pull", size=4096, name=f"cold_{i}") for i in range(6)]

    def all_of_them(x):
        for kernel in cold:
            x = kernel(x) + 0
        return x

    check(jax.jit(on(all_of_them))(put(x)), np.roll(x, -6 * 4096))
    done("cold")
"""

MESHES = """
    ranks = kernel_of("rank", dtype=np.int32)
    devices = np.array(jax.devices())
    x = of(4096 * N)
    for order in (np.arange(N)[::-1], np.roll(np.arange(N), 1), random.permutation(N)):
        one = Mesh(devices[order], ("x",))
        check(jax.jit(on(pull, mesh=one))(put(x, mesh=one)), np.roll(x, -4096))
        check(jax.jit(on(ranks, mesh=one))(put(x[: 128 * N], mesh=one)).reshape(N, 128)[:, 0],
              np.arange(N))
    done("permuted")
    for some in ([0, N - 1], [1, 2], [N - 1, 1, 0]):
        one = Mesh(devices[some], ("x",))
        if RANK in some:
            part = x[: 4096 * len(some)]
            check(jax.jit(on(pull, mesh=one))(put(part, mesh=one)), np.roll(part, -4096))
            y = of((len(some), 1003))
            reduced = jax.jit(on(lambda y: ops.all_reduce(y, axis_name="x"), mesh=one))
            check(reduced(put(y, mesh=one)), np.broadcast_to(wide(y).sum(0), y.shape), 1e-5)
        else:
            of((len(some), 1003))
    done("some of the devices")
    both = Mesh(devices.reshape(2, N // 2), ("a", "b"))
    y = of((2, N // 2, 5001))
    for axis, places in (("a", 0), ("b", 1)):
        spec = P("a", "b")
        reduced = jax.jit(on(lambda y: ops.all_reduce(y, axis_name=axis), spec, spec, both))
        whole = np.broadcast_to(wide(y).sum(places, keepdims=True), y.shape)
        check(reduced(put(y, spec, both)), whole, 1e-5)
    done("two axes")

    def send(x_ref, out_ref, arrived):
        there = {"b": lax.rem(lax.axis_index("b") + 1, lax.axis_size("b"))}
        plgpu.remote_ref(out_ref, there)[...] = x_ref[...]
        pl.semaphore_signal(arrived, device_id=there)
        pl.semaphore_wait(arrived)

    part = jax.ShapeDtypeStruct((1, 1, 4096), jnp.float32)
    sent = plgpu.kernel(send, out_type=part, scratch_types=[plgpu.SemaphoreType.REGULAR])
    y = of((2, N // 2, 4096))
    check(jax.jit(on(sent, P("a", "b"), P("a", "b"), both))(put(y, P("a", "b"), both)),
          np.roll(y, 1, 1))
    done("along one axis")
"""

COLLECTIVES = """
    for size, dtype, error in (
        (1, np.float32, 1e-5), (1003, np.float32, 1e-5), (1 << 16, jnp.bfloat16, 0.05),
        (33001, np.float16, 0.02), (77777, np.int32, 0), (1 << 20, np.float32, 1e-5),
        ((9 << 20) + 3, np.float32, 1e-5),
    ):
        y = (8 * of((N, size))).astype(dtype)
        reduced = jax.jit(on(lambda y: ops.all_reduce(y, axis_name="x")))(put(y))
        check(reduced, np.broadcast_to(wide(y).sum(0), y.shape), error)
        gathered = jax.jit(on(lambda y: ops.all_gather(y, axis_name="x"), out_specs=P()))(put(y))
        check(gathered, wide(y))
        if size < 1 << 20:
            y = (8 * of((N * N, size))).astype(dtype)
            scattered = jax.jit(on(lambda y: ops.reduce_scatter(y, axis_name="x")))(put(y))
            check(scattered, wide(y).reshape(N, N, size).sum(0), error)
            moved = jax.jit(on(lambda y: ops.all_to_all(y, axis_name="x")))(put(y))
            check(moved, wide(y).reshape(N, N, size).swapaxes(0, 1).reshape(N * N, size))
        done(f"{size} {np.dtype(dtype)}")
    y = of((6 * N, 2 * N))
    whole = lambda y: (ops.all_reduce(jnp.sin(y), axis_name="x") ** 2).sum()
    sines = np.sin(wide(y)).reshape(N, 6, 2 * N)
    found = jax.jit(on(lambda y: jax.grad(whole)(y)))(put(y))
    total = np.tile(sines.sum(0), (N, 1))
    check(found, 2 * N * total * np.cos(wide(y)), 1e-3)
    done("gradient")
"""

PRODUCTS = """
    for m, k, n in ((512, 256, 512), (8, 512, 384), (200, 136, 264)):
        a, b = of((m * N, k), jnp.bfloat16), of((k, n * N), jnp.bfloat16)
        columns = P(None, "x")
        multiply = lambda a, b: ops.all_gather_matmul(a, b, axis_name="x")
        product = jax.jit(on(multiply, (P("x"), columns), columns))(put(a), put(b, columns))
        check(product, wide(a) @ wide(b), 0.3)
        a, b = of((m * N, k * N), jnp.bfloat16), of((k * N, n), jnp.bfloat16)
        multiply = lambda a, b: ops.matmul_reduce_scatter(a, b, axis_name="x")
        product = jax.jit(on(multiply, (columns, P("x")), P("x")))(put(a, columns), put(b))
        check(product, wide(a) @ wide(b), 0.5)
        done(f"{m}x{n}x{k}")
    for causal in (False, True):
        q, k, v = (of((1, 256 * N, 4, 64), jnp.bfloat16) for _ in range(3))
        along = P(None, "x")
        scores = np.einsum("bqhd,bkhd->bhqk", wide(q), wide(k)) / 8
        if causal:
            scores = np.where(np.tri(256 * N, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        whole = np.einsum("bhqk,bkhd->bqhd", weights, wide(v))
        for method in ("ring", "gather"):
            attend = lambda *o: ops.ring_attention(
                *o, axis_name="x", causal=causal, method=method
            )
            found = jax.jit(on(attend, (along,) * 3, along))(*(put(o, along) for o in (q, k, v)))
            check(found, whole, 0.03)
            done(f"{method} causal={causal}")
"""

EXPERTS = """
    tokens, width, experts, top = 96, 256, 2 * N, 3
    y = of((N * tokens, width), jnp.bfloat16)
    chosen = np.argsort(of((N * tokens, experts)), 1)[:, :top].astype(np.int32)
    weights = np.abs(of((N * tokens, top)))

    def through(y, chosen, weights):
        rows, sizes, route = ops.moe_dispatch(
            y, chosen, axis_name="x", num_experts=experts, capacity=tokens * top * N
        )
        first = lax.axis_index("x") * (experts // lax.axis_size("x"))
        ends = jnp.cumsum(sizes)
        own = first + (jnp.arange(rows.shape[0])[:, None] >= ends[None]).sum(1)
        return ops.moe_combine(rows * (1 + own)[:, None].astype(rows.dtype), weights, route,
                               axis_name="x")

    found = jax.jit(on(through, (P("x"),) * 3))(put(y), put(chosen), put(weights))
    check(found, wide(y) * (wide(weights) * (1 + chosen)).sum(1, keepdims=True), 0.3)
    done("experts")
"""

DRAWN = """
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    for number in range(24):
        kind = kinds[number % 4]
        dtype = random.choice([np.float32, jnp.bfloat16, np.float16, np.int32, np.int8])
        shape = [int(2 ** random.uniform(0, 6)) for _ in range(random.integers(1, 4))]
        where = int(random.integers(len(shape)))
        if kind in ("reduce_scatter", "all_to_all"):
            shape[where] *= N
        y = (4 * of((N, *shape))).astype(dtype)
        total = wide(y).sum(0)
        if kind == "all_reduce":
            run = lambda y: ops.all_reduce(y, axis_name="x")
            whole = np.stack([total] * N)
        elif kind == "all_gather":
            run = lambda y: ops.all_gather(y, axis_name="x", gather_dimension=where)
            whole = np.stack([np.concatenate(list(wide(y)), where)] * N)
        elif kind == "reduce_scatter":
            run = lambda y: ops.reduce_scatter(y, axis_name="x", scatter_dimension=where)
            whole = np.stack(np.split(total, N, where))
        else:
            to = int(random.integers(len(shape)))
            run = lambda y: ops.all_to_all(
                y, axis_name="x", split_dimension=where, concat_dimension=to
            )
            parts = [np.split(one, N, where) for one in wide(y)]
            whole = np.stack([np.concatenate([one[i] for one in parts], to) for i in range(N)])
        if dtype == np.int8 and kind in ("all_reduce", "reduce_scatter"):
            whole = whole.astype(np.int64).astype(np.int8)
        found = jax.jit(on(lambda y: run(y[0])[None]))(put(y))
        print(kind, shape, np.dtype(dtype), where, flush=True)
        check(found, whole, {2: 0.05, 4: 1e-5}.get(np.dtype(dtype).itemsize, 0))
    done("drawn")
"""

KILLED = "\n    x = of(4096 * N)" + gpu_programs.KILLED


@pytest.fixture
def on_gpus(monkeypatch):
    gpus = len(jax.devices("gpu"))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(FOLDER), *(one for one in sys.path if one)]))

    def on_gpus(program, count):
        text = textwrap.dedent(START) + textwrap.dedent(program)
        found = run(text, count=count, local=f"[RANK % {gpus}]", timeout=200)
        for rank, (code, out, told) in enumerate(found):
            print(f"--- process {rank}: {code}\n{out[-3000:]}\n{told[-5000:]}")
        return found

    return on_gpus


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize(
    "program", ["LAUNCHES", "MESHES", "COLLECTIVES", "PRODUCTS", "EXPERTS", "DRAWN"], ids=str.lower
)
def test_processes_share_gpus(program, count, on_gpus):
    assert [code for code, *_ in on_gpus(globals()[program], count)] == [0] * count


@pytest.mark.parametrize("count", [4])
def test_processes_share_gpus_in_cuda_graphs(count, on_gpus, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", gpu_programs.GRAPHS)
    assert [code for code, *_ in on_gpus(LAUNCHES, count)] == [0] * count


def test_a_process_that_is_killed(on_gpus):
    found = on_gpus(KILLED, 4)
    assert [code for code, *_ in found] == [0, -9, 0, 0]
    for code, printed, _ in found:
        assert code or ("ended after" in printed and float(printed.split()[-2]) < 60)
    assert "process 1, which has ended" in "".join(told for *_, told in found)
