"""JAX's published kernels under both compilers: cases, comparison, options, the table."""

import dataclasses

import contest
import jax
import jax.numpy as jnp
import program
import published
import published_cases
import published_kernels
import pytest
import timing
import upstream_library
from contest import Candidate, Result, RowResult
from published_kernels import NOT_EQUAL

pytest.importorskip("absl", reason="JAX's kernels import it")

CASES = {case.row.name: case for case in published_cases.cases()}
TINY = {case.row.name: case for case in published_cases.tiny_cases()}


def arguments(*argv: str):
    parser = program.parser("a program")
    parser.add_argument("--semantics", default="lane")
    return program.parse(parser, argv)


def test_rows_have_names_of_their_own():
    assert len(CASES) == 20 and len(TINY) == 8
    assert {case.module for case in CASES.values()} == {case.module for case in TINY.values()}
    assert {case.row.group for case in CASES.values()} == {c.row.group for c in TINY.values()}
    this = published_kernels.benchmark(arguments("--quick"))
    assert {CASES[name].row.group for name in this.quick} == {c.row.group for c in TINY.values()}
    assert program.selected(this, arguments("--rows", "mixed", "--code-time", "0")) == [
        "mixed_4096x8192x4096_64x128_wgM",
        "mixed_4096x8192x4096_128x64_wgN",
    ]


COMPILED = [case for step in range(2) for case in published_cases.compiled_cases(step)]


def test_compiled_kernels_have_new_shapes_each_time():
    first, second = COMPILED[:8], COMPILED[8:]
    groups = [case.row.group for case in TINY.values()]
    for one, other, group in zip(first, second, groups, strict=True):
        assert one.row.group == other.row.group == group
        assert one.row.name != other.row.name


@pytest.mark.parametrize("case", [*CASES.values(), *COMPILED], ids=lambda case: case.row.name)
def test_configurations_fit_their_shapes(
    case: published_cases.Case, monkeypatch: pytest.MonkeyPatch
):
    """Traced by JAX's module as if there were a GPU."""
    module = upstream_library.load(case.module)
    for attribute, value in published.with_multiprocessors(module, 132).items():
        monkeypatch.setattr(module, attribute, value)
    inputs = jax.eval_shape(lambda: case.row.inputs(0))
    expected = jax.eval_shape(lambda *x: case.row.reference(*x), *inputs)
    candidate = case.candidate(module)
    results = jax.eval_shape(candidate.call, *jax.eval_shape(candidate.prepare, *inputs))
    found = jax.eval_shape(candidate.output, results)
    assert [x.shape for x in jax.tree.leaves(found)] == [x.shape for x in jax.tree.leaves(expected)]


@pytest.mark.parametrize("name", [n for n in TINY if "ragged" not in n and "pipelined" not in n])
def test_lane_semantics_compute_what_the_reference_does(name: str):
    case = TINY[name]
    row = published_kernels.compared(case)
    ours = published_kernels.contenders(case, "lane")[:1]
    options = contest.Options(rounds=1, calls=4, trial_calls=1)
    (result,) = contest.run_row(row, ours, options, timing.ClockTimer()).results
    assert result.milliseconds is not None, result.note
    assert (NOT_EQUAL in result.errors) == (jax.default_backend() == "gpu")


@pytest.fixture
def case() -> published_cases.Case:
    """A sum, of which JAX's compiler gets two elements a little wrong."""
    case = TINY["attention_forward_s128_d64"]
    row = dataclasses.replace(
        case.row,
        inputs=lambda seed: (jnp.arange(8.0),),
        reference=lambda x: x + 1,
        errors=lambda result, reference: {"largest": jnp.max(jnp.abs(result - reference))},
        limits={"largest": 0.1},
        input_bytes=2**30,
    )

    def candidate(module):
        wrong = jnp.array([0, 0, 0.0625, 0, 0, 0, 0.0625, 0]) if module.__name__ != "ours" else 0.0
        return Candidate("sum", lambda x: x + 1 + wrong)

    return dataclasses.replace(case, row=row, candidate=candidate)


def test_elements_that_differ_are_counted(
    case: published_cases.Case, monkeypatch: pytest.MonkeyPatch
):
    class Module:
        __name__ = "ours"

    monkeypatch.setattr(published_kernels, "loaded", lambda module, semantics: Module())
    both = published_kernels.contenders(case, "warpgroup")
    options = contest.Options(rounds=1, calls=4, trial_calls=1)
    row = published_kernels.compared(case)
    result = contest.run_row(row, both, options, timing.ClockTimer())
    ours, theirs = result.results
    assert ours.milliseconds is not None and theirs.milliseconds is not None
    assert ours.errors == {"largest": 0.0, NOT_EQUAL: 2.0}
    assert theirs.errors == {"largest": 0.0625, NOT_EQUAL: 0.0}


def test_a_kernel_that_does_not_compile_gives_a_row(
    case: published_cases.Case, monkeypatch: pytest.MonkeyPatch
):
    def refuse(module: str, semantics: str):
        raise NotImplementedError(f"{module} in {semantics}\nand more")

    monkeypatch.setattr(published_kernels, "loaded", refuse)
    both = published_kernels.contenders(case, "warpgroup")
    options = contest.Options(rounds=1, calls=4, trial_calls=1)
    row = published_kernels.compared(case)
    ours, theirs = contest.run_row(row, both, options, timing.ClockTimer()).results
    assert ours.note == "NotImplementedError: attention_mgpu in warpgroup"
    assert ours.milliseconds is None and theirs.milliseconds is not None


def test_table(capsys: pytest.CaptureFixture[str]):
    def named(name: str, ours: float | None, theirs: float, count: float) -> RowResult:
        errors = {} if ours is None else {NOT_EQUAL: count}
        results = [
            Result("ours", milliseconds=ours, errors=errors),
            Result("upstream", milliseconds=theirs),
        ]
        return RowResult(name, "matmul", 10**12, 1, results)

    rows = [named("a", 1.0, 2.0, 0.0), named("b", 2.0, 1.0, 17.0), named("c", None, 1.0, 0.0)]
    summary = published_kernels.print_table(rows, {})
    assert summary["not_equal"] == {"a": 0.0, "b": 17.0, "c": None}
    assert summary["geometric_means"] == {"matmul": pytest.approx(1.0)}
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2] == ["a", "1000.0", "500.0", "2.000", "yes"]
    assert lines[3] == ["b", "500.0", "1000.0", "0.500", "17", "differ"]
    assert lines[4] == ["c", "failed", "1000.0", "-", "-"]
