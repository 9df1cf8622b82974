"""Ctrl-C at any point of compiling and running: nothing is half done, and the next call works."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import config, forks, interrupts, plugins
from pallasite import gpu as plgpu
from pallasite.runtime import clear_memory
from pallasite_simulator import simulate

X = jax.ShapeDtypeStruct((128,), jnp.float32)


def kernel():
    @plgpu.kernel(out_type=X)
    def scaled(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2.5

    return scaled


class Interrupter:
    """Interrupts this thread at the n-th call of a Python function."""

    def __init__(self, last=None):
        self.calls = 0
        self.last = last

    def __call__(self, frame, event, argument):
        if event == "call":
            self.calls += 1
            if self.calls == self.last:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    def run(self, function):
        """Runs a function; returns whether it was interrupted."""
        sys.setprofile(self)
        try:
            function()
        except KeyboardInterrupt:
            return True
        except Exception as error:  # JAX turns what a callback raises into an error of its own.
            if "KeyboardInterrupt" not in str(error):
                raise
            return True
        finally:
            sys.setprofile(None)
        return False


def points(function, count, seed):
    """How many calls a function makes, and some of them."""
    counted = Interrupter()
    assert not counted.run(function)
    return sorted(random.Random(seed).sample(range(1, counted.calls), count))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path):
    names = [plugin.name for plugin in plugins.plugins() if plugin.distribution == "in process"]
    clear_memory()
    with config.scoped(cache_dir=tmp_path, disabled_plugins=names, target="sm_90"):
        yield
    clear_memory()


def all_is_well(folder, expected):
    """No lock is kept, nothing half-written is left, and kernels are what they were."""
    assert not forks._busy
    assert not list(folder.rglob(".tmp-*"))
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clear_memory()
        found.append(pallasite.compile(kernel(), X).ptx)
    assert found == [expected]
    thread = threading.Thread(target=lambda: found.append(plugins.registry()), daemon=True)
    thread.start()
    thread.join(30)
    assert len(found) == 2


@pytest.mark.parametrize("part", ["first plugins", "compile"])
def test_compiling(tmp_path, part):
    expected = pallasite.compile(kernel(), X).ptx

    def compile_anew():
        clear_memory()
        for path in tmp_path.rglob("*.kernel"):
            path.unlink()
        if part == "first plugins":  # They are asked, and the registry is built.
            plugins.refresh()
            plugins.registry()
            plugins.manager().stores()
        else:
            pallasite.compile(kernel(), X)

    compile_anew()
    interrupted = 0
    for last in points(compile_anew, 6, seed=3):
        interrupted += Interrupter(last).run(compile_anew)
        assert {one.state for one in plugins.plugins()} <= {"loaded", "found", "disabled"}
        all_is_well(tmp_path, expected)
    assert interrupted >= 5


def test_llvm():
    """At every call in llvmlite: nothing that LLVM has is freed twice, or after what it is in."""
    expected = pallasite.compile(kernel(), X).ptx
    names: list[str] = []

    def note(frame, event, argument):
        if event == "call":
            names.append(frame.f_code.co_filename)

    def compile_anew():
        clear_memory()
        return pallasite.compile(kernel(), X).ptx

    with config.scoped(cache=False):
        compile_anew()
        sys.setprofile(note)
        compile_anew()
        sys.setprofile(None)
        own = ("llvmlite", "codegen", "contextlib", "interrupts")
        found = [n for n, name in enumerate(names, 1) if any(one in name for one in own)]
        interrupted = 0
        for last in found[:: max(1, len(found) // 75)]:
            interrupted += Interrupter(last).run(compile_anew)
            gc.collect()
        assert interrupted > 50
        assert compile_anew() == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_waits_for_the_end_of_a_block():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
    assert done == [1]
    thread = threading.Thread(target=interrupts.deferred()(lambda: done.append(2)))
    thread.start()
    thread.join()
    assert done == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_blocks_in_which_nobody_forks():
    """Wherever they are left, they are left."""

    def blocks():
        with forks.unforked(), forks.unforked():
            pass

    counted = Interrupter()
    assert not counted.run(blocks)
    for last in range(1, counted.calls + 1):
        assert Interrupter(last).run(blocks)
        assert not forks._busy
    blocks()


def test_finding_on_disk(tmp_path):
    expected = pallasite.compile(kernel(), X).ptx

    def find():
        clear_memory()
        pallasite.compile(kernel(), X)

    for last in points(find, 10, seed=5):
        Interrupter(last).run(find)
        all_is_well(tmp_path, expected)


def test_running():
    compiled = pallasite.compile(kernel(), X)
    x = np.random.default_rng(0).normal(size=128).astype(np.float32)

    def run():
        (out,) = simulate(compiled, x).outputs
        np.testing.assert_array_equal(out, x * np.float32(2.5))

    run()
    for last in points(run, 12, seed=7):
        Interrupter(last).run(run)
        run()


def test_called_by_a_program():
    """The interrupt reaches whoever called, or the call had ended; then all works as before."""
    x = jnp.arange(128, dtype=jnp.float32)
    program = jax.jit(kernel())

    def run():
        np.testing.assert_array_equal(program(x), np.arange(128) * np.float32(2.5))

    run()
    for last in points(run, 6, seed=9):
        Interrupter(last).run(run)
        run()
