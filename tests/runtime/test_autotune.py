"""Choosing configurations: the policy, what is kept on disk, and what is measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallasite
from pallasite import config
from pallasite import gpu as plgpu
from pallasite.errors import (
    ConfigError,
    ExecutionError,
    InvalidValueError,
    ResourceError,
)
from pallasite.runtime.store import CacheWarning
from pallasite_std.tuning import AutotuneWarning, encoding, entries, policy, timing, winners
from pallasite_std.tuning.encoding import encode
from pallasite_std.tuning.search import LAST_REPEATS


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A configuration like those of operations."""

    rows: int
    stages: int = 2


CANDIDATES = (Tiles(64), Tiles(128), Tiles(64, stages=4))
X = jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)


@pytest.fixture(autouse=True)
def _cache_of_the_test(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLASITE_CACHE_DIR", str(tmp_path / "cache"))
    entries.forget()
    policy._failed.clear()


def never(*_):
    raise AssertionError("nothing is to be run")


def remember(best, *args, name="op", version=1, key=None, candidates=CANDIDATES):
    """Writes what a measurement would."""
    listed = encoding.distinct(candidates, name)
    found = entries.entry_key(name, version, args, listed, key)
    entries.keep(name, found, {"best": encoding.encode(best)})


def choose(*args, name="op", version=1, key=None, candidates=CANDIDATES, default=Tiles(8)):
    return pallasite.choose(name, version, args, candidates, default, never, key=key)


# The policy ---------------------------------------------------------------------------------------


def test_off_is_the_default():
    remember(Tiles(128), X)
    assert config.get("autotune") == "off"
    assert choose(X) == Tiles(8)
    assert choose(X, candidates=never) == Tiles(8)


def test_cached_uses_what_was_measured():
    with config.scoped(autotune="cached"):
        assert choose(X) == Tiles(8)
        remember(Tiles(64, stages=4), X)
        assert choose(X) is CANDIDATES[2]
        assert choose(X, candidates=lambda: CANDIDATES) is CANDIDATES[2]


def test_what_the_choice_depends_on():
    remember(Tiles(128), X, 3)
    other = jax.ShapeDtypeStruct((256, 64), jnp.float16)
    with config.scoped(autotune="cached"):
        assert choose(X, 3) == Tiles(128)
        assert choose(jnp.zeros(X.shape, X.dtype), 3) == Tiles(128)
        assert choose(X, 4) == choose(other, 3) == choose(X) == Tiles(8)
        assert choose(X, 3, version=2) == choose(X, 3, name="op2") == Tiles(8)
        assert choose(X, 3, key="causal") == choose(X, 3, candidates=CANDIDATES[1:]) == Tiles(8)
        assert choose([X], 3) == choose([X, 3]) == Tiles(8)
        with pallasite.target("sm_90"):
            assert choose(X, 3) == Tiles(8)


def test_cached_while_tracing():
    remember(Tiles(128), X)
    seen = []

    def op(x):
        seen.append(choose(x))
        return x

    with config.scoped(autotune="cached"):
        jax.jit(op)(jnp.zeros(X.shape, X.dtype))
        jax.vmap(op)(jnp.zeros((3, *X.shape), X.dtype))
    assert seen == [Tiles(128)] * 2


def test_without_the_disk_cache_the_process_remembers(tmp_path):
    with config.scoped(autotune="cached", cache=False):
        remember(Tiles(128), X)
        assert choose(X) == Tiles(128)
    assert not (tmp_path / "cache").exists()
    with config.scoped(autotune="cached"):
        assert choose(X) == Tiles(8)


@pytest.mark.parametrize(
    ("given", "value"),
    [("off", "off"), ("0", "off"), ("On", "on"), ("true", "on"), (" cached ", "cached")],
)
def test_values_of_the_option(monkeypatch, given, value):
    monkeypatch.setenv("PALLASITE_AUTOTUNE", given)
    assert config.get("autotune") == value


def test_wrong_value_of_the_option():
    with pytest.raises(ConfigError, match="cached") as raised:
        config.update("autotune", "always")
    assert "measure what was not" in str(raised.value)


# What is kept on disk -----------------------------------------------------------------------------


def test_no_candidates():
    with config.scoped(autotune="cached"), pytest.raises(InvalidValueError, match="'op'"):
        choose(X, candidates=())


def test_files_can_be_read_by_people(tmp_path):
    remember(Tiles(128), X, 2, key=("causal", True))
    (file,) = (tmp_path / "cache" / "tuning").glob("*.json")
    assert file.name == "op.json"
    (entry,) = json.loads(file.read_text())["entries"].values()
    assert entry["best"] == {"class": "Tiles", "rows": 128, "stages": 2}
    assert entry["key"]["operation"] == "op"
    assert entry["key"]["arguments"] == "bfloat16[256,64], 2"
    assert entry["key"]["key"] == ["causal", True]
    assert entry["key"]["device"] == jax.local_devices()[0].device_kind
    assert entry["key"]["pallasite"] == pallasite.__version__
    assert "hopper" in entry["key"]["plugins"]
    assert entry["key"]["target"] == "sm_90a" or jax.default_backend() == "gpu"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"format": 1', '"format": 99'),
        lambda text: text.replace('"best"', '"worst"'),
        lambda text: "\x00" + text,
        lambda text: "[" * 100_000,
    ],
)
def test_damaged_files_are_ignored(tmp_path, damage):
    remember(Tiles(128), X)
    path = entries.store().path("op")
    path.write_text(damage(path.read_text()))
    with config.scoped(autotune="cached"):
        with pytest.warns(CacheWarning, match="damaged file of tuned configurations is ignored"):
            assert choose(X) == Tiles(8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # The second time there is no warning.
            assert choose(X) == Tiles(8)
            remember(Tiles(64), X)
            assert choose(X) == Tiles(64)


def test_unusable_folder_warns_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PALLASITE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with config.scoped(autotune="cached"), pytest.warns(CacheWarning) as caught:
        remember(Tiles(128), X)
        remember(Tiles(128), X)
        assert choose(X) == choose(X) == Tiles(8)
    assert sum("cannot write" in str(one.message) for one in caught) == 1


# Tuning -------------------------------------------------------------------------------------------


def scale(block, x):
    """Twice a vector, with the block as the configuration."""

    def body(x_ref, out_ref):
        window = pl.ds(jax.lax.axis_index("block") * block, block)
        out_ref[window] = x_ref[window] * 2

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.size // block,),
        grid_names=("block",),
    )(x)


