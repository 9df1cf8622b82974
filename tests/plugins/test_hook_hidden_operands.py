"""Hidden operands and results: arrays that a plugin's code exchanges with the host."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from offset_plugin import offset, registered
from tests import python_processes

import pallasite
from pallasite import gpu as plgpu
from pallasite.cli import main
from pallasite.cli.kernel_report import as_json, as_text
from pallasite.plugin import (
    ExecutionError,
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
)
from pallasite.runtime.serialization import dumps, loads
from pallasite_simulator import simulate

N = 128
OUT = jax.ShapeDtypeStruct((N,), jnp.float32)
X = jnp.arange(float(N))
HERE = pathlib.Path(__file__).parent


@pytest.fixture
def seen():
    """What functions of the host were called with."""
    with registered() as found:
        yield found


def kernel(source, name="shifted", **options):
    def body(x_ref, out_ref):
        out_ref[...] = offset(x_ref[...], source)

    return plgpu.kernel(body, out_type=OUT, kernel_name=name, **options)


def of(seen, what):
    return [one[1:] for one in seen if one[0] == what]


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("source", "number"), [("value", 2.5), ("same", 7), ("wide", 2**40), ("rank", 10)]
)
def test_operands_reach_the_kernel_and_results_the_host(seen, source, number):
    result = jax.jit(kernel(source))(X)
    jax.effects_barrier()
    np.testing.assert_array_equal(result, np.float32(X) + np.float32(number))
    assert of(seen, "collect") == [([float(np.float32(number))], "shifted", {"source": source})]


@pytest.mark.runs_kernels
def test_programs(seen):
    """The caller's arrays, donated and aliased ones too, are what they would be without."""
    first = kernel("value", "first", input_output_aliases={0: 0})
    second = kernel("rank", "second")
    program = jax.jit(lambda x: second(first(x) * 2), donate_argnums=0)
    for _ in range(2):
        result = program(X + 0)
    jax.effects_barrier()
    np.testing.assert_array_equal(result, (np.arange(128.0) + 2.5) * 2 + 10)
    assert sorted(name for _, name, _ in of(seen, "collect")) == ["first"] * 2 + ["second"] * 2
    assert {name for *_, name, _ in of(seen, "prepare")} <= {"first", "second"}
    jaxpr = jax.make_jaxpr(lambda x: second(first(x)))(X).jaxpr
    assert [v.aval.shape for v in (*jaxpr.invars, *jaxpr.outvars)] == [(128,), (128,)]
    batched = jax.vmap(kernel("same", "third"))(jnp.zeros((3, N)))
    np.testing.assert_array_equal(batched, np.full((3, N), 7))


@pytest.mark.runs_kernels
def test_a_kernel_whose_result_nobody_uses(seen):
    """The lifecycle says that kernels have effects on the host, so that they run."""
    jax.jit(lambda x: (kernel("value", "unused")(x), x)[1])(X)
    jax.effects_barrier()
    assert [name for _, name, _ in of(seen, "collect")] == ["unused"]


@pytest.mark.runs_kernels
def test_the_host_is_asked_once(seen):
    """Initialisers and steps before the first launch run once in a process, for each device."""
    fn = kernel("rank", "asked_once")
    for _ in range(2):
        jax.clear_caches()
        jax.block_until_ready(fn(X))
    ordinal = jax.local_devices()[0].local_hardware_id or 0
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    assert of(seen, "prepare") == [(platform, ordinal, "asked_once", {"grid": 1})]
    assert len(of(seen, "rank")) <= 1  # Another kernel with the same operand may have asked.


def compiled(source):
    return pallasite.compile(kernel(source), X, target="sm_90")


