"""The hook implementations of the plugin; everything else is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pallasite.plugin import (
    Executor,
    InstructionRule,
    LaunchRequest,
    PtxLaunch,
    RunOptions,
    StoreNamespace,
    hookimpl,
)
from pallasite_simulator import options as options  # declares the plugin's options

if TYPE_CHECKING:
    from pallasite.plugin import RunReport

PALLASITE_PLUGIN_API = (2, 0)
"""What the plugin needs of Pallasite."""


@hookimpl
def pallasite_executors() -> list[Executor]:
    """The simulator, for JAX on the CPU."""
    return [
        Executor(
            name="simulator",
            platforms=("cpu",),
            run=_run,
            description="runs the PTX on the CPU, and checks what it does",
            inspect=_inspect,
            run_ptx=_run_ptx,
        )
    ]


def _run(compiled: Any, *operands: Any, request: LaunchRequest) -> Any:
    if any(one.provider for one in compiled.launch.hidden_operands):
        from pallasite_simulator.devices.execution import provided, run_in_program

        if provided(compiled):
            return run_in_program(compiled, *operands, request=request)
    from pallasite_simulator.executor import execute
    from pallasite_std.api import run_on_host

    return run_on_host(execute, compiled, *operands, request=request)


def _inspect(compiled: Any, inputs: Any, options: RunOptions) -> RunReport:
    from pallasite_simulator.report import inspect

    return inspect(compiled, inputs, options)


def _run_ptx(launch: PtxLaunch, options: RunOptions) -> RunReport:
    from pallasite_simulator.report import inspect_ptx

    return inspect_ptx(launch, options)


@hookimpl
def pallasite_stores() -> list[StoreNamespace]:
    """Machine code of loops that the simulator compiles for this processor."""
    from pallasite_simulator.loop_store import LOOPS

    return [LOOPS]


@hookimpl
def pallasite_instructions() -> list[InstructionRule]:
    """All instructions but those that come with plugins for hardware generations."""
    from pallasite_simulator.instructions import all_instructions

    return all_instructions().rules
