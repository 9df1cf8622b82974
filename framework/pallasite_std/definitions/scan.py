"""``lax.scan`` over the elements of arrays: they lie in shared memory meanwhile."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import primitives

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import MemorySpace
from pallasite_std.definitions.record import Definition
from pallasite_std.memory.thread_arrays import EACH_THREAD


def _scans_arrays(equation: Any) -> bool:
    constants, carries, scanned = _jax.scan_operand_counts(equation.params)
    return bool(scanned) or len(equation.params["jaxpr"].outvars) > carries


def _scan(
    *operands: Any, jaxpr: Any, length: int, reverse: bool, unroll: int, **params: Any
) -> list[Any]:
    constants, carries, _ = _jax.scan_operand_counts(params)
    operands = tuple(jnp.zeros(x.shape, x.dtype) if 0 in x.shape else x for x in operands)
    given, start = operands[:constants], operands[constants : constants + carries]
    scanned = operands[constants + carries :]
    run = _jax.jaxpr_as_function(jaxpr)
    stacked = [variable.aval for variable in jaxpr.outvars[carries:]]
    if length == 0:
        return [*start, *[jnp.zeros((0, *aval.shape), aval.dtype) for aval in stacked]]
    shapes = [(x.shape, x.dtype) for x in scanned]
    shapes += [((length, *aval.shape), aval.dtype) for aval in stacked]

    def scoped(*allocated: Any) -> list[Any]:
        left = iter(allocated)
        references = [_Nothing(*one) if 0 in one[0] else next(left) for one in shapes]
        inputs, outputs = references[: len(scanned)], references[len(scanned) :]
        for reference, array in zip(inputs, scanned, strict=True):
            reference[...] = array

        def body(step: Any, carry: Any) -> Any:
            number = length - 1 - step if reverse else step
            elements = [reference[number] for reference in inputs]
            results = run(*given, *carry, *elements)
            for reference, value in zip(outputs, results[carries:], strict=True):
                reference[number] = value
            return tuple(results[:carries])

        final = lax.fori_loop(0, length, body, tuple(start), unroll=unroll)
        return [*final, *[reference[...] for reference in outputs]]

    memory = [MemorySpace.SMEM(shape, dtype) for shape, dtype in shapes if 0 not in shape]
    return list(pl.run_scoped(scoped, *memory, collective_axes=EACH_THREAD))


class _Nothing:
    """Stands for a reference to an array without elements."""

    def __init__(self, shape: tuple[int, ...], dtype: Any):
        self.shape, self.dtype = shape, dtype

    def __getitem__(self, index: Any) -> Any:
        return jnp.zeros(self.shape if index is ... else self.shape[1:], self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        pass


DEFINITIONS = {primitives.scan_p: Definition(_scan, _scans_arrays)}
