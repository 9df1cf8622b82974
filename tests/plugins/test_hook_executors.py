"""The hook ``pallasite_executors``: ways to run kernels, for any platform, by priority."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite.plugin import (
    ExecutionError,
    Executor,
    InvalidValueError,
    LaunchRequest,
    config,
    hookimpl,
    manager,
)

OUT = jax.ShapeDtypeStruct((128,), jnp.float32)
X = jnp.arange(128, dtype=jnp.float32)


class Launcher:
    """A third party's launcher: a custom call of its own, which holds the PTX."""

    def __init__(self, name, *platforms, **options):
        self.requests = []
        self.executor = Executor(name=name, platforms=platforms, run=self.run, **options)

    def run(self, compiled, *operands, request):
        self.requests.append(request)
        return jax.ffi.ffi_call(
            f"{self.executor.name}_launch",
            [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in compiled.launch.outputs],
            has_side_effect=request.side_effects,
        )(*operands, kernel=compiled.name, code=compiled.ptx)

    @hookimpl
    def pallasite_executors(self):
        return [self.executor]


@contextlib.contextmanager
def registered(*plugins):
    """Registers plugins, named after their executors."""
    with contextlib.ExitStack() as stack:
        for one in plugins:
            stack.callback(manager().unregister, manager().register(one, one.executor.name))
        yield