def fake(times, log=None):
    """A way to measure that looks times up by configuration, and runs each once."""

    def measure(trials, repeats):
        if log is not None:
            log.append(([trial.configuration for trial in trials], repeats))
        for trial in trials:
            (x,) = trial.inputs[1]
            np.testing.assert_array_equal(np.asarray(trial.run(1)), 2 * np.asarray(x))
        return [times[trial.configuration] for trial in trials]

    return measure


V = jax.ShapeDtypeStruct((512,), jnp.float32)


@pytest.mark.runs_kernels
def test_autotune():
    log = []
    measure = fake({128: 3e-6, 256: 1e-6, 512: 2e-6}, log)
    assert pallasite.autotune(scale, [128, 256, 512], V, measure=measure) == 256
    assert log == [([128, 256, 512], LAST_REPEATS)]
    x = jnp.arange(512, dtype=jnp.float32)
    assert pallasite.autotune(scale, [128, 256, 512], x, measure=never) == 256
    assert pallasite.autotune(scale, [128, 256], x, measure=measure, check=lambda x: x + x) == 256
    assert pallasite.autotune(scale, [128, 256, 512], V, measure=measure, key="other") == 256
    assert len(log) == 3
    slow = fake({128: 1e-6, 256: 2e-6, 512: 3e-6})
    assert pallasite.autotune(scale, [128, 256, 512], V, measure=slow, refresh=True) == 128
    assert pallasite.autotune(scale, [128, 256, 512], V, measure=never) == 128
    path = entries.store().path(f"{__name__}.scale")
    found = list(json.loads(path.read_text())["entries"].values())
    assert len(found) == 3
    assert [one["microseconds"] for one in found[-1]["candidates"]] == [1.0, 2.0, 3.0]


