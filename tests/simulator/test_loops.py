"""Loops that the simulator compiles for the processor: what they compute, and what is kept."""

from __future__ import annotations

import numpy as np
import pytest

from pallasite import config
from pallasite_simulator.instructions import compiled
from pallasite_simulator.loop_store import LOOPS


@pytest.fixture
def optimized(monkeypatch, tmp_path):
    """The efforts of loops that LLVM has optimized, with a cache folder of one's own."""
    efforts, optimize = [], compiled._optimize
    monkeypatch.setattr(
        compiled, "_optimize", lambda *args: efforts.append(args[2]) or optimize(*args)
    )
    with config.scoped(cache=True, cache_dir=tmp_path):
        yield efforts


def mixed(a, b):
    """A new function for the sum of a and three times b, modulo 2**16."""

    def emit(builder, a, b):
        return builder.add(a, builder.mul(b, b.type(3)))

    return compiled.elementwise(emit, [16, 16], 16)(a, b)


def test_machine_code_is_found_again(optimized, tmp_path):
    a, b = np.random.default_rng(7).integers(0, 2**16, (2, 1000), np.uint16)
    for _ in range(2):
        np.testing.assert_array_equal(mixed(a, b), a + np.uint16(3) * b)
    assert optimized == [0]
    (path,) = tmp_path.rglob(f"*{LOOPS.suffix}")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="a damaged file of loops of the simulator was removed"):
        np.testing.assert_array_equal(mixed(b, a), b + np.uint16(3) * a)
    with config.scoped(cache=False):
        np.testing.assert_array_equal(mixed(a, a), np.uint16(4) * a)
    assert optimized == [0, 0, 0]


def test_each_effort_and_text_has_its_own(optimized):
    texts = [f"define i32 @loop() {{ ret i32 {number} }}" for number in (1, 2)]
    for effort in (0, 2, 0, 2):
        for text in texts:
            assert compiled.compile_loop(text, effort)
    assert optimized == [0, 0, 2, 2]


def test_other_code_of_the_simulator_finds_nothing(optimized, monkeypatch):
    text = "define i32 @loop() { ret i32 3 }"
    for source in ("before", "after", "before"):
        monkeypatch.setattr(compiled, "_SOURCE", source)
        assert compiled.compile_loop(text)
    assert optimized == [0, 0]
