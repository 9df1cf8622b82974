"""What kernels gave on the simulator is taken from earlier sessions only where nothing changed."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
import types
from typing import Any

import numpy as np
import pytest
from tests import simulated_results
from tests.simulated_results import SimulatedResults

from pallasite import config
from pallasite.plugin.lowering import HiddenOperand, LaunchParameters

LAUNCH = LaunchParameters((1, 1, 1), (128, 1, 1), (1, 1, 1), 0, (), (), ())


def compiled(**changes: object) -> types.SimpleNamespace:
    """What is known of a compiled kernel."""
    known = {
        "name": "kernel",
        "ptx": ".version 8.7",
        "launch": LAUNCH,
        "plugin_options": (),
        "target": types.SimpleNamespace(name="sm_90a", multiprocessors=132),
    }
    return types.SimpleNamespace(**{**known, **changes})


class Simulator:
    """Doubles its input, takes its time, and counts its runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.prints = ""

    def run(self, inputs: list[np.ndarray]) -> tuple[list[np.ndarray], str]:
        self.runs += 1
        end = time.thread_time_ns() + 2 * simulated_results.SHORTEST_NS
        while time.thread_time_ns() < end:
            pass
        return [2 * one for one in inputs], self.prints

    def __call__(
        self, results: SimulatedResults, kernel: Any, inputs: list[np.ndarray]
    ) -> list[np.ndarray]:
        return results.outputs(kernel, inputs, lambda: self.run(inputs))


def session(folder: pathlib.Path, later: float = 3600.0) -> SimulatedResults:
    """What a session that begins so many seconds from now does."""
    results = SimulatedResults(folder, time.time_ns() + int(later * 1e9))
    results.used = True
    return results


X = [np.arange(6, dtype=np.float32).reshape(2, 3)]


@pytest.mark.parametrize("sanitize", [False, "races,bounds"])
def test_the_next_session_does_not_run_it(tmp_path, sanitize):
    """What it gets is what the first one got; the order of groups of checks says nothing."""
    simulator = Simulator()
    with config.scoped(sanitize=sanitize):
        first = simulator(session(tmp_path), compiled(), X)
    with config.scoped(sanitize=sanitize and "bounds,races"):
        second = simulator(session(tmp_path), compiled(), X)
    assert simulator.runs == 1
    np.testing.assert_array_equal(second, first)
    assert second[0].dtype == np.float32


@pytest.mark.parametrize(
    "changes",
    [
        {"ptx": ".version 8.8"},
        {"name": "other"},
        {"launch": dataclasses.replace(LAUNCH, grid=(2, 1, 1))},
        {"plugin_options": (("standard", "partial_outputs", "True"),)},
        {"target": types.SimpleNamespace(name="sm_90a", multiprocessors=1)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_kernels_run(tmp_path, changes):
    """Whatever of it differs."""
    simulator = Simulator()
    simulator(session(tmp_path), compiled(), X)
    simulator(session(tmp_path), compiled(**changes), X)
    assert simulator.runs == 2


@pytest.mark.parametrize(
    "inputs",
    [[X[0] + 1], [X[0].view(np.int32)], [X[0].reshape(3, 2)], [*X, *X]],
    ids=["values", "type", "shape", "number"],
)
def test_other_inputs_run(tmp_path, inputs):
    """Their bytes, types and shapes count."""
    simulator = Simulator()
    simulator(session(tmp_path), compiled(), X)
    found = simulator(session(tmp_path), compiled(), inputs)
    assert simulator.runs == 2
    np.testing.assert_array_equal(found, [2 * one for one in inputs])


def test_with_the_sanitizer_it_runs(tmp_path):
    """What ran unchecked says nothing of what checks find."""
    simulator = Simulator()
    for sanitize in (False, True):
        with config.scoped(sanitize=sanitize):
            simulator(session(tmp_path), compiled(), X)
    assert simulator.runs == 2


def test_a_session_runs_what_it_has_not_found(tmp_path):
    """Twice, if tests do: what is not the same each time is seen."""
    simulator = Simulator()
    results = session(tmp_path, later=0.0)
    for _ in range(2):
        simulator(results, compiled(), X)
    assert simulator.runs == 2


def test_other_sources_run(tmp_path, monkeypatch):
    """Any file of the sources; results of the former ones go."""
    sources = tmp_path / "sources" / "framework"
    sources.mkdir(parents=True)
    file = sources / "rule.py"
    file.write_text("1")
    monkeypatch.setattr(simulated_results, "ROOT", sources.parent)
    monkeypatch.setattr(simulated_results, "__file__", str(file))
    folder, simulator = tmp_path / "results", Simulator()
    folder.mkdir()
    for text in ("1", "2"):
        file.write_text(text)
        simulator(session(folder), compiled(), X)
        assert len(list(folder.iterdir())) == 1
    assert simulator.runs == 2


def test_what_is_not_kept(tmp_path):
    """What is printed, hidden operands, broken files, errors, and modules of other tests."""
    simulator = Simulator()
    simulator.prints = "text\n"
    simulator(session(tmp_path), compiled(), X)
    simulator.prints = ""
    simulator(session(tmp_path), compiled(), X)
    assert simulator.runs == 2
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.write_bytes(b"garbage")
            os.utime(file, (0, 0))
    simulator(session(tmp_path), compiled(), X)
    assert simulator.runs == 3
    hidden = dataclasses.replace(
        LAUNCH, hidden_operands=(HiddenOperand(name="x", input=0, value=b""),)
    )
    for _ in range(2):
        simulator(session(tmp_path), compiled(launch=hidden), X)
    assert simulator.runs == 5
    unused = session(tmp_path)
    unused.used = False
    simulator(unused, compiled(), X)
    assert simulator.runs == 6


def test_whose_kernels_are_not_run(monkeypatch, tmp_path):
    """Tests of the simulator always run it."""
    results = session(tmp_path)
    monkeypatch.setattr(SimulatedResults, "of_session", results)
    tests = simulated_results.ROOT / "tests"
    for name, used in {"ops/test_rows.py": True, "simulator/test_floats.py": False}.items():
        simulated_results.chosen_for(tests / name)
        assert results.used is used