@pytest.mark.runs_kernels
def test_configurations_that_cannot_work_are_left_out():
    def run(configuration, x):
        if configuration == "unsupported":
            raise pallasite.UnsupportedError("not this one")
        if configuration == "value":
            raise ValueError("blocks do not divide")
        if configuration == "wrong":
            return scale(128, x) + 1
        if configuration == "shared memory":

            def body(x_ref, out_ref, scratch):
                scratch[0] = x_ref[0]
                out_ref[...] = x_ref[...]

            return plgpu.kernel(
                body, out_type=V, scratch_types=[plgpu.SMEM((2**20,), jnp.float32)]
            )(x)
        return scale(configuration, x)

    configurations = ["shared memory", "wrong", 128, "value", 256, "unsupported"]
    with pytest.warns(AutotuneWarning) as caught:
        best = pallasite.autotune(
            run,
            configurations,
            V,
            name="run",
            check=lambda x: 2 * x,
            measure=fake({128: 2e-6, 256: 1e-6}),
        )
    assert best == 256
    text = str(caught[0].message)
    assert text.startswith("4 of 6 configurations of 'run' are left out: shared memory: ")
    assert "ResourceError" in text and "wrong: WrongResultError: the result differs" in text
    assert text.endswith("; and 1 more")
    (entry,) = entries.store().entries(entries.store().path("run")).values()
    assert [one.get("left out", "").partition(":")[0] for one in entry["candidates"]] == [
        *("ResourceError", "WrongResultError", "", "ValueError", "", "UnsupportedError")
    ]


def test_nothing_works():
    def run(configuration, x):
        raise ResourceError(f"{configuration} is too much")

    with pytest.raises(ExecutionError, match="no configuration of 'run' works") as raised:
        pallasite.autotune(run, [1, 2], V, name="run", measure=never)
    assert "1: ResourceError: 1 is too much; 2: Res" in str(raised.value)
    assert isinstance(raised.value.__cause__, ResourceError)
    assert not entries.store().files()


def test_mistakes_come_out():
    def run(configuration, x):
        return x.no_such_attribute

    with pytest.raises(AttributeError, match="no_such_attribute"):
        pallasite.autotune(run, [1, 2], V, measure=never)


def test_one_that_works_is_not_measured():
    def run(configuration, x):
        return x * configuration

    assert pallasite.autotune(run, [3], V, measure=never) == 3


def test_equal_configurations_count_once():
    seen = []

    def measure(trials, repeats):
        seen.extend(trial.configuration for trial in trials)
        return [1.0] * len(trials)

    given_ = [(1, 2), Tiles(8), [1, 2], Tiles(8), (2, 1)]
    assert pallasite.autotune(lambda c, x: x, given_, V, measure=measure) == (1, 2)
    assert seen == [(1, 2), Tiles(8), (2, 1)]


def test_trees_and_static_arguments():
    def run(configuration, tree, factor, mode):
        assert mode == "fast" and isinstance(factor, float)
        return {"out": tree["x"] * factor * tree["y"], "n": configuration}

    def measure(trials, repeats):
        for trial in trials:
            x, y = trial.inputs[2]
            np.testing.assert_allclose(trial.run(2)["out"], x * 2.5 * y, rtol=1e-6)
        return [1 / trial.configuration for trial in trials]

    tree = {"x": V, "y": jnp.ones(())}
    assert pallasite.autotune(run, [1, 2, 3], tree, 2.5, "fast", measure=measure) == 3


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu():
    with pytest.raises(ExecutionError, match="cannot be tuned without a GPU") as raised:
        pallasite.autotune(scale, [128], V)
    assert "PALLASITE_AUTOTUNE=cached" in str(raised.value)
    with config.scoped(autotune="on"):
        assert choose(X) == Tiles(8)


def test_the_source_text_counts():
    def source(number):
        space = {}
        exec(f"def run(c, x):\n    return x * {number}", space)
        return space["run"]

    def other(c, x):
        return x

    def measure(trials, repeats):
        return [1.0 / trial.configuration for trial in trials]

    assert pallasite.autotune(other, [1, 2], V, name="same", measure=measure) == 2
    assert pallasite.autotune(other, [1, 2], V, name="same", measure=never) == 2
    with pytest.raises(AssertionError, match="nothing is to be run"):
        pallasite.autotune(lambda c, x: x, [1, 2], V, name="same", measure=never)
    assert pallasite.autotune(source(1), [1, 2], V, name="none", measure=measure) == 2
    jitted = jax.jit(other, static_argnums=0)
    assert pallasite.autotune(jitted, [1, 2], V, name="same", measure=never) == 2


# While tracing ------------------------------------------------------------------------------------


