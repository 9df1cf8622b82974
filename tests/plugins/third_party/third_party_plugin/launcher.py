"""An executor for CUDA: it counts what is launched, and leaves the launch to JAX's own."""

from __future__ import annotations

import collections

from jax.experimental.xla_metadata import set_xla_metadata

from pallasite.plugin import ExecutionError, Executor, plugins

NAME = "third-party-launcher"
LOWERED: collections.Counter[str] = collections.Counter()
"""By kernel, how often it was lowered into a program."""


def _next():
    """The executor that would run kernels without this one."""
    for candidate in plugins.registry().executor_choice("cuda").candidates:
        if candidate.executor.name != NAME and candidate.unavailable is None:
            return candidate.executor
    raise ExecutionError("no other executor launches kernels on CUDA")


def run(compiled, *operands, request):
    """Launches a kernel; its call carries the name of this executor in the program."""
    LOWERED[compiled.name] += 1
    with set_xla_metadata(launched_by=NAME):
        return _next().run(compiled, *operands, request=request)


LAUNCHER = Executor(
    name=NAME,
    platforms=("cuda",),
    run=run,
    priority=50,
    description="marks and counts launches",
)
