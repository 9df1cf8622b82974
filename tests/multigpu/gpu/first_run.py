"""Kernels of 2 GPUs, step by step; prints what works and how long it takes."""
import os, sys, time, traceback
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from acting import Acting, kernel_of
from pallasite import plugins, config
import pallasite_multigpu
plugins.register(Acting(), name="acting")
what = sys.argv[1:] or ["all"]
config.update("peer_timeout", 5)
devices = jax.devices()[:2]
mesh = jax.sharding.Mesh(np.array(devices), ("x",))
spec = P("x")
def on_mesh(f, mesh=mesh, n=1):
    return jax.shard_map(f, mesh=mesh, in_specs=(spec,)*n, out_specs=spec, check_vma=False)
def shard(x, mesh=mesh): return jax.device_put(x, jax.NamedSharding(mesh, spec))
def swap(x): return np.concatenate([x[len(x)//2:], x[:len(x)//2]])
rng = np.random.default_rng(0)
def data(n): return rng.standard_normal(n, dtype=np.float32)
def step(name):
    def wrap(f):
        if what != ["all"] and name not in what: return
        start = time.time()
        try: r = f(); print(f"{name}: ok {r or ''} ({time.time()-start:.1f}s)", flush=True)
        except BaseException as e:
            print(f"{name}: FAILED {type(e).__name__}: {str(e)[:1500]}", flush=True); traceback.print_exc(limit=4)
    return wrap
pull = {n: kernel_of("pull", size=n, name=f"pull{n}") for n in (128, 4096, 1<<20)}
@step("first")
def _():
    for n in (128, 4096, 1<<20):
        x = data(2*n); y = jax.jit(on_mesh(pull[n]))(shard(x)); np.testing.assert_array_equal(np.asarray(y), swap(x))
@step("rank")
def _():
    y = np.asarray(jax.jit(on_mesh(kernel_of("rank", dtype=np.int32, name="ranks")))(shard(data(256))))
    assert (y[0], y[128]) == (0, 1), (y[0], y[128])
@step("repeat")
def _():
    f = jax.jit(on_mesh(pull[4096])); x = shard(data(8192)); want = np.asarray(x)
    start = time.time(); y = x
    for _ in range(1000): y = f(y)
    y.block_until_ready(); t = time.time()-start
    np.testing.assert_array_equal(np.asarray(y), want); return f"{t*1e3:.1f} us a call"
@step("while")
def _():
    def loop(x): return jax.lax.fori_loop(0, 1001, lambda i, y: pull[4096](y), x)
    f = jax.jit(on_mesh(loop)); x = shard(data(8192)); y = f(x); y.block_until_ready()
    c = f.lower(x).compile().as_text(); open(os.environ.get("OUT", "/tmp")+f"/hlo_{os.environ.get('TAG','')}.txt", "w").write(c)
    ts = []
    for _ in range(5):
        start = time.time(); y = f(x); y.block_until_ready(); ts.append(time.time()-start)
    np.testing.assert_array_equal(np.asarray(y), swap(np.asarray(x))); return f"{sorted(ts)[2]*1e6/1001:.2f} us a step"
@step("unrolled")
def _():
    def run(x):
        for _ in range(51): x = pull[4096](x)
        return x
    f = jax.jit(on_mesh(run)); x = shard(data(8192)); y = f(x); y.block_until_ready()
    ts = []
    for _ in range(9):
        start = time.time(); y = f(x); y.block_until_ready(); ts.append(time.time()-start)
    np.testing.assert_array_equal(np.asarray(y), swap(np.asarray(x))); return f"{sorted(ts)[4]*1e6/51:.2f} us a kernel"
@step("psum")
def _():
    def run(x):
        for _ in range(3):
            x = jax.lax.psum(x, "x")*0.5 + pull[4096](x); x = pull[4096](x*0.5)
        return x
    x = data(8192); y = np.asarray(jax.jit(on_mesh(run))(shard(x)))
    z = x.astype(np.float64)
    for _ in range(3):
        z = np.tile((z[:4096]+z[4096:])*0.5, 2) + swap(z); z = swap(z*0.5)
    np.testing.assert_allclose(y, z, rtol=1e-4, atol=1e-4)
@step("donated")
def _():
    f = jax.jit(on_mesh(pull[4096]), donate_argnums=0); x = data(8192); y = shard(x)
    for _ in range(101): y = f(y)
    np.testing.assert_array_equal(np.asarray(y), swap(x))
@step("permuted")
def _():
    other = jax.sharding.Mesh(np.array(devices[::-1]), ("x",)); x = data(8192)
    f = jax.jit(on_mesh(pull[4096], other))
    np.testing.assert_array_equal(np.asarray(f(shard(x, other))), swap(x))
    y = np.asarray(jax.jit(on_mesh(kernel_of("rank", dtype=np.int32, name="ranks2"), other))(shard(data(256), other)))
    assert (y[0], y[128]) == (0, 1)
    g = jax.jit(lambda x: jax.shard_map(pull[4096], in_specs=spec, out_specs=spec, check_vma=False)(x))
    for m in (mesh, other):
        with jax.set_mesh(m): np.testing.assert_array_equal(np.asarray(g(shard(x, m))), swap(x))
@step("cold")
def _():
    ks = [kernel_of("pull", size=4096, name=f"cold{i}") for i in range(6)]
    def run(x):
        for k in ks: x = k(x)+0
        return x
    x = data(8192); np.testing.assert_array_equal(np.asarray(jax.jit(on_mesh(run))(shard(x))), x)
@step("many")
def _():
    f, g = jax.jit(on_mesh(pull[4096])), jax.jit(on_mesh(pull[1<<20])); x, y = shard(data(8192)), shard(data(1<<21)); a, b = x, y
    for _ in range(200): a, b = f(a), g(b)
    np.testing.assert_array_equal(np.asarray(a), np.asarray(x)); np.testing.assert_array_equal(np.asarray(b), np.asarray(y))
@step("alone")
def _():
    if what == ["all"]: return "skipped"
    def run(x): return jax.lax.cond(jax.lax.axis_index("x") == 0, lambda x: pull[4096](x), lambda x: x, x)
    start = time.time()
    try: jax.jit(on_mesh(run))(shard(data(8192))).block_until_ready()
    except Exception as e: time.sleep(0.5); return f"after {time.time()-start:.1f} s: {type(e).__name__} {str(e)[:300]}"
    raise AssertionError("no error")
@step("trap")
def _():
    if what == ["all"]: return "skipped"
    try: jax.jit(on_mesh(kernel_of("trap", name="trapping")))(shard(data(256))).block_until_ready()
    except Exception as e: time.sleep(0.5); return f"{type(e).__name__} {str(e)[:200]}"
    raise AssertionError("no error")
os._exit(0)
