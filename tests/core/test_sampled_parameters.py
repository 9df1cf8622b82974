"""Samples of combinations of parameters have all pairs of values, and stay the same."""

from __future__ import annotations

import itertools
import os
import pathlib

import pytest
from tests import python_processes, sampled_parameters

ROOT = pathlib.Path(__file__).parents[2]
AXES = {"a": range(4), "b": "xyz", "c": (None, True), "d": range(3)}
ALL = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


def chosen(alone=(), combinations=ALL):
    numbers = sampled_parameters.sample(combinations, alone, [str(one) for one in combinations])
    return [combinations[number] for number in numbers]


def pairs(combinations, names):
    return {
        ((one, values[one]), (other, values[other]))
        for values in combinations
        for one, other in itertools.combinations(names, 2)
    }


def test_pairs():
    found = chosen()
    assert pairs(found, AXES) == pairs(ALL, AXES)
    assert 12 <= len(found) <= 18 < len(ALL)


def test_values_alone():
    found = chosen(alone=("a", "d"))
    assert pairs(found, "bc") == pairs(ALL, "bc")
    assert {one["a"] for one in found} == set(AXES["a"])
    assert {one["d"] for one in found} == set(AXES["d"])
    assert 6 <= len(found) <= 7


def test_pairs_that_do_not_occur_are_not_asked_for():
    some = [one for one in ALL if (one["a"] == 0) == (one["b"] == "x")]
    assert pairs(chosen(combinations=some), AXES) == pairs(some, AXES)


def test_order_is_of_no_importance():
    reverse = chosen(combinations=ALL[::-1])
    assert reverse[::-1] == chosen()


@pytest.mark.parametrize(
    ("arguments", "tests"),
    [
        (("test_some.py",), {"plain", "few"}),
        (("test_some.py", "-m", "slow"), {"many", "long"}),
        (("test_some.py::test_long",), {"long"}),
    ],
)
def test_sessions(arguments, tests, tmp_path):
    """A session of a file has what is not slow, others what they are asked for."""
    (tmp_path / "conftest.py").write_text(
        "from tests import sampled_parameters\n"
        "def pytest_configure(config):\n"
        "    for one in sampled_parameters.MARKERS:\n"
        "        config.addinivalue_line('markers', one)\n"
        "def pytest_collection_modifyitems(config, items):\n"
        "    sampled_parameters.deselect(config, items)\n"
    )
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_plain(): pass\n"
        "@pytest.mark.slow\n"
        "def test_long(): pass\n"
        "@pytest.mark.sampled\n"
        "@pytest.mark.parametrize('x', [sum, min, max])\n"
        "@pytest.mark.parametrize('y', range(3))\n"
        "@pytest.mark.parametrize('z', range(3))\n"
        "def test_product(x, y, z): pass\n"
    )
    options = ("--collect-only", "-q", "--strict-markers", "-p", "no:cacheprovider")
    done = python_processes.run(
        ["-m", "pytest", *options, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    found = [line for line in done.stdout.splitlines() if "::" in line]
    kinds = {line.split("::test_")[1].split("[")[0] for line in found} - {"product"}
    products = sum("product" in line for line in found)
    kinds |= {"few"} if 9 <= products <= 13 else {"many"} if products >= 14 else set()
    assert kinds == tests, done.stdout + done.stderr