class Operation:
    """An operation whose author tunes it."""

    def __init__(self, times, measure=None):
        self.log = []
        self.chosen = []
        self.measure = measure or fake(times, self.log)

    def __call__(self, x, block=None):
        if block is None:
            block = pallasite.choose(
                "scale", 1, (x,), (128, 256, 512), 128, self.run, measure=self.measure
            )
            self.chosen.append(block)
        return scale(block, x)

    def run(self, block, x):
        return self(x, block)


def contexts():
    """Ways to trace a function of a vector of 512 elements."""
    mesh = jax.make_mesh((1,), ("d",))
    spec = jax.sharding.PartitionSpec("d")

    def shard_map(op, x):
        return jax.jit(jax.shard_map(op, mesh=mesh, in_specs=spec, out_specs=spec))(
            jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        )

    def set_mesh(op, x):
        with jax.set_mesh(mesh):
            return shard_map(op, x)

    return {
        "eager": lambda op, x: op(x),
        "jit": lambda op, x: jax.jit(op)(x),
        "jit of jit": lambda op, x: jax.jit(jax.jit(op))(x),
        "vmap": lambda op, x: jax.jit(jax.vmap(op))(x[None])[0],
        "scan": lambda op, x: jax.lax.scan(lambda c, _: (op(c), None), x, length=1)[0],
        "cond": lambda op, x: jax.lax.cond(x[0] > -1e9, op, op, x),
        "shard_map": shard_map,
        "set_mesh": set_mesh,
        "compile": lambda op, x: (pallasite.compile(op, x), 2 * x)[1],
    }


@pytest.mark.runs_kernels
@pytest.mark.parametrize("context", sorted(contexts()))
def test_on_while_tracing(context):
    op = Operation({128: 3e-6, 256: 1e-6, 512: 2e-6})
    x = jnp.asarray(np.random.default_rng(0).normal(size=512).astype(jnp.float32))
    with config.scoped(autotune="on"):
        result = contexts()[context](op, x)
        np.testing.assert_array_equal(np.asarray(result), 2 * np.asarray(x))
    assert set(op.chosen) == {256}
    assert len(op.log) == 1


def test_in_wide_types():
    def run(configuration, x):
        assert x.dtype == jnp.float64
        return x + 1

    def measure(trials, repeats):
        assert trials[0].run(0).dtype == jnp.float64
        return [1.0 / trial.configuration for trial in trials]

    with jax.enable_x64(True), config.scoped(autotune="on"):
        x = jnp.zeros(4, jnp.float64)
        got = []
        jax.jit(
            lambda x: got.append(pallasite.choose("o", 1, (x,), [1, 2], 0, run, measure=measure))
        )(x)
    assert got == [2]


