"""What the runtime contributes: JAX's launcher as an executor, and the cache of kernels."""

from __future__ import annotations

from typing import Any

from pallasite.errors import ExecutionError
from pallasite.extensions import Executor, LaunchRequest
from pallasite.hookspecs import hookimpl
from pallasite.stores import KERNELS, StoreNamespace


@hookimpl
def pallasite_executors() -> list[Executor]:
    """JAX's own kernel launcher, for CUDA."""
    return [
        Executor(
            name="jax-launcher",
            platforms=("cuda",),
            run=_run,
            available=_available,
            description="launches on the GPU through JAX's own kernel launcher",
        )
    ]


@hookimpl
def pallasite_stores() -> list[StoreNamespace]:
    """Compiled kernels."""
    return [KERNELS]


def _run(compiled: Any, *operands: Any, request: LaunchRequest) -> Any:
    from pallasite.runtime.launch import launch

    return launch(compiled, *operands, side_effects=request.side_effects, **request.call)


def _available() -> bool | str:
    from pallasite.runtime.launch import launcher

    try:
        launcher()
    except ImportError as error:
        return f"the launcher's bindings cannot be imported: {error}"
    except ExecutionError as error:
        return f"{error.message}: {error.hint}"
    return True
