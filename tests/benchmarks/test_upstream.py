"""Upstream's kernels as contenders: the search for configurations, what is converted for them."""

import dataclasses

import attention
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contest import Candidate

import upstream


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration with two fields."""

    tile: int
    order: str = "rows"


def search(milliseconds, first, *refine) -> list[Config]:
    """The configurations that a search tries, given the time of each."""
    candidates = upstream.climb(lambda c: Candidate(str(c), lambda: c), first, *refine)
    tried: list[Config] = []
    try:
        candidate = next(candidates)
        while True:
            tried.append(candidate.call())
            candidate = candidates.send(milliseconds(tried[-1]))
    except StopIteration:
        return tried


def orders(best: Config) -> list[Config]:
    return [Config(best.tile, order) for order in ("rows", "columns")]


def test_search_refines_the_best_and_repeats_nothing():
    times = {64: 3.0, 128: 1.0, 256: None}
    tried = search(lambda c: times[c.tile], [Config(64), Config(128), Config(256)], orders)
    assert tried == [Config(64), Config(128), Config(256), Config(128, "columns")]


def test_search_ends_where_nothing_works():
    assert search(lambda c: None, [Config(64), Config(128)], orders) == [Config(64), Config(128)]


def test_labels_leave_out_defaults():
    assert upstream.label(Config(64)) == "tile=64"
    assert upstream.label(Config(64, "columns")) == "tile=64 order=columns"


@pytest.mark.parametrize("search", upstream.SEARCHES)
def test_product_configurations_fit_the_rows_of_the_benchmark(search: str):
    pytest.importorskip("absl", reason="upstream's kernels import it")
    for m, n in ((2048, 2048), (4096, 4096), (8192, 8192), (64, 8192), (128, 8192)):
        first, refine = upstream.matmul_configs(m, search)
        configs = [*first, *(c for step in refine for one in first for c in step(one))]
        assert len(first) == (1 if search == "one" else len(first)) > 0
        for c in configs:
            doubled = 1 + (c.cluster_dimension is not None and c.cluster_dimension.name == "M")
            assert m % (c.tile_m * (1 + (c.wg_dimension.name == "M")) * doubled) == 0
            doubled = 1 + (c.cluster_dimension is not None and c.cluster_dimension.name == "N")
            assert n % (c.tile_n * (1 + (c.wg_dimension.name == "N")) * doubled) == 0


def test_few_rows_are_padded_and_cut_off_again(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("absl", reason="upstream's kernels import it")
    seen = []

    def product(config):
        def call(a, b):
            seen.append(a.shape)
            return a @ b

        return call

    monkeypatch.setattr(upstream, "matmul", product)
    a, b = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(16, 32), (32, 8)]))
    for candidate in upstream.matmul_candidates(16, "quick"):
        result = candidate.output(candidate.call(*candidate.prepare(a, b)))
        np.testing.assert_allclose(result, a @ b, rtol=1e-5)
        assert f"padded to {seen[-1][0]} rows" in candidate.label
    assert set(seen) == {(64, 32), (128, 32)}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("search", upstream.SEARCHES)
def test_attention_configurations_fit_the_rows(head_dim: int, causal: bool, search: str):
    pytest.importorskip("absl", reason="upstream's kernels import it")
    for sequence in (4096, 16384):
        for config in upstream.attention_configs(head_dim, causal, False, search, sequence):
            assert sequence % config.block_kv == sequence % (2 * config.block_q) == 0
            assert config.causal == causal
        backward = upstream.attention_configs(head_dim, causal, True, search, sequence)
        assert all(config.has_backward_blocks for config in backward)
        assert len(set(backward)) == len(backward)


@pytest.mark.parametrize("backward", [False, True])
def test_unscaled_attention_in_float16_is_compared_rightly(
    backward: bool, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("absl", reason="upstream's kernels import it")
    types = set()

    def in_float32(q, k, v):
        return jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)), scale=1.0)

    @jax.custom_vjp
    def attend(q, k, v):
        return in_float32(q, k, v).astype(q.dtype)

    def forward(q, k, v):
        return attend(q, k, v), (q, k, v)

    def gradient(saved, do):
        _, pull = jax.vjp(in_float32, *saved)
        return pull(do.astype(jnp.float32))

    attend.defvjp(forward, gradient)

    def unscaled(config, pipelined=False, module=None):
        def call(q, k, v):
            types.update(str(x.dtype) for x in (q, k, v))
            return attend(q, k, v)

        return call

    monkeypatch.setattr(upstream, "attention", unscaled)
    problem = attention.Problem(1, 256, 2, 64, causal=False, backward=backward)
    row = attention.make_row(problem)
    inputs = row.inputs(0)
    make = upstream.attention_gradient_candidates if backward else upstream.attention_candidates
    labels = []
    for candidate in make(256, 64, False, "quick"):
        labels.append(candidate.label)
        if len(labels) > 1:
            continue
        result = candidate.output(candidate.call(*candidate.prepare(*inputs)))
        errors = row.errors(result, row.reference(*inputs))
        for name, limit in row.limits.items():
            assert errors[name] < limit
    assert types == {"float16"}
    assert all(label.startswith("float16 ") for label in labels)
    assert len(labels) > 1
