"""The demonstration: what it runs, its table, what it says of missing features, its exit status."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from tests import python_processes

import pallasite
from examples import catalog, demo, measuring
from pallasite import gpu as plgpu
from pallasite import plugins
from pallasite.codegen.tools import find_tool
from pallasite.target_selection import find_target

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGETS = ["sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103a", "sm_110a", "sm_120a"]


def example(name: str) -> catalog.Example:
    return next(one for one in catalog.all_examples() if one.name == name)


def task(name: str, target: str = "sm_90a", execute: bool = False) -> measuring.Task:
    return measuring.Task(name, target, find_tool("ptxas").path is not None, execute)


@pytest.fixture
def replace_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[catalog.Example], None]:
    """Makes one example the whole catalog."""

    def replace(one: catalog.Example) -> None:
        monkeypatch.setattr(demo, "all_examples", lambda: [one])
        monkeypatch.setattr(measuring, "example_named", {one.name: one}.__getitem__)

    return replace


@pytest.mark.runs_kernels
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", demo.FIRST)
@pytest.mark.sampled(alone=("name", "target"))
def test_first_examples_are_right_on_every_target(name: str, target: str):
    run_here = demo.can_run(find_target(target))
    outcome = measuring.perform(task(name, target, execute=run_here))
    assert (outcome.problem, outcome.needs) == ("", "")
    assert len(outcome.figures) == 4
    if run_here:
        assert 0 < outcome.error <= example(name).tolerance


def test_plan_has_every_target():
    tasks = demo.plan([example(name) for name in demo.FIRST], main_only=False)
    assert [(one.example, one.target) for one in tasks] == [
        (name, target) for name in demo.FIRST for target in TARGETS
    ]
    assert {one.name for one in plugins.registry().targets.values()} == set(TARGETS)


def test_plan_of_all_examples_runs_each_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "can_run", lambda target: True)
    monkeypatch.setenv("PALLASITE_TARGET", "sm_100a")
    tasks = demo.plan(catalog.all_examples(), main_only=True)
    assert len(tasks) == len(TARGETS) * len(catalog.all_examples())
    assert {one.target for one in tasks if one.execute} == {"sm_100a"}


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), ["sm_90", "sm_90a"]),
        ((10, 0), ["sm_90", "sm_100", "sm_100a"]),
        ((10, 3), ["sm_90", "sm_100", "sm_103a"]),
        ((11, 0), ["sm_90", "sm_100", "sm_110a"]),
        ((12, 0), ["sm_90", "sm_100", "sm_120a"]),
        (None, []),
    ],
)
def test_what_a_gpu_can_run(monkeypatch: pytest.MonkeyPatch, capability, expected):
    monkeypatch.setattr(demo, "on_gpu", lambda: True)
    monkeypatch.setattr(demo, "local_compute_capability", lambda: capability)
    assert [name for name in TARGETS if demo.can_run(find_target(name))] == expected


def test_chosen_examples():
    everything = catalog.all_examples()
    assert tuple(one.name for one in demo.chosen(everything, [], False)) == demo.FIRST
    assert demo.chosen(everything, [], True) == everything
    names = [one.name for one in demo.chosen(everything, ["layer_norm", "gelu"], False)]
    assert names == [n for n in (e.name for e in everything) if "layer_norm" in n or "gelu" in n]


def test_table(capsys: pytest.CaptureFixture[str]):
    tasks = [task("vector_add_f32", "sm_90"), task("warp_specialized_f32", "sm_90")]
    assert demo.print_table(tasks, demo.outcomes(tasks, processes=1)) == []
    first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    compiled = pallasite.compile(
        example("vector_add_f32").function,
        *jax.eval_shape(example("vector_add_f32").make_inputs, jax.random.key(0)),
        target="sm_90",
        assemble=tasks[0].assemble,
    )
    registers = compiled.resources.registers if tasks[0].assemble else "-"
    spills = "0" if tasks[0].assemble else "-"
    lines = len(compiled.ptx.splitlines())
    assert first[:6] == ["vector_add_f32", "sm_90", "0", str(registers), spills, str(lines)]
    assert first[7:] == ["-", "compiled"]
    assert second == ["warp_specialized_f32", "sm_90", *"------", "needs", "setmaxnreg"]


def test_cells_of_numbers():
    outcome = measuring.Outcome((1024, 32, 0, 99), 0.1234, 2.5, 1.2e-3)
    assert demo.cells(task("softmax"), outcome) == [
        *("softmax", "sm_90a", "1024", "32", "0", "99", "123", "2500", "correct, error 1.2e-03")
    ]


def test_failure_is_reported(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    replace_example: Callable[[catalog.Example], None],
):
    def broken(x, y):
        raise ValueError("broken on purpose")

    replace_example(dataclasses.replace(example("vector_add_f32"), function=broken))
    assert demo.main(["vector", "--processes=1"]) == 1
    out = capsys.readouterr().out
    assert "FAILED vector_add_f32 on sm_90a: ValueError: broken on purpose" in out
    assert f"{len(TARGETS)} failures" in out
    assert all(f"FAILED vector_add_f32 on {target}: ValueError" in out for target in TARGETS)
    assert demo.main(["no such example"]) == 1
    assert "no example has no such example in its name" in capsys.readouterr().out


def test_says_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo.jax, "default_backend", lambda: "cpu")
    with pallasite.config.scoped(disabled_plugins="simulator"):
        tasks = demo.plan([example("vector_add_f32")], main_only=False)
        demo.print_head()
    assert not any(one.execute for one in tasks)
    out = capsys.readouterr().out
    assert "pip install 'pallasite[simulator]'" in out
    assert "pip install 'pallasite[cuda]'" in out


@pytest.mark.runs_kernels
def test_what_kernels_print_follows_their_row(
    capfd: pytest.CaptureFixture[str], pallasite_executor: str
):
    tasks = [task("debug_print_f32", execute=True)]
    assert demo.print_table(tasks, demo.outcomes(tasks, processes=1)) == []
    lines = capfd.readouterr().out.splitlines()
    if pallasite_executor == "simulator":
        assert "correct, error" in lines[0]
        assert any(line.startswith("    block 1 begins with") for line in lines[1:])
    else:
        assert any("block 1 begins with" in line for line in lines)


@pytest.mark.runs_kernels
def test_wrong_result_is_reported(
    capsys: pytest.CaptureFixture[str], replace_example: Callable[[catalog.Example], None]
):
    replace_example(dataclasses.replace(example("vector_add_f32"), reference=lambda x, y: x - y))
    tasks = [task("vector_add_f32", execute=True)]
    (failure,) = demo.print_table(tasks, demo.outcomes(tasks, processes=1))
    assert failure.startswith("vector_add_f32 on sm_90a: AssertionError: relative error")
    assert capsys.readouterr().out.rstrip().endswith("FAILED")


@pytest.mark.runs_kernels
def test_errors_of_kernels_are_reported(
    pallasite_executor: str, replace_example: Callable[[catalog.Example], None]
):
    if pallasite_executor == "gpu":
        pytest.skip("a GPU does not look for races")

    def racing(x, y):
        def body(x_ref, y_ref, o_ref):
            thread = jax.lax.axis_index("t")
            o_ref[...] = x_ref[...] + thread.astype(x_ref.dtype)

        out_type = jax.ShapeDtypeStruct((128,), jnp.float32)
        return plgpu.kernel(body, out_type=out_type, num_threads=2, thread_name="t")(x[:128], y)

    replace_example(dataclasses.replace(example("vector_add_f32"), function=racing))
    outcome = measuring.perform(task("vector_add_f32", execute=True))
    assert "SanitizerError" in outcome.problem
    assert "data race in global memory" in outcome.problem


@pytest.mark.runs_kernels
def test_several_processes_make_the_same_table():
    """Rows come in the order of the catalog, whichever process is quicker."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [ROOT / "examples/demo.py", "gelu_bf16", "vector_add_f32", "--processes=2"]
    done = python_processes.run(command, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    _, table = done.stdout.split("\n\n", 1)
    head, *rows = table.split("\n\n")[0].splitlines()
    assert head.split() == list(demo.COLUMNS)
    names = [one.name for one in catalog.all_examples() if "gelu_bf16" in one.name]
    assert [tuple(one.split()[:2]) for one in rows] == [
        (name, target) for name in ["vector_add_f32", *names] for target in TARGETS
    ]
    assert all("correct" in one for one in rows if one.split()[1] == "sm_90a")
    assert ", 0 failures" in done.stdout


class EndsItsProcess(measuring.Task):
    """A task that no process survives which receives it."""

    def __reduce__(self):
        return os._exit, (3,)


def test_process_that_dies_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "on_gpu", lambda: False)
    tasks = [EndsItsProcess("vector_add_f32", "sm_90a", False, False)] * 2
    results = list(demo.outcomes(tasks, processes=2))
    assert len(results) == 2
    assert all("terminated abruptly" in one.problem for one in results)


def test_environment_of_processes_is_restored(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEMO_TEST_KEPT", "before")
    with demo.environment({"DEMO_TEST_KEPT": "within", "DEMO_TEST_NEW": "1"}):
        assert (os.environ["DEMO_TEST_KEPT"], os.environ["DEMO_TEST_NEW"]) == ("within", "1")
    assert os.environ["DEMO_TEST_KEPT"] == "before"
    assert "DEMO_TEST_NEW" not in os.environ


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max 100000", 8), ("250000 100000", 3), ("1000 100000", 1), ("1600000 100000", 8), (None, 8)],
)
def test_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, limit, expected):
    monkeypatch.setattr(demo.os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(demo, "CPU_LIMIT", tmp_path / "cpu.max")
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit + "\n")
    assert demo.cores() == expected
    assert demo.default_processes(1000) == expected
    assert demo.default_processes(2) == 1
