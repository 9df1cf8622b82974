"""Several processes that share a grid: the same results, numbers, texts and errors as one."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from sample_kernels import pipelined, softmax
from simulator_support import body_ptx

import pallasite
from pallasite import config, plugins
from pallasite import gpu as plgpu
from pallasite_simulator import SimulationError, launch, run_ptx, simulate
from pallasite_simulator.instruction_set import InstructionSet
from pallasite_simulator.parallel import messages, sharing, team
from pallasite_simulator.programs import load


@pytest.fixture(autouse=True)
def _all_take_part(monkeypatch):
    """Grids of a few blocks are long enough to be shared, and nobody begins before the others."""
    take_part = team._Round._take_part

    def when_all_are_there(self, job):
        while self._busy < len(self._team) and not self._is_over():
            time.sleep(0.001)
        take_part(self, job)

    monkeypatch.setattr(launch, "LANES_AT_ONCE", 256)
    monkeypatch.setattr(team._Round, "_take_part", when_all_are_there)


def same(one, other):
    assert len(one.outputs) == len(other.outputs)
    for a, b in zip(one.outputs, other.outputs, strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.statistics == other.statistics
    assert one.printed == other.printed
    assert (one.note, other.note) == ("", "")


SCALE = """
.reg .b32 %x, %n, %place; .reg .b64 %at; .reg .pred %more;
add.u64 %at, %array0, %offset4;
ld.global.b32 %x, [%at];
and.b32 %n, %prologue0, 7;
again:
add.s32 %x, %x, 1;
sub.s32 %n, %n, 1;
setp.ge.s32 %more, %n, 0;
@%more bra again;
mul.lo.u32 %place, %prologue2, 8;
add.u32 %place, %place, dynamic;
st.shared.b32 [%place], %x;
bar.sync 0;
ld.shared.b32 %x, [%place];
add.u64 %at, %array1, %offset4;
st.global.b32 [%at], %x;
"""


def run_scale(processes, count=600, **options):
    x, y = np.arange(count * 64, dtype=np.int32), np.zeros(count * 64, np.int32)
    options = dict(grid=count, block=64, shared_memory_bytes=512) | options
    return run_ptx(body_ptx(SCALE, 2, shared=1), [x, y], processes=processes, **options)


@pytest.mark.parametrize("processes", [2, 3])
def test_ptx(processes):
    one = run_scale(1)
    blocks = np.repeat(np.arange(600), 64)
    np.testing.assert_array_equal(one.outputs[1], one.outputs[0] + blocks % 8 + 1)
    same(one, run_scale(processes))
    assert one.statistics.bank_conflicts > 0


def test_chosen_blocks_and_clusters():
    for options in (dict(blocks=range(100, 477, 3)), dict(cluster=4), dict(cluster=(2, 1, 1))):
        same(run_scale(1, **options), run_scale(2, **options))


def test_more_processes_than_blocks():
    same(run_scale(1, count=2), run_scale(5, count=2))
    same(run_scale(1, count=1), run_scale(5, count=1))


def test_compiled_kernels():
    x = jax.random.normal(jax.random.key(0), (256, 256))
    compiled = pallasite.compile(pipelined(), x)
    same(simulate(compiled, x), simulate(compiled, x, processes=2))
    y = x[:64, :128]
    compiled = pallasite.compile(softmax(), y)
    same(simulate(compiled, y), simulate(compiled, y, processes=2))

    def body(o):
        i = jax.lax.axis_index("i")
        pl.debug_print("block {}", i)
        o[i] = jnp.full((128,), i, jnp.int32)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((30, 128), jnp.int32),
        grid=(30,),
        grid_names=("i",),
    )
    compiled = pallasite.compile(kernel)
    two = simulate(compiled, processes=2)
    same(simulate(compiled), two)
    assert two.printed == "".join(f"block {i}\n" for i in range(30))


def test_as_an_option_of_programs(monkeypatch, capfd):
    used = []
    run_shared = team.run_shared
    monkeypatch.setattr(
        team, "run_shared", lambda *arguments: (used.append(1), run_shared(*arguments))[1]
    )
    x = jax.random.normal(jax.random.key(0), (64, 128))
    expected = jax.jit(softmax())(x)
    assert used == []
    monkeypatch.setenv("PALLASITE_SIMULATOR_PROCESSES", "2")
    np.testing.assert_array_equal(jax.jit(softmax())(x), expected)
    assert used == [1]


# Errors -------------------------------------------------------------------------------------------

FAIL = """
.reg .pred %bad; .reg .b64 %at; .reg .b32 %block;
mov.u32 %block, %ctaid.x;
setp.ge.u32 %bad, %block, {first};
@%bad mov.u64 %array0, 0;
st.global.b32 [%array0], %block;
"""


def failure(first, processes):
    x = np.zeros(1, np.int32)
    with pytest.raises(SimulationError) as caught:
        run_ptx(body_ptx(FAIL.format(first=first), 1), [x], grid=64, block=64, processes=processes)
    return caught.value


@pytest.mark.parametrize("first", [0, 17, 63])
def test_the_first_error_is_raised(first):
    one, two = failure(first, 1), failure(first, 2)
    assert type(one) is type(two) is SimulationError
    assert f"thread 0 of block ({first}, 0, 0) accesses memory out of bounds" in str(two)
    assert (one.message, one.hint, one.location) == (two.message, two.hint, two.location)
    same(run_scale(1), run_scale(2))


def test_errors_travel_whole():
    location = pallasite.errors.SourceLocation("k.py", 3, 4, "body")
    error = SimulationError("message", got=np.arange(3), expected="x", hint="y", location=location)
    error.printed = "text"
    found = pickle.loads(pickle.dumps(messages.Failed(error, "details")))
    assert type(found.error) is SimulationError and found.details == "details"
    assert str(found.error) == str(error)
    assert found.error.printed == "text" and found.error.location == location


def test_a_process_that_dies(monkeypatch):
    same(run_scale(1), run_scale(2))
    os.kill(team._members[0]._process.pid, signal.SIGKILL)
    team._members[0]._process.wait()
    same(run_scale(1), run_scale(2))
    ask = team._Worker.ask

    def ask_and_kill(self, message):
        if isinstance(message, messages.Chunk):
            os.kill(self._process.pid, signal.SIGKILL)
        return ask(self, message)

    monkeypatch.setattr(team._Worker, "ask", ask_and_kill)
    with pytest.raises(SimulationError, match="a process that runs blocks of the grid has ended"):
        run_scale(2)
    monkeypatch.setattr(team._Worker, "ask", ask)
    same(run_scale(1), run_scale(2))


def test_nobody_waits_for_a_process_that_begins_too_late(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(launch, "LANES_AT_ONCE", 256)
    begun = threading.Event()
    ask = team._Worker.ask

    def late(self, message):
        begun.wait()
        return ask(self, message)

    monkeypatch.setattr(team._Worker, "ask", late)
    team._dismiss()
    try:
        same(run_scale(1), run_scale(3))
        same(run_scale(1), run_scale(3))
    finally:
        begun.set()
    monkeypatch.undo()
    same(run_scale(1), run_scale(3))


def test_the_time_of_a_launch_is_over_everywhere():
    for processes in (1, 2):
        with config.scoped(simulator_timeout=0.3), pytest.raises(SimulationError) as caught:
            run_ptx(LOOP, [np.zeros(1, np.int32)], grid=64, block=64, processes=processes)
        assert "simulator_timeout" in str(caught.value)


def test_an_interrupt_ends_the_processes(monkeypatch):
    run_scale(2)
    members = list(team._members)

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(team._Round, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_scale(2)
    assert team._members == []
    assert all(member._process.returncode is not None for member in members)
    monkeypatch.undo()
    same(run_scale(1), run_scale(2))


# What stands against it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("red.global.add.u32 [%array0], 1;", "atomic operations"),
        ("atom.add.u32 %x, [%array0], 1;", "atomic operations"),
        ("ld.acquire.gpu.global.b32 %x, [%array0];", "strong loads and stores"),
        ("st.volatile.global.b32 [%array0], %x;", "strong loads and stores"),
        (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%array0], [%x], 16;",
            "reductions by bulk copies",
        ),
        ("red.shared.add.u32 [%x], 1;", None),
        ("ld.volatile.shared.b32 %x, [%x];", None),
        ("ld.weak.global.b32 %x, [%array0];", None),
        (
            "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32"
            " [%x], [%x], 16, [%x];",
            None,
        ),
    ],
)
def test_blocks_that_communicate(code, reason):
    program = load(body_ptx(".reg .b32 %x;\n" + code, 1))
    found = sharing.obstacle(program)
    assert (found is None) if reason is None else reason in found


def test_they_run_in_one_process():
    count = np.zeros(1, np.int32)
    simulation = run_ptx(
        body_ptx("red.global.add.u32 [%array0], 1;", 1),
        [count],
        grid=100,
        block=64,
        processes=4,
    )
    assert count[0] == 6400
    assert "one process: its blocks may communicate through atomic operations" in simulation.note


# The sanitizer ------------------------------------------------------------------------------------

RACE = """
.reg .pred %some, %odd; .reg .b32 %x, %place;
and.b32 %x, %prologue0, 3;
setp.eq.u32 %some, %x, 3;
mov.u32 %place, dynamic;
@%some st.shared.b32 [%place], %prologue2;
setp.ge.u32 %odd, %prologue0, {first};
@%odd ld.shared.b32 %x, [%place+64];
add.u64 %array0, %array0, %offset4;
st.global.b32 [%array0], %x;
"""


def run_race(processes, code=RACE, first=1000, count=40, **options):
    x = np.zeros(64 * count, np.int32)
    options = dict(sanitize=True, statistics=False) | options
    return run_ptx(
        body_ptx(code.format(first=first), 1, shared=1),
        [x],
        grid=count,
        block=64,
        shared_memory_bytes=128,
        processes=processes,
        **options,
    )


@pytest.mark.parametrize("first", [1000, 30, 2])
def test_findings(first):
    one, two = run_race(1, first=first), run_race(3, first=first)
    assert list(map(str, one.findings)) == list(map(str, two.findings))
    assert len(one.findings) == (1 if first == 1000 else 2)
    assert "block (3, 0, 0)" in str(one.findings) and two.note == ""
    assert run_race(2, first=first, sanitize="barriers").findings == ()


def test_findings_and_statistics():
    one, two = run_race(1, first=9, statistics=True), run_race(2, first=9, statistics=True)
    assert one.statistics == two.statistics
    assert list(map(str, one.findings)) == list(map(str, two.findings))


def test_findings_before_an_error():
    code = RACE + ".reg .pred %bad; setp.eq.u32 %bad, %prologue0, 21; @%bad trap;"
    errors = []
    for processes in (1, 2):
        with pytest.raises(SimulationError, match="before that, the sanitizer found") as caught:
            run_race(processes, code)
        errors.append(caught.value)
    assert "block (21, 0, 0) executes a trap" in str(errors[1])
    assert str(errors[0]).partition("(")[0] == str(errors[1]).partition("(")[0]


@pytest.mark.parametrize(
    "code",
    [
        "st.global.b32 [%array0], %prologue0;",
        "ld.global.b32 %x, [%array0+{next}]; add.u64 %array0, %array0, %offset4;"
        "st.global.b32 [%array0], %x;",
    ],
)
def test_races_between_blocks_of_different_processes(code):
    """They are found although no process sees both blocks: the launch runs again in one."""
    code = ".reg .b32 %x;" + code.format(next=4 * 64 * 39)
    one, two = run_race(1, code), run_race(2, code)
    assert one.findings and "between blocks" in str(one.findings[0])
    assert list(map(str, one.findings)) == list(map(str, two.findings))
    same_arrays(one, two)


def same_arrays(one, other):
    for a, b in zip(one.outputs, other.outputs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_kernels_of_programs_with_the_sanitizer(monkeypatch):
    x = jax.random.normal(jax.random.key(0), (64, 128))
    monkeypatch.setenv("PALLASITE_SIMULATOR_PROCESSES", "2")
    monkeypatch.setenv("PALLASITE_SANITIZE", "on")
    expected = jax.nn.silu(jax.nn.softmax(x, axis=1))
    np.testing.assert_allclose(jax.jit(softmax())(x), expected, rtol=1e-5)


# Plugins and programs -----------------------------------------------------------------------------

instructions = InstructionSet()


@instructions.register("frobnicate")
def bind_nothing(instruction, binder):
    return lambda lanes: None


def test_plugins_of_this_process(monkeypatch, tmp_path):
    class Plugin:
        @pallasite.hookimpl
        def pallasite_instructions(self):
            return instructions.rules

    plugins.register(Plugin(), "mine")
    try:
        assert "no module" in run_frobnicating(2).note
    finally:
        plugins.unregister("mine")
    code = (
        "import pallasite\nfrom tests.simulator.test_processes import instructions\n"
        "@pallasite.hookimpl\ndef pallasite_instructions():\n    return instructions.rules\n"
    )
    (tmp_path / "made_here.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.register(importlib.import_module("made_here"), "mine")
    try:
        simulation = run_frobnicating(2)
        assert simulation.note == ""
        same(run_frobnicating(1), simulation)
    finally:
        plugins.unregister("mine")


def run_frobnicating(processes):
    return run_ptx(body_ptx("frobnicate;", 0), grid=100, block=32, processes=processes)


def test_disabled_plugins_are_disabled_there_too():
    with config.scoped(disabled_plugins="hopper"):
        same(run_scale(1), run_scale(2))


SCRIPT = """
import numpy as np
import pallasite_simulator
print("the script runs")
x = np.zeros(64 * 1000, np.int32)
ptx = open(r"{file}").read()
simulation = pallasite_simulator.run_ptx(ptx, [x], grid=1000, block=64, processes=2)
print(x.sum(), repr(simulation.note))
"""


def test_scripts_are_not_imported_again(tmp_path):
    file = tmp_path / "kernel.ptx"
    code = ".reg .b64 %at; add.u64 %at, %array0, %offset4; st.global.b32 [%at], 1;"
    file.write_text(body_ptx(code, 1))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(file=file))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, timeout=120
    )
    assert (done.stdout, done.stderr) == ("the script runs\n64000 ''\n", "")


ENDLESS = """
import os, sys, threading, time
import numpy as np
from pallasite_simulator import launch, run_ptx
from pallasite_simulator.parallel import team

