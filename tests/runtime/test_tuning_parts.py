"""Parts of the autotuner: what is written, inputs, the search, comparison, times of a profile."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import multiprocessing
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallasite.errors import (
    ExecutionError,
    InvalidTypeError,
    InvalidValueError,
)
from pallasite.runtime.store import CacheWarning
from pallasite_std.tuning import encoding, timing
from pallasite_std.tuning.inputs import MAX_SETS, ROTATED_BYTES, array_bytes, input_sets
from pallasite_std.tuning.search import FINALISTS, FIRST_REPEATS, LAST_REPEATS, fastest
from pallasite_std.tuning.store import MAX_ENTRIES, TuningStore
from pallasite_std.tuning.trials import WrongResultError, compare


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A configuration like those of operations."""

    rows: int
    stages: int = 2


X = jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)


# What is written ----------------------------------------------------------------------------------


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


def test_bytes_that_are_no_text(tmp_path):
    store = TuningStore(tmp_path)
    store.put("op", {"a": 1}, {"best": 1})
    store.path("op").write_bytes(b"\xff\xfe\x00{")
    with pytest.warns(CacheWarning, match="damaged"):
        assert store.get("op", {"a": 1}) is None


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
