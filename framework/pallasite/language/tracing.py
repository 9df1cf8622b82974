"""Traces the body of a kernel to a :class:`KernelSpec`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from pallasite import _jax, config, garbage, plugins
from pallasite.errors import InvalidValueError, SourceLocation
from pallasite.language.memory import GMEM
from pallasite.language.mesh import Mesh
from pallasite.language.params import CompilerParams
from pallasite.language.spec import KernelSpec

LARGEST_CAPTURED = 4096
"""Bytes of a captured array, which each thread loads into registers at the start of the kernel."""

_mesh: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


def traced_mesh() -> Mesh | None:
    """The mesh of the kernel that is being traced; None outside of kernels."""
    return _mesh.get()


@contextlib.contextmanager
def kernel_environment(mesh: Mesh) -> Iterator[None]:
    """Everything that the body of a kernel may rely on while it is traced."""
    axes = _jax.extend_axis_env(list(mesh.shape.items()))
    varying = _jax.no_check_of_varying_axes()
    with config.bound(_mesh, mesh), mesh.tracing_context(), axes, varying:
        yield


def identifier(name: str) -> str:
    """``name`` with everything replaced that PTX does not allow in an identifier."""
    cleaned = re.sub(r"[^A-Za-z0-9_$]", "_", name).strip("_") or "kernel"
    return cleaned if cleaned[0].isalpha() else f"kernel_{cleaned}"


def _gmem_ref(aval: Any) -> Any:
    return _jax.AbstractRef(_jax.ShapedArray(aval.shape, aval.dtype), GMEM)


def words_type(aval: Any) -> Any:
    """The array type of the words of random keys; of other arrays, theirs."""
    return _jax.physical_aval(aval) if is_of_keys(aval) else aval


def is_of_keys(aval: Any) -> bool:
    """Whether an array type is one of random keys."""
    return bool(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key))


def trace_kernel(
    body: Callable[..., None],
    in_avals: Sequence[Any],
    out_avals: Sequence[Any],
    *,
    name: str,
    mesh: Mesh,
    params: CompilerParams,
    input_output_aliases: Sequence[tuple[int, int]] = (),
    location: SourceLocation | None = None,
    debug: bool = False,
) -> tuple[KernelSpec, list[Any]]:
    """Traces ``body(*input_refs, *output_refs)`` on flat array types.

    Returns the spec and the values that the body captured, which are further operands: they follow
    the inputs. References are captured as they are; arrays become inputs that are loaded, known
    scalars literals. Raises InvalidValueError on an array that is too large for registers.

    References to random keys are those of the body; the spec's types are of their words.
    """
    in_avals = tuple(_jax.ShapedArray(aval.shape, aval.dtype) for aval in in_avals)
    ref_avals = [_gmem_ref(aval) for aval in (*in_avals, *out_avals)]
    info = _jax.make_debug_info("pallasite kernel", body, ref_avals, name)
    with kernel_environment(mesh), garbage.uncollected():
        jaxpr, _ = _jax.trace_to_jaxpr(body, ref_avals, debug_info=info)
    captured: list[Any] = []
    if jaxpr.consts:
        jaxpr, captured = _lift_captured(jaxpr, len(in_avals), mesh, info, name, location)
    captured_avals = tuple(
        _jax.ShapedArray(_jax.typeof(value).shape, _jax.typeof(value).dtype) for value in captured
    )
    spec = KernelSpec(
        name=identifier(name),
        jaxpr=jaxpr,
        in_avals=tuple(map(words_type, (*in_avals, *captured_avals))),
        out_avals=tuple(map(words_type, out_avals)),
        input_output_aliases=tuple(input_output_aliases),
        mesh=mesh,
        params=params,
        location=location,
        debug=debug,
    )
    return spec, captured


def _first_use(jaxpr: Any, variable: Any) -> SourceLocation | None:
    """The source line of the first equation that uses a variable, inside of scopes too."""
    for equation in jaxpr.eqns:
        if not any(atom is variable for atom in equation.invars):
            continue
        position = equation.invars.index(variable)
        for region in plugins.registry().jaxprs.regions(equation):
            if region.scoped and position in region.operands:
                return _first_use(region.jaxpr, region.inputs[region.operands.index(position)])
        return _jax.user_location(equation.source_info)
    return None


def _lift_captured(
    jaxpr: Any,
    num_inputs: int,
    mesh: Mesh,
    info: Any,
    name: str,
    location: SourceLocation | None,
) -> tuple[Any, list[Any]]:
    """Makes captured values inputs of the body, after the others."""
    captured: list[Any] = []
    sources: list[Any] = []  # for each constant: a literal, or (position, whether to load it)
    for variable, const in zip(jaxpr.constvars, jaxpr.consts, strict=True):
        aval = _jax.typeof(const)
        is_array = not isinstance(aval, _jax.AbstractRef)
        if is_array and aval.size * aval.dtype.itemsize > LARGEST_CAPTURED:
            raise InvalidValueError(
                f"the body of kernel {name} captures an array of shape {aval.shape}",
                got=aval,
                expected=f"references, and arrays of up to {LARGEST_CAPTURED} bytes",
                hint="pass the array as an operand of the kernel",
                location=_first_use(jaxpr, variable) or location,
            )
        known = is_array and not isinstance(const, _jax.Tracer) and not is_of_keys(aval)
        if known and aval.shape == ():
            sources.append(np.asarray(const)[()])
        else:
            sources.append((len(captured), is_array))
            captured.append(const)

    def body(*refs: Any) -> list[Any]:
        lifted = refs[num_inputs : num_inputs + len(captured)]
        consts = []
        for source in sources:
            if isinstance(source, tuple):
                position, load = source
                consts.append(lifted[position][...] if load else lifted[position])
            else:
                consts.append(source)
        arguments = (*refs[:num_inputs], *refs[num_inputs + len(captured) :])
        _jax.eval_jaxpr(jaxpr, consts, *arguments)
        return []

    avals = [v.aval for v in jaxpr.invars]
    types = map(_jax.typeof, captured)
    lifted_avals = [_gmem_ref(getattr(one, "inner_aval", one)) for one in types]
    avals = [*avals[:num_inputs], *lifted_avals, *avals[num_inputs:]]
    with kernel_environment(mesh):
        new, _ = _jax.trace_to_jaxpr(
            body, avals, debug_info=_jax.make_debug_info("pallasite kernel", body, avals, name)
        )
    return new.replace(debug_info=new.debug_info.replace_func_name(info.func_name)), captured