def test_an_operation_that_cannot_be_tuned_warns_once():
    def run(configuration, x):
        raise pallasite.UnsupportedError("not here")

    def again():
        return pallasite.choose("op", 1, (V,), [1, 2], 7, run, measure=never)

    with config.scoped(autotune="on"):
        with pytest.warns(
            AutotuneWarning, match="'op' is not tuned, and uses 7: no config"
        ) as seen:
            assert again() == 7
        assert "1: UnsupportedError: not here" in str(seen[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert again() == 7


def test_operations_inside_candidates_are_not_tuned():
    inner = []

    def run(configuration, x):
        inner.append(pallasite.choose("inner", 1, (x,), [1, 2], 9, never, measure=never))
        return x

    def measure(trials, repeats):
        return [1.0] * len(trials)

    with config.scoped(autotune="on"):
        assert pallasite.choose("outer", 1, (V,), [1, 2], 7, run, measure=measure) == 1
    assert set(inner) == {9}


def test_tuning_inside_candidates():
    def measure(trials, repeats):
        return [1.0] * len(trials)

    def run(configuration, x):
        inner = pallasite.autotune(lambda c, y: y * c, [3, 4], V, name="inner", measure=measure)
        return x * inner

    assert pallasite.autotune(run, [1, 2], V, name="outer", measure=measure) == 1


def test_several_processes_do_not_measure(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with config.scoped(autotune="on"):
        assert pallasite.choose("op", 1, (V,), [1, 2], 7, never, measure=never) == 7


def test_threads_tune_once():
    calls = []

    def measure(trials, repeats):
        calls.append(len(trials))
        return [1.0 / trial.configuration for trial in trials]

    results = []

    def work():
        with config.scoped(autotune="on"):
            results.append(
                pallasite.choose("op", 1, (V,), [1, 2], 7, lambda c, x: x * c, measure=measure)
            )

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [2] * 4 and calls == [2]


def test_options_reach_the_threads():
    seen = []

    def run(configuration, x):
        seen.append((config.get("sanitize"), threading.current_thread().name))
        return x

    with config.scoped(sanitize=("races",)):
        pallasite.autotune(run, [1, 2], V, measure=lambda trials, _: [1.0] * len(trials))
    assert [one for one, _ in seen] == [("races",)] * 2
    assert threading.current_thread().name not in {name for _, name in seen}


# The clock ----------------------------------------------------------------------------------------


def test_measuring_without_a_gpu_uses_the_clock(monkeypatch):
    """What a GPU's profile does not show is timed by the clock: all its runs together."""
    times = itertools.count(step=6.0)
    clock = types.SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr(timing, "time", clock)
    log = []

    def measure(trials, repeats):
        log.extend(timing.measure_on_gpu(trials, 3))
        return log

    pallasite.autotune(lambda c, x: x * c, [1, 2], V, measure=measure)
    assert log == [2.0, 2.0]
    assert next(times) == 24.0  # It was read before and after each.


def test_while_a_profile_is_taken(tmp_path, monkeypatch):
    with jax.profiler.trace(str(tmp_path)):
        test_measuring_without_a_gpu_uses_the_clock(monkeypatch)


def test_the_default_device_counts():
    kind = jax.local_devices(backend="cpu")[0].device_kind
    for device in (jax.local_devices(backend="cpu")[0], "cpu"):
        with jax.default_device(device):
            assert entries.device().platform == "cpu"
            assert entries.entry_key("op", 1, (X,), {}, None)["device"] == kind


# On a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_vector_add_on_a_gpu():
    def add(block, x, y):
        def body(x_ref, y_ref, out_ref):
            window = pl.ds(jax.lax.axis_index("block") * block, block)
            out_ref[window] = x_ref[window] + y_ref[window]

        out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
        grid = (x.size // block,)
        return plgpu.kernel(body, out_type=out_type, grid=grid, grid_names=("block",))(x, y)

    x = jax.ShapeDtypeStruct((2**24,), jnp.float32)
    blocks = [128, 256, 512, 1024, 2048, 4096, 2**16]
    best = pallasite.autotune(add, blocks, x, x, name="add", check=jnp.add)
    (entry,) = entries.store().entries(entries.store().path("add")).values()
    assert entry["best"] == best
    times = {
        one["configuration"]: one["microseconds"]
        for one in entry["candidates"]
        if "microseconds" in one
    }
    # 192 MiB at less than 5 TB/s; and what the profiler says is no time of the host.
    assert 40 < times[best] < 200
    # One warpgroup that adds 128 elements is too little for a block.
    assert times[best] < times[128] and best != 128
    assert pallasite.autotune(add, blocks, x, x, name="add", measure=never) == best


def test_table_of_winners(tmp_path):
    """What comes with an operation counts where nothing was measured, on its devices only."""

    def ask(table, policy="cached", key=(1, None)):
        with config.scoped(autotune=policy):
            return pallasite.choose(
                "op", 1, (X, 2), CANDIDATES, Tiles(64), never, key=key, winners=table
            )

    (question,) = winners.questions(
        lambda x: ask(tmp_path / "none.json") and x, jax.ShapeDtypeStruct((2,), jnp.float32)
    )
    assert question.default == Tiles(64) and list(question.listed.values()) == list(CANDIDATES)

    def table(devices, best):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        entry = {**question.place(), "best": best if isinstance(best, dict) else encode(best)}
        path.write_text(json.dumps({"devices": devices, "winners": [entry]}))
        return path

    here = entries.device().device_kind
    mine = table(["NVIDIA Z1", here[:2]], Tiles(128))
    assert ask(mine) == ask(mine, "on") == Tiles(128)
    assert ask(mine, "off") == ask(mine, key=(2, None)) == Tiles(64)
    assert ask(table(["NVIDIA Z1"], Tiles(128))) == Tiles(64)
    assert ask(table([here], Tiles(999))) == Tiles(64)  # No candidate any more.
    # Written before there were stages.
    assert ask(table([here], {"class": "Tiles", "rows": 128})) == Tiles(128)
    assert ask(table([here], {"class": "Others", "rows": 128})) == Tiles(64)
    remember(Tiles(64, stages=4), X, 2, key=(1, None))
    assert ask(mine) == Tiles(64, stages=4)
