"""Executors that are Python functions on NumPy arrays, as operations that JAX can compile.

``jax.pure_callback`` would hand JAX arrays to the function, and reading those can wait for ever
when all of XLA's threads are busy; the primitive here passes NumPy arrays.

XLA turns an exception of such a function into an error of its own, whose message ends with the
exception's. The exception itself is remembered, for :func:`kernel_errors`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir.dialects import stablehlo

from pallasite.plugin import (
    ExecutionError,
    LaunchRequest,
    PallasiteError,
    SourceLocation,
    config,
)
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import checks, communication_effect
from pallasite.plugin.runtime import CompiledKernel

HostFunction = Callable[[CompiledKernel, Sequence[np.ndarray]], Sequence[np.ndarray]]
"""``execute(compiled, inputs)`` returns the outputs. The inputs must not be written to, and must
not be kept: an output that shares memory with an input starts as a copy of it."""

_REMEMBERED = 16
_recent: collections.deque[tuple[str, Exception]] = collections.deque(maxlen=_REMEMBERED)
"""What executors raised last, by the text under which XLA shows it."""


def run_on_host(
    execute: HostFunction,
    compiled: CompiledKernel,
    *operands: jax.Array,
    request: LaunchRequest | None = None,
    ordered: bool | None = None,
) -> list[jax.Array]:
    """Runs a kernel by a Python function; with that bound, it is what an executor's ``run`` is.

    The call always counts as one with side effects, whatever ``request`` says: a kernel may print,
    and what runs it may find an error.

    It works wherever kernels do: eagerly, under ``jax.jit``, and inside ``jax.shard_map``. Options
    that a ``with config.scoped(...)`` sets where the program is compiled hold when it runs.

    Calls that are ``ordered`` run one after the other on each device, in the program's order; those
    of kernels that communicate are, where JAX orders them, unless something else is said.
    """
    if ordered is None:
        ordered = communicates(compiled) and (request is None or request.ordered)
    line = _jax.users_line(None)
    call = _HostCall(execute, compiled, config.scoped_options(), ordered, line)
    results: list[jax.Array] = host_call_p.bind(*operands, call=call)
    return results


def communicates(compiled: CompiledKernel) -> bool:
    """Whether a kernel waits for other devices, as its provided operands say."""
    return any(
        json.loads(one.arguments).get("communicates")
        for one in compiled.launch.hidden_operands
        if one.provider
    )


@contextlib.contextmanager
def kernel_errors() -> Iterator[None]:
    """Raises the very exception that a kernel raised on the CPU, where XLA would raise its own.

    ``jax.jit`` reports whatever goes wrong in a kernel as a ``jax.errors.JaxRuntimeError`` or a
    ``ValueError`` with the text of the exception. Within this context the exception itself comes
    out, with its type and attributes, and kernels of several devices that are called afterwards
    do not fail for it::

        with pallasite.kernel_errors():
            result = jax.block_until_ready(jax.jit(function)(x))

    Kernels that are called outside of ``jax.jit`` need no context.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        text = str(error)
        # What orders the calls of such kernels has failed, too: JAX begins anew.
        _jax.runtime_tokens.clear()
        if isinstance(error, PallasiteError):
            raise
        for shown, original in reversed(_recent):
            if shown in text:
                raise original from None
        raise


@dataclasses.dataclass(frozen=True, eq=False)
class _HostCall:
    execute: HostFunction
    compiled: CompiledKernel
    options: Mapping[str, Any]
    ordered: bool
    line: SourceLocation | None

    def __call__(self, *inputs: Any) -> tuple[np.ndarray, ...]:
        error: Exception
        try:
            return self._run(inputs)
        except PallasiteError as problem:
            error = problem
            if problem.location is not None:
                # That of a library's kernel says less than where the program calls it.
                with contextlib.suppress(PallasiteError), checks.errors_at(lambda: self.line):
                    raise
        except Exception as problem:
            # XLA keeps the last line only, and the frames would keep the arrays.
            problem.add_note("".join(traceback.format_exception(problem)))
            error = problem
        error.__context__ = error.__cause__ = None
        error = error.with_traceback(None)
        _recent.append((f"{type(error).__name__}: {error}", error))
        raise error

    def _run(self, inputs: Sequence[Any]) -> tuple[np.ndarray, ...]:
        buffers = self.compiled.launch.outputs
        arrays = [np.asarray(array) for array in inputs]
        with config.scoped(**self.options):
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


@_jax.abstract_eval(host_call_p)
def _abstract_eval(*operands: Any, call: _HostCall) -> tuple[list[Any], set[Any]]:
    del operands
    outputs = [
        jax.core.ShapedArray(buffer.shape, np.dtype(buffer.dtype))
        for buffer in call.compiled.launch.outputs
    ]
    return outputs, {communication_effect} if call.ordered else set()


def _lower(ctx: Any, *operands: Any, call: _HostCall) -> Any:
    # A kernel may print, and it may find an error: XLA must not drop it, nor join two calls of it.
    token = ctx.tokens_in.get(communication_effect) if call.ordered else None
    returned = [_type_of_words(aval) for aval in ctx.avals_out]
    results, token, _ = mlir.emit_python_callback(
        ctx.replace(avals_out=returned),
        lambda *inputs: tuple(map(_words, call(*inputs))),
        token,
        list(operands),
        ctx.avals_in,
        returned,
        has_side_effect=True,
        returns_token=False,
        sharding=_jax.callback_sharding(ctx.module_context.axis_context, None, returned),
    )
    if call.ordered:
        ctx.set_tokens_out(mlir.TokenSet({communication_effect: token}))
    return [
        value
        if words is aval
        else stablehlo.bitcast_convert(mlir.aval_to_ir_type(ctx.module_context, aval), value)
        for value, aval, words in zip(results, ctx.avals_out, returned, strict=True)
    ]


# JAX makes 32 bits of the elements that a callback returns where its thread, one of XLA's, does not
# know of ``with jax.enable_x64(True)``. So those of 64 bits are returned as two words each.


def _type_of_words(aval: Any) -> Any:
    if aval.dtype.itemsize < 8:
        return aval
    return jax.core.ShapedArray((*aval.shape, 2), np.uint32)


def _words(array: np.ndarray) -> np.ndarray:
    if array.dtype.itemsize < 8:
        return array
    return np.ascontiguousarray(array).view(np.uint32).reshape(*array.shape, 2)


host_call_p.def_impl(_impl)
mlir.register_lowering(host_call_p, _lower)
