"""The comparison of inferred layouts with those that the source names."""

import contest
import program
import pytest
import timing

import layouts
import pallasite

CASES = {case.row.name: case for case in layouts.cases(rehearse=True)}


def arguments(*argv: str):
    return program.parse(program.parser("a program"), argv)


def both(case: layouts.Case):
    """Our candidate with inferred layouts, and with explicit ones."""
    options = arguments()
    return next(case.ours(options)), next(layouts.explicit(case, options))


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_both(name: str):
    """Only those of the library have inferred layouts; all have the same names and memory."""
    case = CASES[name]
    inputs = case.row.inputs(0)
    inferred, explicit = (
        pallasite.compile_all(one.call, *one.prepare(*inputs), target="sm_90a")
        for one in both(case)
    )
    assert [one.name for one in inferred] == [one.name for one in explicit]
    assert all(one.layouts is not None for one in inferred)
    assert all(one.layouts is None for one in explicit)
    for one, other in zip(inferred, explicit, strict=True):
        assert one.resources.shared_memory_bytes == other.resources.shared_memory_bytes
        assert one.ptx.count("wgmma.mma_async") == other.ptx.count("wgmma.mma_async")


@pytest.mark.parametrize("name", ["bf16_128x256x128", "forward_s256_d64", "backward_s256_d64"])
def test_both_compute_what_the_reference_does(name: str):
    case = CASES[name]
    options = contest.Options(rounds=1, calls=4, trial_calls=1)
    contenders = layouts.contenders(case, arguments())
    result = contest.run_row(case.row, contenders, options, timing.ClockTimer())
    assert [one.contender for one in result.results] == [contest.OURS, layouts.EXPLICIT]
    for one in result.results:
        assert one.milliseconds is not None, one.note


def test_the_library_is_itself_again_afterwards():
    from pallasite_hopper.ops.dense import run

    before = run._kernel
    case = next(iter(CASES.values()))
    _, explicit = both(case)
    pallasite.compile_all(explicit.call, *case.row.inputs(0), target="sm_90a")
    assert run._kernel is before


def test_lines_that_are_counted():
    source = '''"""A module."""

import math  # for pi

# A comment.


def f(
    x,
):
    """Twice.

    A circle.
    """
    text = """no
    docstring"""
    return 2 * math.pi * x, text
'''
    assert layouts.code_lines(source) == 7


def test_kernels_are_shorter_without_layouts():
    counts = layouts.source_lines()
    assert set(counts) == {case.family for case in layouts.cases(rehearse=False)}
    assert all(both["inferred"] < both["explicit"] for both in counts.values())
