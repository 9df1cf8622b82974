"""What runs the kernels of random programs, and whether the results of two agree bit by bit.

References are computed on the CPU in any case. On the CPU kernels run on the simulator, on CUDA by
the executor that serves it; a program may run on both, in one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.extend
import numpy as np

from pallasite.runtime import jax_lowering

NAMES = ("auto", "simulator", "gpu", "both")


class Unequal(AssertionError):
    """Two executors computed different bits, and nothing in the kernels may be inexact."""


@dataclasses.dataclass(frozen=True)
class Executor:
    """What runs kernels.

    Attributes:
      name: ``"simulator"`` or ``"gpu"``.
      device: where programs run that use it.
    """

    name: str
    device: Any


def executors(name: str = "auto") -> tuple[Executor, ...]:
    """Those of a name, of which ``"auto"`` is the one of JAX's first device."""
    if name == "auto":
        name = "gpu" if jax.default_backend() == "gpu" else "simulator"
    names = ("simulator", "gpu") if name == "both" else (name,)
    platforms = {"simulator": "cpu", "gpu": "cuda"}
    return tuple(Executor(one, jax.local_devices(backend=platforms[one])[0]) for one in names)


def on_cpu() -> contextlib.AbstractContextManager[Any]:
    """References run there."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def target_on(chosen: Sequence[Executor], target: str) -> str:
    """What a program is compiled for: on a GPU, its own portable target instead of other chips'."""
    on_gpu = any(one.name == "gpu" for one in chosen)
    return "sm_90" if on_gpu and target != "sm_90a" else target


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """The PTX of kernels of programs that are lowered within the block."""
    found: list[str] = []
    compile_kernel = jax_lowering.compile_kernel

    def recording(*arguments: Any, **options: Any) -> Any:
        compiled = compile_kernel(*arguments, **options)
        found.append(compiled.ptx)
        return compiled

    with mock.patch.object(jax_lowering, "compile_kernel", recording):
        yield found


# Bits ---------------------------------------------------------------------------------------------

INEXACT = {
    "approximations": re.compile(
        r"\b(?:ex2|lg2|sin|cos|tanh|rcp|rsqrt|sqrt|div)\.(?:approx|full)\b"
    ),
    "sums of matrix products": re.compile(r"\b(?:mma|wgmma\.mma_async)\.\S*\.(?:f16|f32|f64)\b"),
    "order of atomics": re.compile(r"\b(?:atom|red|cp\.reduce)\.\S*add\S*\.b?f(?:16|32|64)"),
}
"""Instructions of which the simulator does not promise the last bits."""

XLA = "arithmetic of XLA"
"""The same for floating-point operations of a program that are not in a kernel."""

_EXACT = """
    abs broadcast_in_dim clamp concatenate convert_element_type copy copy_p dynamic_slice
    dynamic_update_slice expand_dims gather iota max min neg pad reduce_max reduce_min
    reduce_precision reshape rev select_n sign slice sort split squeeze stop_gradient transpose
"""
EXACT = frozenset(_EXACT.split())


def inexact(ptx: Sequence[str], *, outside: bool = False) -> list[str]:
    """Why results of kernels may differ in their last bits; empty if they may not.

    Args:
      ptx: of the kernels.
      outside: whether the program computes floating-point numbers by other means.
    """
    found = [name for name, form in INEXACT.items() if any(form.search(one) for one in ptx)]
    return [*found, XLA] if outside else found


def computes_outside(jaxpr: Any) -> bool:
    """Whether a program has inexact operations that are not in a kernel."""
    for equation in jaxpr.eqns:
        if jax_lowering.kernel_in_equation(equation) is not None:
            continue
        inner = list(_jaxprs(equation.params.values()))
        if any(computes_outside(one) for one in inner):
            return True
        floats = any(np.dtype(v.aval.dtype).kind not in "iub" for v in equation.outvars)
        if not inner and floats and equation.primitive.name not in EXACT:
            return True
    return False


def _jaxprs(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, jax.extend.core.Jaxpr):
            yield value
        elif isinstance(value, jax.extend.core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, tuple | list):
            yield from _jaxprs(value)


def compared(
    simulated: Sequence[np.ndarray], computed: Sequence[np.ndarray], reasons: Callable[[], Any]
) -> str:
    """Whether results are equal bit by bit: ``"equal"``, or why they need not be.

    Raises:
      Unequal: they differ, and there is no reason.
    """
    different = [
        place
        for place, (one, other) in enumerate(zip(simulated, computed, strict=True))
        if _bits(one).tobytes() != _bits(other).tobytes()
    ]
    if not different:
        return "equal"
    why = reasons()
    if why:
        return ", ".join(why)
    lines = []
    for place in different:
        one, other = _bits(simulated[place]), _bits(computed[place])
        where = np.argwhere(one != other)
        first = tuple(int(n) for n in where[0]) if len(where) else ()
        lines.append(
            f"result {place}: {len(where)} of {one.size} elements differ, first {list(first)}: "
            f"simulator {simulated[place][first]!r}, GPU {computed[place][first]!r}"
        )
    raise Unequal("\n".join(lines))


def _bits(array: np.ndarray) -> np.ndarray:
    """The bits of an array; those of all NaNs are the same, of which nothing is promised."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind in "iub":
        return array
    nan = np.isnan(array.astype(np.float32) if array.dtype.itemsize < 4 else array)
    bits = array.view(f"u{array.dtype.itemsize}").reshape(array.shape)
    return np.where(nan, np.array(0, bits.dtype) - np.array(1, bits.dtype), bits)
