"""What the checks of kernels find, without compiling any further."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallasite import _jax, plugins
from pallasite import gpu as plgpu
from pallasite.errors import PallasiteError
from pallasite.language.kernel_call import kernel_call_p
from pallasite.passes.pipeline import PassContext, run_stage
from pallasite.runtime.jax_lowering import spec_of_pallas_call

_jax.hide_frames_of(__file__)

F32 = np.float32
BOTH = (plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check says: the line of the kernel marked with ``# here``, or 0, and the text."""

    at_mark: bool
    text: str


def array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    """The type of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def findings(
    body: Callable[..., Any],
    inputs: Sequence[Any] = (),
    out: Any = (),
    *,
    target: str = "sm_90a",
    semantics: Any = plgpu.LoweringSemantics.Warpgroup,
    **options: Any,
) -> list[Finding]:
    """Checks a kernel of ``plgpu.kernel``; an error ends the checks, as when compiling."""
    params = plgpu.CompilerParams(lowering_semantics=semantics)
    kernel = plgpu.kernel(body, out_type=out, compiler_params=params, **options)
    return findings_of(kernel, inputs, body, target=target)


def findings_of(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    marked: Callable[..., Any] | None = None,
    *,
    target: str = "sm_90a",
) -> list[Finding]:
    """Checks all kernels that a function calls."""
    jaxpr = jax.make_jaxpr(function)(*inputs)
    found: list[str] = []
    for spec in _specs(jaxpr.jaxpr):
        chosen = plugins.registry().targets[target]
        context = PassContext(spec.name, chosen, spec.params, spec.mesh, spec)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                run_stage("jaxpr", spec.jaxpr, context)
            except PallasiteError as error:
                found.append(str(error))
        found += [str(one.message) for one in caught]
    return [Finding(_is_marked(text, marked or function), text) for text in found]


def _specs(jaxpr: Any) -> list[Any]:
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive is kernel_call_p:
            found.append(equation.params["spec"])
        if equation.primitive is _jax.pallas_call_p:
            found.append(spec_of_pallas_call(equation.params))
        for inner in _jax.jaxprs_in_params(equation.params):
            found += _specs(inner)
    return found


def _is_marked(text: str, function: Callable[..., Any]) -> bool:
    place = re.match(r"(\S+\.py):(\d+)", text)
    if place is None:
        return False
    lines, first = inspect.getsourcelines(function)
    number = int(place[2]) - first
    return 0 <= number < len(lines) and "# here" in lines[number]


def only(found: Sequence[Finding], *parts: str) -> None:
    """Asserts that there is one finding, at the marked line, whose text has these parts."""
    assert len(found) == 1, found
    assert found[0].at_mark, found[0].text
    for part in parts:
        assert part in found[0].text, found[0].text