def scale(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def scale_and_print(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2
    pl.debug_print("scaled")


def lowered(body=scale, platform="cuda", **options):
    """The program of one kernel, lowered for a platform that need not be here."""
    kernel = jax.jit(plgpu.kernel(body, out_type=OUT, **options))
    with config.scoped(target="sm_90"):
        return kernel.trace(X).lower(lowering_platforms=(platform,)).as_text()


def test_jax_launcher_runs_kernels_on_cuda_by_default():
    assert "@triton_kernel_call_ffi" in lowered()
    chosen = manager().registry().executor_choice("cuda")
    assert (chosen.chosen.name, chosen.chosen.plugin, chosen.chosen.priority) == (
        "jax-launcher",
        "pallasite",
        0,
    )
    assert chosen.reason == "the only executor for this platform"


@pytest.mark.parametrize(("priority", "target"), [(1, "mine_launch"), (-1, "triton_kernel_call")])
def test_the_highest_priority_wins_on_cuda(priority, target):
    mine = Launcher("mine", "cuda", priority=priority)
    with registered(mine):
        text = lowered()
        choice = manager().registry().executor_choice("cuda")
    assert f"@{target}" in text
    assert [one.executor.name for one in choice.candidates] == (
        ["mine", "jax-launcher"] if priority > 0 else ["jax-launcher", "mine"]
    )
    assert choice.reason == f"the highest priority, {max(priority, 0)}, of those that are available"


def test_the_launcher_gets_the_code_and_the_request():
    mine = Launcher("mine", "cuda", priority=1)
    params = plgpu.CompilerParams(approx_math=True)
    with registered(mine):
        plain = lowered(compiler_params=params)
        printing = lowered(scale_and_print)
    assert ".visible .entry scale" in plain and 'kernel = "scale"' in plain
    first, second = mine.requests
    assert first == LaunchRequest(platform="cuda", side_effects=False, params=params)
    assert second.side_effects
    assert "has_side_effect = true" not in plain
    assert "has_side_effect = true" in printing


@pytest.mark.parametrize("platform", ["rocm", "tpu", "sycl"])
@pytest.mark.parametrize(
    "call",
    [
        plgpu.kernel(scale, out_type=OUT),
        pl.pallas_call(scale, out_shape=OUT, compiler_params=plgpu.CompilerParams()),
        pl.kernel(scale, OUT, mesh=plgpu.Mesh()),
    ],
    ids=["kernel", "pallas_call", "mesh"],
)
def test_kernels_of_every_kind_on_any_platform(call, platform):
    mine = Launcher("mine", platform)
    with registered(mine), config.scoped(target="sm_90"):
        text = jax.jit(call).trace(X).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("@mine_launch") == 1
    assert [one.platform for one in mine.requests] == [platform]


def test_calls_of_other_backends_are_left_alone():
    """Pallas lowers them, or says itself that it cannot."""
    call = jax.jit(pl.pallas_call(scale, out_shape=OUT)).trace(X)
    with registered(Launcher("mine", "sycl")), pytest.raises(NotImplementedError):
        call.lower(lowering_platforms=("sycl",))


def test_a_platform_that_the_core_does_not_know():
    with pytest.raises(ExecutionError) as error:
        lowered(platform="rocm")
    assert error.value.message == (
        "kernel 'scale' cannot run on platform 'rocm': no plugin has an executor for this platform"
    )
    assert "expected: a platform with an executor: cpu, cuda" in str(error.value)
    mine = Launcher("mine", "rocm")
    with registered(mine):
        assert "@mine_launch" in lowered(platform="rocm")
    assert mine.requests[0].platform == "rocm"


def test_an_executor_that_is_not_available_says_why():
    driver = Launcher("driver", "cuda", priority=9, available=lambda: "needs driver 999")
    silent = Launcher("silent", "cuda", priority=8, available=lambda: False)
    broken = Launcher("broken", "cuda", priority=7, available=lambda: 1 // 0)
    with registered(driver, silent, broken):
        assert "@triton_kernel_call_ffi" in lowered()
        choice = manager().registry().executor_choice("cuda")
    assert {one.executor.name: one.unavailable for one in choice.candidates} == {
        "driver": "needs driver 999",
        "silent": "it does not say why",
        "broken": "its check failed: ZeroDivisionError: integer division or modulo by zero",
        "jax-launcher": None,
    }
    assert choice.reason == "the only one that is available"


def test_nothing_is_available():
    lazy = Launcher("lazy", "rocm", available=lambda: "asleep")
    with registered(lazy), pytest.raises(ExecutionError) as error:
        lowered(platform="rocm")
    first, second = str(error.value).splitlines()[:2]
    line = f"{__file__}:{scale.__code__.co_firstlineno} (scale): "
    assert first == line + "kernel 'scale' cannot run on platform 'rocm': none is available"
    assert second == "  got: lazy (plugin 'lazy'): asleep"


def test_plugins_of_one_priority_are_a_conflict():
    first, second = Launcher("first", "rocm"), Launcher("second", "rocm")
    with registered(first, second):
        with pytest.raises(ExecutionError) as error:
            lowered(platform="rocm")
        with config.scoped(executor="second"):
            assert "@second_launch" in lowered(platform="rocm")
    assert error.value.message == (
        "kernel 'scale' cannot run on platform 'rocm': first (plugin 'first') and second"
        " (plugin 'second') have the same priority, 0; the option executor chooses"
    )


def test_the_option_names_the_executor(monkeypatch):
    mine = Launcher("mine", "cuda", priority=-5)
    with registered(mine):
        with config.scoped(executor="mine"):
            assert "@mine_launch" in lowered()
        monkeypatch.setenv("PALLASITE_EXECUTOR", "mine")
        assert "@mine_launch" in lowered()
        choice = manager().registry().executor_choice("cuda")
    assert choice.reason == "PALLASITE_EXECUTOR names it"


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("sleepy", "PALLASITE_EXECUTOR names sleepy, which cannot run: asleep"),
        ("simulator", "PALLASITE_EXECUTOR names simulator, which runs kernels on cpu only"),
        (
            "nobody",
            "PALLASITE_EXECUTOR names nobody, and there is no executor of that name"
            " (there are: jax-launcher, simulator, sleepy)",
        ),
    ],
)
def test_a_named_executor_that_cannot_run_is_an_error(monkeypatch, name, got):
    monkeypatch.setenv("PALLASITE_EXECUTOR", name)
    sleepy = Launcher("sleepy", "cuda", available=lambda: "asleep")
    with registered(sleepy), pytest.raises(ExecutionError) as error:
        lowered()
    lines = str(error.value).splitlines()
    assert lines[0].endswith(": kernel 'scale' cannot run on platform 'cuda'")
    assert lines[1] == f"  got: {got}"
    assert lines[2].startswith("  expected: an executor that serves it; jax-launcher does")


def test_interpreted_kernels_ignore_a_launcher_that_is_named():
    mine, host = Launcher("mine", "cuda", priority=1), Launcher("host", "cpu", priority=50)
    with registered(mine, host), config.scoped(executor="mine"):
        text = lowered(interpret=True)
    assert "@host_launch" in text and "mine_launch" not in text
    assert host.requests[0].platform == "cuda"


def test_eager_calls_follow_the_option():
    """What was lowered under one executor is not called under another one."""

    class Constant:
        def __init__(self, value):
            self.executor = Executor(
                name=f"constant{value}",
                platforms=("cpu",),
                run=lambda compiled, *operands, request: [jnp.full((128,), value, jnp.float32)],
                priority=-1,
            )

        @hookimpl
        def pallasite_executors(self):
            return [self.executor]

    kernel = plgpu.kernel(scale, out_type=OUT)
    x = jax.device_put(X, jax.devices("cpu")[0])
    with registered(Constant(3), Constant(4)), config.scoped(target="sm_90"):
        for value in (3, 4, 3):
            with config.scoped(executor=f"constant{value}"):
                np.testing.assert_array_equal(kernel(x), np.full(128, value, np.float32))


def test_wrong_executors_are_refused():
    with pytest.raises(InvalidValueError) as error:
        Executor(name="old", platforms=("cuda",), run=lambda compiled, *operands: [])
    assert str(error.value).splitlines() == [
        "executor 'old': its function run does not accept the keyword 'request'",
        "  got: run(compiled, *operands)",
        "  expected: run(compiled, *operands, request)",
    ]
    with pytest.raises(InvalidValueError, match="platforms is a tuple of names"):
        Executor(name="one", platforms="cuda", run=print)


@pytest.mark.gpu
def test_a_launcher_of_a_third_party_runs_on_the_gpu():
    """It wraps JAX's launcher, and is asked because of its priority."""

    class Counting:
        def __init__(self):
            self.calls = []
            self.executor = Executor(
                name="counting", platforms=("cuda",), run=self.run, priority=100
            )

        def run(self, compiled, *operands, request):
            self.calls.append(compiled.name)
            (jax_launcher,) = [
                one.executor
                for one in manager().registry().executor_choice("cuda").candidates
                if one.executor.name == "jax-launcher"
            ]
            (result,) = jax_launcher.run(compiled, *operands, request=request)
            return [result + 1]

        @hookimpl
        def pallasite_executors(self):
            return [self.executor]

    counting = Counting()
    with registered(counting):
        result = jax.jit(plgpu.kernel(scale, out_type=OUT))(X)
        np.testing.assert_array_equal(result, 2 * np.asarray(X) + 1)
    assert counting.calls == ["scale"]
