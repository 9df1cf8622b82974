"""``lax.scan`` over the elements of arrays: they lie in shared memory meanwhile."""

from __future__ import annotations

from typing import Any

import jax
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
    given, start = operands[:constants], operands[constants : constants + carries]
    scanned = operands[constants + carries :]
    run = _jax.jaxpr_as_function(jaxpr)
    stacked = [variable.aval for variable in jaxpr.outvars[carries:]]
    if length == 0:
        return [*start, *[jax.numpy.zeros((0, *aval.shape), aval.dtype) for aval in stacked]]

    def scoped(*references: Any) -> list[Any]:
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

    shapes = [(x.shape, x.dtype) for x in scanned]
    shapes += [((length, *aval.shape), aval.dtype) for aval in stacked]
    memory = [MemorySpace.SMEM(shape, dtype) for shape, dtype in shapes]
    return list(pl.run_scoped(scoped, *memory, collective_axes=EACH_THREAD))


DEFINITIONS = {primitives.scan_p: Definition(_scan, _scans_arrays)}
