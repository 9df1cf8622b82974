"""The rows of the operations library: references, contenders, JAX's kernels, the table."""

import dataclasses
import functools
import warnings

import contest
import jax
import jax.numpy as jnp
import library
import numpy as np
import program
import published
import pytest
import timing
import upstream_library
from contest import Result, RowResult
from library_decode import Decode
from library_mixed import Mixed
from library_ragged import Ragged

TINY = {problem.row().name: problem for problem in library.problems(rehearse=True)}
ROWS = {problem.row().name: problem for problem in library.problems(rehearse=False)}


def arguments(*argv: str):
    return program.parse(program.parser("a program"), argv)


@pytest.mark.parametrize("name", TINY)
def test_contenders_compute_what_the_reference_does(name: str):
    problem = TINY[name]
    chosen = [
        one
        for one in problem.contenders(arguments("--quick"))
        if one.name in ("ours", "xla", "bf16")
    ]
    options = contest.Options(rounds=1, calls=4, trial_calls=1)
    result = contest.run_row(problem.row(), chosen, options, timing.ClockTimer())
    assert [one.contender for one in result.results] == [one.name for one in chosen]
    for one in result.results:
        assert one.milliseconds is not None, one.note
        assert all(trial.milliseconds is not None for trial in one.trials)


def as_numbers(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_reference_of_narrow_weights(weights: str):
    problem = Mixed(weights, 5, 64, 96)
    a, w = problem.inputs(3)
    assert w.dtype == weights
    assert int(w.max()) == 2 ** (problem.bits - 1) - 1 and int(w.min()) == -(
        2 ** (problem.bits - 1)
    )
    wide_a, wide_w = as_numbers(a, w.astype(jnp.int8))
    np.testing.assert_allclose(
        problem.row().reference(a, w), wide_a @ wide_w.T, rtol=1e-5, atol=1e-3
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_reference_of_groups(transposed: bool, transpose_b: bool):
    problem = Ragged(100, 24, 40, 4, transposed, transpose_b and not transposed)
    a, b, sizes = problem.inputs(1)
    assert int(sizes.sum()) == 100 and len(set(sizes.tolist())) > 1
    result = problem.reference(a, b, sizes)
    a, b = as_numbers(a, b)
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        if transposed:
            found, expected = result[group], a[start:end].T @ b[start:end]
        else:
            matrix = b[group].T if problem.transpose_b else b[group]
            found, expected = result[start:end], a[start:end] @ matrix
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("full", [False, True])
def test_reference_of_decoding(full: bool):
    problem = Decode(3, 128, full, heads=4, kv_heads=2, head_dim=32, page_size=16)
    q, k_pages, v_pages, lengths, pages = problem.inputs(2)
    assert sorted(lengths.tolist()) == [128] * 3 if full else [85, 106, 128]
    result = np.asarray(problem.reference(q, k_pages, v_pages, lengths, pages))
    queries, k_pages, v_pages = as_numbers(q, k_pages, v_pages)
    for sequence in range(3):
        for head in range(4):
            k, v = (
                x[head // 2, pages[sequence]].reshape(-1, 32)[: lengths[sequence]]
                for x in (k_pages, v_pages)
            )
            weights = np.exp(k @ queries[sequence, head] / np.sqrt(32))
            expected = weights @ v / weights.sum()
            np.testing.assert_allclose(result[sequence, head], expected, rtol=1e-4, atol=1e-5)


def test_a_wrong_head_of_one_sequence_is_seen():
    row = Decode(2, 128, heads=4, kv_heads=2, head_dim=64).row()
    reference = row.reference(*row.inputs(0))
    right = reference.astype(jnp.bfloat16)
    assert all(row.errors(right, reference)[n] < limit for n, limit in row.limits.items())
    wrong = row.errors(right.at[1, 2].multiply(1.1), reference)
    assert wrong["chunk"] > row.limits["chunk"]


def test_decode_reference_takes_the_cache_as_arguments():
    """Gigabytes of constants take minutes to compile with."""
    row = Decode(2, 128, heads=4, kv_heads=2, head_dim=64).row()
    inputs = row.inputs(0)
    before = jax.config.jax_captured_constants_warn_bytes
    jax.config.update("jax_captured_constants_warn_bytes", inputs[1].nbytes)
    try:
        with warnings.catch_warnings(action="error"):
            row.reference(*inputs)
    finally:
        jax.config.update("jax_captured_constants_warn_bytes", before)


def test_operations_and_bytes():
    few = Mixed("int4", 64, 8192, 4096).row()
    assert few.flops == 2 * 64 * 8192 * 4096
    assert few.bytes == 8192 * 4096 // 2 + 2 * 64 * (8192 + 4096)
    assert few.group == "int4 few rows" and Mixed("int4", 4096, 64, 64).row().group == "int4"
    grouped, transposed = (Ragged(1024, 256, 512, 8, transposed).row() for transposed in (0, 1))
    assert grouped.flops == transposed.flops == 2 * 1024 * 256 * 512
    assert grouped.bytes == transposed.bytes == 2 * (1024 * (256 + 512) + 8 * 256 * 512)
    assert transposed.input_bytes == 2 * 1024 * (256 + 512)
    decode = Decode(4, 1024, full=False, heads=8, kv_heads=2, head_dim=128)
    assert decode.lengths().tolist() == [640, 768, 896, 1024]
    assert decode.row().bytes == 3328 * 2 * 2 * 128 * 2 + 2 * 4 * 8 * 128 * 2
    assert len(ROWS) == 28
    assert set(library.QUICK) < set(ROWS)


# JAX's kernels ------------------------------------------------------------------------------------


def candidates(problem, search: str):
    """Candidates of JAX's kernel, each faster than the one before."""
    given = arguments("--upstream-configs", search)
    (theirs,) = (one for one in problem.contenders(given) if one.name == "upstream")
    chosen, milliseconds = theirs.candidates(), 100.0
    try:
        candidate = next(chosen)
        while True:
            yield candidate
            milliseconds -= 1.0
            candidate = chosen.send(milliseconds)
    except StopIteration:
        return


@pytest.mark.parametrize("search", ["one", "quick"])
@pytest.mark.parametrize("name", [n for n in ROWS if "int4" not in n and "s4096" not in n])
@pytest.mark.sampled(alone=("search",))
def test_jax_kernels_take_what_they_are_given(
    name: str, search: str, monkeypatch: pytest.MonkeyPatch
):
    """All configurations, traced for the shapes of the rows as if there were a GPU."""
    pytest.importorskip("absl", reason="JAX's kernels import it")
    for module in ("hopper_mixed_type_matmul_mgpu", "transposed_ragged_dot_mgpu"):
        loaded = upstream_library.load(module)
        for attribute, value in published.with_multiprocessors(loaded, 132).items():
            monkeypatch.setattr(loaded, attribute, value)
    problem = ROWS[name]
    inputs = jax.eval_shape(lambda: problem.row().inputs(0))
    (expected,) = {
        one.shape for one in [jax.eval_shape(lambda *x: problem.row().reference(*x), *inputs)]
    }
    labels = []
    for candidate in candidates(problem, search):
        results = jax.eval_shape(candidate.call, *jax.eval_shape(candidate.prepare, *inputs))
        assert jax.eval_shape(candidate.output, results).shape == expected
        labels.append(candidate.label)
    assert len(labels) == 1 if search == "one" else len(labels) > (3 if "d256" not in name else 0)
    assert len(set(labels)) == len(labels)


def test_jax_kernel_for_narrow_weights_takes_no_4_bits():
    pytest.importorskip("absl", reason="JAX's kernels import it")
    problem = TINY["int4_136x128x128"]
    given = dataclasses.replace(problem, m=128)
    (candidate,) = candidates(given, "quick")
    with pytest.raises(NotImplementedError, match="int4"):
        candidate.call(*candidate.prepare(*given.inputs(0)))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_jax_decoding_is_compared_rightly(full: bool, paged: bool, monkeypatch: pytest.MonkeyPatch):
    """Scales, the gathering of pages and lengths are right; interpreted on the CPU."""
    for module, function in (("paged_attention", "paged_attention"), ("decode_attention", "mqa")):
        loaded = upstream_library.load(module)
        interpreted = functools.partial(getattr(loaded, function), interpret=True)
        monkeypatch.setattr(loaded, function, interpreted)
    problem = Decode(2, 128, full, heads=16, kv_heads=1, head_dim=32, page_size=16)
    row = problem.row()
    inputs = row.inputs(0)
    blocks = upstream_library.DecodeBlocks(32, 2, 4, paged)
    candidate = upstream_library.decode_candidate(problem, blocks)
    result = candidate.output(candidate.call(*candidate.prepare(*inputs)))
    errors = row.errors(result, row.reference(*inputs))
    for name, limit in row.limits.items():
        assert errors[name] < limit


# Tables -------------------------------------------------------------------------------------------


def test_table(capsys: pytest.CaptureFixture[str]):
    def named(name: str, group: str, **milliseconds: float | None) -> RowResult:
        results = [Result(contender, milliseconds=ms) for contender, ms in milliseconds.items()]
        return RowResult(name, group, 4 * 10**11, 2 * 10**9, results)

    rows = [
        named("int8_64x64x64", "int8 few rows", ours=1.0, xla=2.0, bf16=1.5),
        named("ragged_64x64x64_g8", "ragged", ours=1.0, upstream=0.5, torch=None),
    ]
    facts = {"bandwidth": 4e12, "bandwidth_by": "copy", "matrix_rate": 8e14}
    bounds = {"int8_64x64x64": "copy", "ragged_64x64x64_g8": "product"}
    summary = library.print_table(rows, facts, bounds)
    assert summary["shares"] == {"int8_64x64x64": 0.5, "ragged_64x64x64_g8": 0.5}
    assert summary["geometric_means"] == pytest.approx({"int8 few rows": 1.5, "ragged": 0.5})
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == (
        ["int8_64x64x64", "1000.0", "2000.0", "-", "-", "-", "1500.0", "50.0", "%", "of", "copy"]
        + ["1.500"]
    )
    assert lines[3].split()[4:6] == ["500.0", "failed"]


def test_compiled_kernels_have_new_shapes_each_time():
    made = library.kernels(arguments("--rehearse"))
    assert list(made) == ["int8", "ragged", "transposed ragged", "decode", "forward d256"]
    for make in made.values():
        kernel = make()
        assert list(kernel.compilers) == ["ours", "upstream"]
        _, first = kernel.compilers["ours"](0)
        _, second = kernel.compilers["ours"](1)
        assert [x.shape for x in first] != [x.shape for x in second]
