"""Executors that are Python functions on NumPy arrays, as operations that JAX can compile.

``jax.pure_callback`` would hand JAX arrays to the function, and reading those can wait for ever
when all of XLA's threads are busy; the primitive here hands over NumPy arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallasite.codegen.compiled import CompiledKernel
from pallasite.errors import ExecutionError

HostFunction = Callable[[CompiledKernel, Sequence[np.ndarray]], Sequence[np.ndarray]]
"""``execute(compiled, inputs)`` returns the outputs. The inputs must not be written to, and must
not be kept: an output that shares memory with an input starts as a copy of it."""


def run_on_host(
    execute: HostFunction, compiled: CompiledKernel, *operands: jax.Array
) -> list[jax.Array]:
    """Runs a kernel by a Python function; with that bound, it is what an executor's ``run`` is.

    It works wherever kernels do: eagerly, under ``jax.jit``, and inside ``jax.shard_map``.
    """
    results: list[jax.Array] = host_call_p.bind(*operands, call=_HostCall(execute, compiled))
    return results


@dataclasses.dataclass(frozen=True, eq=False)
class _HostCall:
    execute: HostFunction
    compiled: CompiledKernel

    def __call__(self, *inputs: Any) -> tuple[np.ndarray, ...]:
        buffers = self.compiled.launch.outputs
        arrays = [np.asarray(array) for array in inputs]
        outputs = [np.asarray(array) for array in self.execute(self.compiled, arrays)]
        got = [(array.shape, array.dtype) for array in outputs]
        expected = [(buffer.shape, np.dtype(buffer.dtype)) for buffer in buffers]
        if got != expected:
            raise ExecutionError(
                f"an executor returned the wrong outputs of kernel {self.compiled.name!r}",
                got=got,
                expected=str(expected),
            )
        return tuple(outputs)


host_call_p = Primitive("pallasite_host_call")
host_call_p.multiple_results = True


def _impl(*operands: Any, call: _HostCall) -> list[jax.Array]:
    return list(map(jax.numpy.asarray, call(*operands)))


def _abstract_eval(*operands: Any, call: _HostCall) -> list[Any]:
    del operands
    return [
        jax.core.ShapedArray(buffer.shape, np.dtype(buffer.dtype))
        for buffer in call.compiled.launch.outputs
    ]


def _lower(ctx: Any, *operands: Any, call: _HostCall) -> Any:
    results, _, _ = mlir.emit_python_callback(
        ctx,
        call,
        None,
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=not call.compiled.launch.outputs,
        returns_token=False,
    )
    return results


host_call_p.def_impl(_impl)
host_call_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(host_call_p, _lower)