def tell():
    while len(team._members) < 1:
        time.sleep(0.05)
    time.sleep(0.3)
    print(*(one._process.pid for one in team._members), flush=True)

launch.LANES_AT_ONCE = 256
threading.Thread(target=tell, daemon=True).start()
run_ptx(sys.stdin.read(), [np.zeros(1 << 20, np.uint32)], grid=64, block=32, processes=2)
"""

LOOP = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry endless(.param .u64 p) {
again:
bra again;
}
"""


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system has no /proc")
def test_nothing_is_left_of_a_process_that_is_killed():
    """Neither memory with a name, nor the processes that ran blocks for it."""
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )
    process.stdin.write(LOOP)
    process.stdin.close()
    workers = [int(word) for word in process.stdout.readline().split()]
    assert len(workers) == 1 and all(map(_is_running, workers))
    process.kill()
    process.wait()
    end = time.monotonic() + 30
    while any(map(_is_running, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(_is_running, workers))
    assert {name for name in set(os.listdir("/dev/shm")) - before if "pallasite" in name} == set()


def test_a_forked_process_has_workers_of_its_own():
    """It does not talk to those of the process that it is forked from, nor end them."""
    expected = run_scale(2).outputs[0]
    pids = [one._process.pid for one in team._members]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            result = run_scale(2).outputs[0]
            own = [one._process.pid for one in team._members]
            team._dismiss()
            status = 0 if (result == expected).all() and not set(own) & set(pids) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(run_scale(2).outputs[0], expected)
    assert [one._process.pid for one in team._members] == pids