def test_records_and_reports(seen):
    shifted = compiled("rank")
    launch = shifted.launch
    assert [b.shape for b in launch.caller_inputs] == [X.shape]
    assert len(launch.inputs) == len(launch.outputs) == 2
    (operand,), (result,), (step,) = (
        launch.hidden_operands,
        launch.hidden_results,
        launch.before_first_launch,
    )
    assert (operand.name, operand.input, operand.initialiser) == (
        "offset.rank",
        1,
        "offset_plugin:rank",
    )
    assert (result.name, result.output, result.consumer) == (
        "offset.used",
        1,
        "offset_plugin:collect",
    )
    assert (step.function, json.loads(step.arguments)) == ("offset_plugin:prepare", {"grid": 1})
    assert loads(dumps(shifted)) == shifted and loads(dumps(compiled("value"))) is not None
    data = as_json(shifted)["launch"]
    assert data["hidden_operands"] == [
        {
            "name": "offset.rank",
            "input": 1,
            "initialiser": "offset_plugin:rank",
            "provider": None,
            "arguments": {"start": 10, "step": 100},
            "per_device": True,
        }
    ]
    assert data["hidden_results"][0]["consumer"] == "offset_plugin:collect"
    assert data["before_first_launch"][0]["function"] == "offset_plugin:prepare"
    lines = [" ".join(line.split()) for line in as_text(shifted, "no ptxas").splitlines()]
    for line in (
        "input 1 offset.rank float32[1] made by offset_plugin:rank for each device",
        "output 1 offset.used float32[1] goes to offset_plugin:collect",
        "before the first launch offset_plugin:prepare on each device",
    ):
        assert line in lines


def test_the_simulator_provides_operands(seen):
    """``simulate`` takes the caller's arrays, and gives the hidden results after the outputs."""
    run = simulate(compiled("rank"), np.asarray(X))
    assert not run.findings
    np.testing.assert_array_equal(run.outputs[0], np.arange(128.0) + 10)
    np.testing.assert_array_equal(run.outputs[1], [10])
    given = simulate(compiled("rank"), np.asarray(X), np.array([3], np.float32))
    np.testing.assert_array_equal(given.outputs[0], np.arange(128.0) + 3)
    assert not of(seen, "collect")


KERNEL_FILE = """
import jax, jax.numpy as jnp
from offset_plugin import offset
from pallasite import gpu as plgpu

def body(x_ref, out_ref):
    out_ref[...] = offset(x_ref[...], "same")

shifted = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
"""


def test_the_command_line(seen, tmp_path, capsys):
    """``pallasite run`` passes hidden operands, and ``pallasite inspect`` lists them."""
    file = tmp_path / "kernels.py"
    file.write_text(KERNEL_FILE)
    arguments = [f"{file}::shifted", "--target", "sm_90", "--arg"]
    run = ["run", *arguments, "f32[128]:iota", "--executor", "simulator", "--save", str(tmp_path)]
    assert main(run) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "output_0.npy"), np.arange(128.0) + 7)
    assert not (tmp_path / "output_1.npy").exists()
    jax.effects_barrier()
    assert of(seen, "collect") == [([7.0], "body", {"source": "same"})]
    capsys.readouterr()
    assert main(["inspect", *arguments, "f32[128]", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in report["launch"]["hidden_operands"]] == ["offset.same"]


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ("neither", InvalidValueError, "'offset.neither' needs either a value, an initialiser or"),
        ("both", InvalidValueError, "or a provider\n  got: a value and an initialiser"),
        ("shape", InvalidTypeError, r"got: float32\[2\]\n  expected: float32\[1\]"),
        ("local", InvalidValueError, "a function that other processes cannot find"),
        ("set", InvalidTypeError, "arguments that cannot be kept: .*set is not JSON serializable"),
        ("fixed", InvalidValueError, "has a value, which is not asked for each device"),
    ],
)
def test_wrong_requests(seen, source, error, text):
    with pytest.raises(error, match=text) as caught:
        compiled(source)
    assert caught.value.location.function == "offset"  # The line that binds the primitive.


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (
            "wrong",
            InvalidTypeError,
            "initialiser offset_plugin:wrong of hidden operand 'offset.wrong' of kernel 'shifted'"
            r" returned another type\n  got: int32\[3\]\n  expected: float32\[1\]",
        ),
        (
            "missing",
            ExecutionError,
            "hidden operand 'offset.missing' of kernel 'shifted' needs a function of the host that"
            r" is not there: .*\n  got: offset_plugin:nothing",
        ),
    ],
)
def test_wrong_initialisers(seen, source, error, text):
    with pytest.raises(error, match=text):
        kernel(source)(X)


