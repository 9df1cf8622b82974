"""Choosing configurations: the policy, what is kept on disk, and what is measured."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import multiprocessing
import threading
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

import pallasite
from pallasite import config
from pallasite import gpu as plgpu
from pallasite.errors import (
    ConfigError,
    ExecutionError,
    InvalidTypeError,
    InvalidValueError,
    ResourceError,
)
from pallasite.runtime.disk_cache import CacheWarning
from pallasite.runtime.tuning import AutotuneWarning, encoding, entries, policy, timing
from pallasite.runtime.tuning.inputs import MAX_SETS, ROTATED_BYTES, array_bytes, input_sets
from pallasite.runtime.tuning.search import FINALISTS, FIRST_REPEATS, LAST_REPEATS, fastest
from pallasite.runtime.tuning.store import MAX_ENTRIES, TuningStore
from pallasite.runtime.tuning.trials import WrongResultError, compare


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


class Order(enum.Enum):
    """A member of configurations."""

    ROWS = 1


def test_encoding():
    value = (1, np.int64(2), 2.5, "x", None, True, Order.ROWS, jnp.bfloat16, np.dtype("f4"))
    assert encoding.encode(value) == [
        *(1, 2, 2.5, "x", None, True),
        *("Order.ROWS", "bfloat16", "float32"),
    ]
    assert encoding.encode(Tiles(8)) == {"class": "Tiles", "rows": 8, "stages": 2}
    pair = collections.namedtuple("Pair", "a b")
    assert encoding.encode(pair(1, Order.ROWS)) == {"class": "Pair", "a": 1, "b": "Order.ROWS"}
    assert encoding.text_of({"b": 1, "a": (2,)}) == '{"a": [2], "b": 1}'


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_encodings_survive_a_file(value):
    try:
        text = encoding.text_of(value)
    except InvalidValueError:
        return  # It holds an infinity.
    assert json.dumps(json.loads(text), sort_keys=True) == text


@pytest.mark.parametrize("value", [object(), {1: 2}, {1, 2}, (1, [b"x"]), test_encoding])
def test_what_cannot_be_written(value):
    with pytest.raises(InvalidTypeError, match="cannot be written as JSON") as raised:
        encoding.encode(value)
    assert "expected: None, booleans" in str(raised.value)
    with pytest.raises(InvalidValueError, match="not finite"):
        encoding.encode((1.0, math.nan))


def test_arguments_in_words():
    y = jnp.zeros((3,), jnp.int8)
    assert encoding.describe_arguments((X, y, 2.0)) == "bfloat16[256,64], int8[3], 2.0"
    nested = encoding.describe_arguments(({"w": X}, None, y))
    assert nested.startswith("bfloat16[256,64], int8[3]; ") and "'w'" in nested
    assert encoding.describe_arguments((X, (y,))) != encoding.describe_arguments(((X, y),))


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


def test_names_of_files(tmp_path):
    store = TuningStore(tmp_path)
    names = ["op", "Op", "a/b", "a_b", "", ".", "..", "ä", "x" * 300, "pkg.module.op"]
    paths = {store.path(name) for name in names}
    assert len(paths) == len(names)
    assert {path.parent for path in paths} == {tmp_path / "tuning"}
    assert store.path("pkg.module.op").name == "pkg.module.op.json"
    for name in names:
        store.put(name, {"for": name}, {"best": name})
    assert [TuningStore(tmp_path).get(name, {"for": name})["best"] for name in names] == names
    assert len(store.files()) == len(names)
    store.clear()
    assert store.files() == [] and store.get("op", {"for": "op"}) is None


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


def test_bytes_that_are_no_text(tmp_path):
    store = TuningStore(tmp_path)
    store.put("op", {"a": 1}, {"best": 1})
    store.path("op").write_bytes(b"\xff\xfe\x00{")
    with pytest.warns(CacheWarning, match="damaged"):
        assert store.get("op", {"a": 1}) is None


def test_unusable_folder_warns_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PALLASITE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with config.scoped(autotune="cached"), pytest.warns(CacheWarning) as caught:
        remember(Tiles(128), X)
        remember(Tiles(128), X)
        assert choose(X) == choose(X) == Tiles(8)
    assert sum("cannot write" in str(one.message) for one in caught) == 1


def test_the_first_of_two_processes_wins(tmp_path):
    first, second = TuningStore(tmp_path), TuningStore(tmp_path)
    assert first.put("op", {"a": 1}, {"best": 1})["best"] == 1
    assert second.put("op", {"a": 1}, {"best": 2})["best"] == 1
    assert second.put("op", {"a": 1}, {"best": 3}, replace=True)["best"] == 3
    assert first.get("op", {"a": 1})["best"] == 3


def test_old_entries_are_dropped(tmp_path):
    store = TuningStore(tmp_path)
    many = {encoding.digest({"n": n}): {"key": {"n": n}, "best": n} for n in range(MAX_ENTRIES)}
    store.put("op", {"n": 0}, {"best": 0})
    content = {"format": 1, "entries": many}
    store.path("op").write_text(json.dumps(content))
    store.put("op", {"n": "new"}, {"best": "new"})
    assert store.get("op", {"n": 0}) is None
    assert store.get("op", {"n": 1})["best"] == 1
    assert store.get("op", {"n": "new"})["best"] == "new"


def _write_many(directory, start, failures):
    try:
        store = TuningStore(directory)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(start, start + 40):
                store.put("op", {"n": number}, {"best": number})
                assert store.get("op", {"n": number})["best"] == number
    except BaseException as error:
        failures.put(repr(error))
        raise


def test_processes_lose_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    failures = context.Queue()
    workers = [
        context.Process(target=_write_many, args=(tmp_path, 40 * one, failures)) for one in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert failures.empty(), failures.get()
    store = TuningStore(tmp_path)
    assert [store.get("op", {"n": n})["best"] for n in range(80)] == list(range(80))
    assert {path.name for path in store.directory.iterdir()} == {"op.json", ".lock"}


# Inputs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "int8", "uint16", "int4", "bool"],
)
def test_random_inputs(dtype):
    x = jax.ShapeDtypeStruct((64, 32), dtype)
    sets = input_sets((x, {"scale": 2.0, "y": x}))
    assert len(sets) == MAX_SETS
    first, second = (np.asarray(one[0]).astype(np.float64) for one in sets[:2])
    assert sets[0][1]["scale"] == 2.0
    assert sets[0][0].dtype == x.dtype and sets[0][0].shape == x.shape
    assert np.isfinite(first).all() and len(np.unique(first)) > 1
    assert np.any(first != second) and np.any(first != np.asarray(sets[0][1]["y"], np.float64))
    if np.dtype(dtype).kind in "iub" or dtype == "int4":
        assert first.min() >= -4 and first.max() <= 4
    elif dtype != "float8_e8m0fnu":
        assert 0.8 < first.std() < 1.2
    again = input_sets((x, {"scale": 2.0, "y": x}))
    np.testing.assert_array_equal(np.asarray(again[3][0]), np.asarray(sets[3][0]))


def test_inputs_exceed_the_cache():
    row = jnp.zeros((2**20,), jnp.int8)
    sets = input_sets((row,))
    assert len(sets) == MAX_SETS
    large = jax.ShapeDtypeStruct((ROTATED_BYTES // 4 + 1,), jnp.int8)
    sets = input_sets((large,), lambda key: (jnp.zeros(large.shape, large.dtype),))
    assert len(sets) == 4 and sum(map(array_bytes, sets)) > ROTATED_BYTES
    assert len(input_sets((3, "x"))) == 1


def test_arrays_are_copied():
    x = jnp.arange(6)
    sets = input_sets((x, 3))
    assert sets[0][0] is x
    for one, number in sets:
        np.testing.assert_array_equal(one, x)
        assert number == 3
    assert len({one.unsafe_buffer_pointer() for one, _ in sets}) == len(sets)


def test_own_inputs():
    sets = input_sets((X, 2), lambda key: [jax.random.uniform(key, (4,)), 5])
    assert sets[0][1] == 5 and np.any(sets[0][0] != sets[1][0])
    with pytest.raises(InvalidTypeError, match="make_inputs"):
        input_sets((X,), lambda key: (X,))


# The search ---------------------------------------------------------------------------------------


def numbered(count):
    return [types.SimpleNamespace(number=number) for number in range(count)]


def search(times):
    """What is chosen, and how often each candidate ran."""
    runs = [0] * len(times)

    def measure(trials, repeats):
        for trial in trials:
            runs[trial.number] += repeats
        return [times[trial.number] for trial in trials]

    best, _ = fastest(numbered(len(times)), measure)
    return best.number, runs


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=40))
def test_the_fastest_is_found(times):
    best, runs = search(times)
    assert times[best] <= min(times) * 1.01
    assert min(runs) >= min(FIRST_REPEATS, LAST_REPEATS)


def test_slow_candidates_run_rarely():
    times = [1.0 + 0.1 * n for n in range(32)]
    best, runs = search(times)
    assert best == 0
    assert runs[16:] == [FIRST_REPEATS] * 16
    assert runs[0] == max(runs) >= LAST_REPEATS
    assert sum(1 for one in runs if one >= LAST_REPEATS) == FINALISTS


def test_ties_go_to_the_first():
    assert search([1.0] * 9)[0] == 0
    assert search([2.0, 1.005, 1.0, 1.009])[0] == 1
    assert search([2.0, 1.02, 1.0, 1.009])[0] == 2


def test_candidates_that_cannot_be_measured():
    assert search([math.nan, math.inf, 3.0, 4.0])[0] == 2
    assert search([math.nan] * 6 + [1.0])[0] == 6
    with pytest.raises(ExecutionError, match="no configuration could be measured"):
        search([math.nan] * 6)


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
    x = jnp.asarray(np.random.default_rng(0).normal(size=512), jnp.float32)
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


# Comparison with a reference ----------------------------------------------------------------------


def test_compare():
    x = np.float32([1.0, -100.0, np.nan, np.inf])
    compare(x, x)
    compare(x + np.float32([0.005, 0, 0, 0]), x)
    with pytest.raises(WrongResultError, match=r"the result differs.*2.00e-04 > 1e-04"):
        compare(x + np.float32([0.02, 0, 0, 0]), x)
    compare(x + np.float32([0.02, 0, 0, 0]), x, tolerance=1e-3)
    with pytest.raises(WrongResultError, match="nan"):
        compare(np.float32([np.nan, -100.0, np.nan, np.inf]), x)
    with pytest.raises(WrongResultError, match="result 1 differs"):
        compare((x, np.int8([1, 2])), (x, np.int8([1, 3])))
    with pytest.raises(WrongResultError, match=r"shape \(4,\), the reference \(2, 2\)"):
        compare(x, x.reshape(2, 2))
    with pytest.raises(WrongResultError, match="1 results where the reference has 2"):
        compare(x, (x, x))
    compare(jnp.asarray(x, jnp.bfloat16), x * np.float32(1.01))
    with pytest.raises(WrongResultError):
        compare(jnp.asarray(x, jnp.bfloat16), x * np.float32(1.03))


# Times from a profile -----------------------------------------------------------------------------


def profile(*planes):
    """What ``jax.profiler.ProfileData`` looks like; events are (module, start, duration)."""
    space = types.SimpleNamespace
    return space(
        planes=[
            space(
                name=name,
                lines=[
                    space(
                        events=[
                            space(
                                start_ns=start,
                                duration_ns=duration,
                                stats=[("hlo_module", module)] if module else [],
                            )
                            for module, start, duration in events
                        ]
                    )
                    for events in lines
                ],
            )
            for name, lines in planes
        ]
    )


def test_times_of_kernels():
    first = [("jit_a", 10, 5), ("jit_b", 15, 7), (None, 16, 99), ("jit_a", 30, 6)]
    data = profile(
        ("/host:CPU", [[("jit_a", 0, 1000)]]),
        ("/device:GPU:0", [first, [("jit_a", 20, 1)]]),
        ("/device:GPU:1", [[("jit_b", 15, 9)]]),
    )
    times = timing.kernel_times(data)
    assert times == {"jit_a": pytest.approx([5e-9, 1e-9, 6e-9]), "jit_b": pytest.approx([9e-9])}


def test_median_time():
    assert timing.median_time([], 4) is None
    assert timing.median_time([1.0, 2.0, 9.0], 3) == 2.0
    assert timing.median_time([1.0, 10.0, 2.0, 20.0, 3.0, 30.0], 3) == 22.0
    assert timing.median_time([1.0, 2.0, 3.0], 2) == 3.0  # An odd number: the mean.


def test_measuring_without_a_gpu_uses_the_clock():
    """What a GPU's profile does not show is timed by the clock."""
    log = []

    def measure(trials, repeats):
        log.extend(timing.measure_on_gpu(trials, 3))
        return log

    pallasite.autotune(lambda c, x: x * c, [1, 2], V, measure=measure)
    assert len(log) == 2 and all(0 < seconds < 1 for seconds in log)


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
