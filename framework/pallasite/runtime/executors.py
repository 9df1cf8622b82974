"""Which executor runs a kernel, and what has to be right before it does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from pallasite import _jax, config, plugins
from pallasite.codegen.compiled import CompiledKernel
from pallasite.errors import ExecutionError, UnsupportedError
from pallasite.executor_choice import ExecutorChoice
from pallasite.extensions import Executor, LaunchRequest
from pallasite.known_plugins import remedy
from pallasite.language.kernel_call import has_host_effects
from pallasite.language.spec import KernelSpec
from pallasite.plugin_values import wrong_value
from pallasite.runtime.override import current
from pallasite.targets import Target


def find_executor(
    platform: str, name: str, request: LaunchRequest | None = None
) -> Callable[..., Any]:
    """What runs a kernel on a platform: a function of a compiled kernel and JAX arrays.

    Args:
      platform: a JAX platform, such as ``"cuda"``.
      name: the kernel's, for the message.
      request: how the program calls it; by default, as something with side effects.

    Raises:
      ExecutionError: there is no executor, or the one that the option ``executor`` names cannot run
        here.
    """
    choice = plugins.registry().executor_choice(platform)
    if choice.chosen is None:
        raise no_executor(choice, name)
    asked = request or LaunchRequest(platform=platform)
    return functools.partial(_run, choice.chosen, asked)


def _run(executor: Executor, request: LaunchRequest, compiled: CompiledKernel, *inputs: Any) -> Any:
    """What an executor returns, which must be the kernel's outputs."""
    outputs = tuple(executor.run(compiled, *inputs, request=request))
    found = [(getattr(one, "shape", None), getattr(one, "dtype", None)) for one in outputs]
    wanted = [(one.shape, one.dtype) for one in compiled.launch.outputs]
    if found != wanted:
        plugin = plugins.manager().label(executor.plugin)
        what = f"pallasite_executors of plugin {plugin}: run of executor {executor.name!r}"
        types = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in wanted)
        raise wrong_value(what, outputs, f"the kernel's outputs: {types}")
    return list(outputs)


def interpreter(params: Any, name: str, request: LaunchRequest | None = None) -> Callable[..., Any]:
    """What interprets kernels: an executor for the CPU, whatever platform the program is for.

    The option ``executor`` counts if it names an executor for the CPU.

    Args:
      params: how; what ``Interpretation.params`` returns.
      name: the kernel's, for messages.
      request: how the program calls it.

    Raises:
      ExecutionError: there is none.
    """
    run = current().run or _find_interpreter(name, request)
    if not params.detect_races:
        return run

    def checked(*arguments: Any) -> Any:
        with config.scoped(sanitize=True):
            return run(*arguments)

    return checked


def _find_interpreter(name: str, request: LaunchRequest | None) -> Callable[..., Any]:
    forced = plugins.registry().executors.get(config.get("executor") or "")
    if forced is None or "cpu" in forced.platforms:
        return find_executor("cpu", name, request)
    with config.scoped(executor=None):
        return find_executor("cpu", name, request)


def no_executor(choice: ExecutorChoice, name: str) -> ExecutionError:
    """The error for a kernel that is called where nothing can run it."""
    platform = choice.platform
    on_cpu = platform == "cpu"
    where = "the CPU" if on_cpu else f"platform {platform!r}"
    if choice.forced is not None:
        return ExecutionError(
            f"kernel {name!r} cannot run on {where}",
            got=choice.reason,
            expected="an executor that serves it"
            + "".join(f"; {one.executor.name} does" for one in choice.candidates),
            hint="leave the option 'executor' out; 'pallasite doctor' lists the executors",
        )
    reasons = [
        f"{one.executor.name} (plugin {one.executor.plugin!r}): {one.unavailable}"
        for one in choice.candidates
    ]
    got = "; ".join(reasons) or None
    if not on_cpu:
        known = sorted({p for e in plugins.registry().executors.values() for p in e.platforms})
        return ExecutionError(
            f"kernel {name!r} cannot run on platform {platform!r}: {choice.reason}",
            got=got,
            expected="a platform with an executor: " + (", ".join(known) or "there is none"),
            hint="move the arrays, or compile without running: pallasite.compile(fn, *args)",
        )
    simulator = remedy("executors", "simulator", plugins.manager().absences())
    missing = (
        "no executor for it is available" if got else "no installed plugin has an executor for it"
    )
    return ExecutionError(
        f"kernel {name!r} cannot run on the CPU: {missing}",
        got=got,
        expected="a GPU, or an executor such as the simulator",
        hint=f"{simulator}; or compile without running: pallasite.compile(fn, *args)",
    )


def single_platform(platforms: Sequence[str], name: str) -> str:
    """The platform that a program is lowered for, which calls the kernel of this name.

    Raises:
      UnsupportedError: several at once.
    """
    if len(platforms) != 1:
        raise UnsupportedError(
            f"kernel {name!r} is lowered for several platforms at once",
            got=", ".join(platforms),
            hint="lower for one platform at a time",
        )
    return platforms[0]


def has_side_effects(spec: KernelSpec) -> bool:
    """Whether a kernel does more than filling its outputs: it prints, communicates, or has effects
    on the host by a lifecycle of a plugin."""
    visible = (_jax.debug_effect, _jax.ordered_debug_effect, _jax.comms_effect)
    return any(effect in spec.jaxpr.effects for effect in visible) or has_host_effects(spec.params)


def check_device(target: Target, capability: tuple[int, int] | None, name: str) -> None:
    """Checks that the local GPU can run code for a target.

    Args:
      target: what the kernel is compiled for. Code for an architecture that ends in a letter runs
        on exactly that compute capability, other PTX on all later ones too.
      capability: of the local GPU, None if there is none (then nothing is checked).
      name: the kernel's.

    Raises:
      ExecutionError: it cannot.
    """
    if capability is None:
        return
    exact = not (target.architecture or target.name)[-1:].isdigit()
    if capability == target.compute_capability:
        return
    if exact or capability < target.compute_capability:
        raise ExecutionError(
            f"kernel {name!r} is compiled for {target.name}, which the local GPU cannot run",
            got=f"a GPU of compute capability {capability[0]}.{capability[1]}",
            expected="compute capability {}.{}".format(*target.compute_capability)
            + ("" if exact else " or later"),
            hint="leave out the target to compile for the local GPU; to compile for another one"
            " without running, use pallasite.compile(fn, *args, target=...)",
        )