def test_two_requests_of_one_name(seen):
    def body(x_ref, out_ref):
        out_ref[...] = offset(offset(x_ref[...], "value"), "same")

    with pytest.raises(InvalidValueError, match="'offset.used' is asked for twice in one kernel"):
        pallasite.compile(plgpu.kernel(body, out_type=OUT), X, target="sm_90")


def test_a_program_for_another_machine(seen):
    traced = jax.jit(kernel("rank")).trace(X)
    other = "cuda" if jax.default_backend() == "cpu" else "cpu"
    with pytest.raises(UnsupportedError, match="has to know its device, in a program for another"):
        traced.lower(lowering_platforms=(other,))


# In other processes -------------------------------------------------------------------------------

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
from jax.sharding import PartitionSpec as P
from offset_plugin import SEEN, offset
from pallasite import gpu as plgpu
from pallasite.runtime import cache_info

def body(x_ref, out_ref):
    out_ref[...] = offset(x_ref[...], "rank")

fn = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
x = jnp.arange(512.0)
numbers = np.repeat(10 + 100 * np.arange(4), 128)

mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
parts = P(("a", "b"))
mapped = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False))
np.testing.assert_array_equal(mapped(x), x + numbers)
crossed = P(("b", "a"))
mapped = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=crossed, out_specs=crossed, check_vma=False))
np.testing.assert_array_equal(mapped(x), x + numbers[np.arange(512) // 128 % 2 * 256
    + np.arange(512) // 256 * 128])
pmapped = jax.pmap(fn)(x.reshape(4, 128))
np.testing.assert_array_equal(pmapped.reshape(512), x + numbers)

jitted = jax.jit(fn)
for number, device in enumerate(jax.devices()):
    result = jitted(jax.device_put(x[:128], device))
    np.testing.assert_array_equal(result, x[:128] + 10 + 100 * number)

some = jax.sharding.Mesh(np.array(jax.devices())[[3, 1]], "c")
mapped = jax.jit(jax.shard_map(fn, mesh=some, in_specs=P("c"), out_specs=P("c"), check_vma=False))
np.testing.assert_array_equal(mapped(x[:256]), x[:256] + np.repeat([310, 110], 128))

partly = jax.jit(jax.shard_map(
    fn, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}, check_vma=False))
try:
    partly(x[:256])
except Exception as error:
    print(type(error).__name__, "over all axes of the mesh" in str(error))
jax.effects_barrier()
print(sorted(one[2] for one in SEEN if one[0] == "prepare"))
print(sorted(one[1] for one in SEEN if one[0] == "rank"))
print(sum(one[0] == "collect" for one in SEEN))
print(cache_info().compiles, cache_info().disk_hits)
"""


@pytest.fixture
def installed(tmp_path):
    """A folder that makes the plugin an installed one, for other processes."""
    information = tmp_path / "site" / "offset_plugin-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Name: offset-plugin\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[pallasite.plugins]\noffset = offset_plugin\n")
    return tmp_path / "site"


def test_devices_and_the_disk_cache(installed, tmp_path):
    """Each device has a value of its own; a second process finds the kernel on disk."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(installed), str(HERE), *filter(None, sys.path)]),
        "PALLASITE_CACHE_DIR": str(tmp_path / "kernels"),
    }

    def run():
        done = python_processes.run(["-c", SCRIPT], env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-5:]

    devices = "[0, 1, 2, 3]"
    assert run() == [
        "UnsupportedError True",
        devices,
        devices,
        "18",
        "5 0",
    ]  # The device mesh counts.
    assert run() == ["UnsupportedError True", devices, devices, "18", "0 5"]
