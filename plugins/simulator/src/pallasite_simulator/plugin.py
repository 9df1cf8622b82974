"""The hook implementations of the plugin; everything else is imported when it is asked for."""

from __future__ import annotations

from typing import Any

from pallasite.extensions import Executor, InstructionRule
from pallasite.hookspecs import hookimpl


@hookimpl
def pallasite_executors() -> list[Executor]:
    """The simulator, for JAX on the CPU."""
    return [
        Executor(
            name="simulator",
            platforms=("cpu",),
            run=_run,
            description="runs the PTX on the CPU, and checks what it does",
        )
    ]


def _run(compiled: Any, *operands: Any) -> Any:
    from pallasite.runtime.callback import run_on_host
    from pallasite_simulator.executor import execute

    return run_on_host(execute, compiled, *operands)


@hookimpl
def pallasite_instructions() -> list[InstructionRule]:
    """All instructions but those that come with plugins for hardware generations."""
    from pallasite_simulator.instructions import all_instructions

    return all_instructions().rules
