"""``kernel``: turns a function over references into a JAX function, by tracing it.

What comes out is one equation of the primitive ``kernel_call_p``, whose only parameter is the
:class:`KernelSpec`. How it is compiled and launched is registered elsewhere, per platform.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallasite import _jax
from pallasite.errors import InvalidTypeError, SourceLocation
from pallasite.language import checks
from pallasite.language.batching import BatchAxis, prepend_axis
from pallasite.language.memory import GMEM
from pallasite.language.mesh import Mesh
from pallasite.language.params import CompilerParams


@dataclasses.dataclass(frozen=True, eq=False)
class KernelSpec:
    """A traced kernel: all that the compiler needs. Compared by identity.

    Attributes:
      name: a valid PTX identifier.
      jaxpr: the body; no constants and no outputs, its inputs are references to the inputs and then
        to the outputs, all in global memory.
      in_avals, out_avals: array types of inputs and outputs.
      input_output_aliases: pairs (input, output) that share one buffer.
      mesh: grid, cluster and threads.
      params: compiler parameters.
      location: where the body is defined.
      debug: whether the user asked for the intermediate stages to be printed.
    """

    name: str
    jaxpr: Any
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]
    input_output_aliases: tuple[tuple[int, int], ...]
    mesh: Mesh
    params: CompilerParams
    location: SourceLocation | None = None
    debug: bool = False

    def __repr__(self) -> str:
        return f"KernelSpec({self.name}, {dict(self.mesh.shape)})"

    def replace(self, **changes: Any) -> KernelSpec:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


# --- The primitive ---
kernel_call_p = _jax.Primitive("pallasite_kernel")
kernel_call_p.multiple_results = True


@functools.lru_cache(maxsize=1024)
def _jitted(spec: KernelSpec) -> Callable[..., Any]:
    compiled: Callable[..., Any] = jax.jit(functools.partial(kernel_call_p.bind, spec=spec))
    return compiled


def _impl(*operands: Any, spec: KernelSpec) -> Any:
    with jax.disable_jit(False):
        return _jitted(spec)(*operands)


kernel_call_p.def_impl(_impl)


@_jax.abstract_eval(kernel_call_p)
def _abstract_eval(*in_avals: Any, spec: KernelSpec) -> tuple[tuple[Any, ...], set[Any]]:
    for aval in (*in_avals, *spec.out_avals):
        if isinstance(aval, _jax.ShapedArray) and any(p is not None for p in aval.sharding.spec):
            raise checks.value_error(
                f"kernel {spec.name} is called on an array that is sharded over a mesh",
                got=aval,
                hint="call the kernel inside jax.shard_map, on one device's part",
            )
    positions = {var: i for i, var in enumerate(spec.jaxpr.invars)}
    effects: set[Any] = set()
    for effect in spec.jaxpr.effects:
        if isinstance(effect, _jax.JaxprInputEffect):
            position = positions[effect.input]
            if position < len(in_avals) and isinstance(in_avals[position], _jax.AbstractRef):
                effects.add(effect.replace(position))
        elif isinstance(effect, _jax.NamedAxisEffect):
            if effect.name not in spec.mesh.shape:
                effects.add(effect)
        elif not (
            spec.mesh.discharges_effect(effect) or _jax.kernel_local_effects.contains(effect)
        ):
            effects.add(effect)
    return spec.out_avals, effects


def _written_inputs(spec: KernelSpec) -> set[int]:
    """Positions of inputs whose reference the body writes."""
    positions = {var: i for i, var in enumerate(spec.jaxpr.invars)}
    written = {
        positions[effect.input]
        for effect in spec.jaxpr.effects
        if isinstance(effect, _jax.WriteEffect | _jax.AccumEffect)
    }
    return {position for position in written if position < len(spec.in_avals)}


@_jax.discharge_rule(kernel_call_p)
def _discharge(ctx: Any, *operands: Any, spec: KernelSpec) -> tuple[list[Any], list[Any]]:
    """Mutable arrays become inputs that are aliased to additional outputs."""
    updated = sorted(
        position
        for position in _written_inputs(spec)
        if ctx.should_discharge[position] and isinstance(ctx.in_avals[position], _jax.AbstractRef)
    )
    num_outs = len(spec.out_avals)
    new_refs = [_jax.new_var(spec.jaxpr.invars[position].aval) for position in updated]
    aliases = tuple((position, num_outs + i) for i, position in enumerate(updated))
    jaxpr = spec.jaxpr
    if new_refs:
        jaxpr = _jax.append_inputs(jaxpr, new_refs)
    new = spec.replace(
        jaxpr=jaxpr,
        out_avals=(*spec.out_avals, *(spec.in_avals[position] for position in updated)),
        input_output_aliases=(*spec.input_output_aliases, *aliases),
    )
    results = kernel_call_p.bind(*operands, spec=new)
    new_values: list[Any] = [None] * len(operands)
    for position, value in zip(updated, results[num_outs:], strict=True):
        new_values[position] = value
    return new_values, list(results[:num_outs])


def _batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], *, spec: KernelSpec
) -> tuple[list[Any], list[Any]]:
    """``jax.vmap``: a new first grid axis; operands that are not batched are passed as they are."""
    if all(dim is None for dim in dims):
        return kernel_call_p.bind(*operands, spec=spec), [None] * len(spec.out_avals)
    size, axis = axis_data.size, BatchAxis()
    written, aliased = _written_inputs(spec), {i for i, _ in spec.input_output_aliases}
    values, batched = [], []
    for position, (value, dim) in enumerate(zip(operands, dims, strict=True)):
        is_ref = isinstance(_jax.typeof(value), _jax.AbstractRef)
        if is_ref and dim is None and position in written:
            raise checks.value_error(
                f"jax.vmap of kernel {spec.name} would write one reference from every batch entry",
                hint="map over the reference too, with in_axes=0",
            )
        if is_ref and dim not in (None, 0):
            raise checks.unsupported(
                f"jax.vmap of kernel {spec.name} over axis {dim} of a reference",
                expected="in_axes=0 or None for references",
            )
        if dim is None and position in aliased:
            value, dim = jnp.broadcast_to(value, (size, *value.shape)), 0
        values.append(value if is_ref or dim is None else jnp.moveaxis(value, dim, 0))
        batched.append(dim is not None)
    mesh = spec.mesh.replace(grid=(size, *spec.mesh.grid), grid_names=(axis, *spec.mesh.grid_names))
    with _tracing(mesh):
        jaxpr = prepend_axis(spec.jaxpr, [*batched, *[True] * len(spec.out_avals)], axis, size)

    def add_axis(aval: Any) -> Any:
        return _jax.ShapedArray((size, *aval.shape), aval.dtype)

    new = spec.replace(
        jaxpr=jaxpr,
        in_avals=tuple(
            add_axis(aval) if b else aval for aval, b in zip(spec.in_avals, batched, strict=True)
        ),
        out_avals=tuple(add_axis(aval) for aval in spec.out_avals),
        mesh=mesh,
    )
    return kernel_call_p.bind(*values, spec=new), [0] * len(new.out_avals)


_jax.fancy_primitive_batchers[kernel_call_p] = _batch


def _jvp(primals: Any, tangents: Any, *, spec: KernelSpec) -> Any:
    del primals, tangents
    raise checks.unsupported(
        f"kernel {spec.name} cannot be differentiated automatically",
        hint="give it a derivative with jax.custom_vjp or jax.custom_jvp",
    )


_jax.primitive_jvps[kernel_call_p] = _jvp


def _lower(platform: str | None, ctx: Any, *operands: Any, spec: KernelSpec) -> Any:
    # The runtime is a later layer: it is loaded when the first kernel is lowered.
    runtime = importlib.import_module("pallasite.runtime.jax_lowering")
    return runtime.lower_kernel_call(ctx, *operands, spec=spec, platform=platform)


for _platform in (None, "cuda", "cpu"):
    _jax.register_lowering(kernel_call_p, functools.partial(_lower, _platform), platform=_platform)


# --- Tracing ---
class _tracing:  # noqa: N801  (a context manager)
    """Everything that the body of a kernel may rely on while it is traced."""

    def __init__(self, mesh: Mesh):
        self.contexts = (
            mesh.tracing_context(),
            _jax.extend_axis_env(list(mesh.shape.items())),
            _jax.no_check_of_varying_axes(),
        )

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)


def _function_of(body: Callable[..., Any]) -> Any:
    while isinstance(body, functools.partial):
        body = body.func
    return body


def _location_of(body: Callable[..., Any]) -> SourceLocation | None:
    code = getattr(_function_of(body), "__code__", None)
    if code is None:
        return _jax.current_user_location()
    return SourceLocation(code.co_filename, code.co_firstlineno, 0, code.co_name)


def identifier(name: str) -> str:
    """``name`` with everything replaced that PTX does not allow in an identifier."""
    cleaned = re.sub(r"[^A-Za-z0-9_$]", "_", name).strip("_") or "kernel"
    return cleaned if cleaned[0].isalpha() else f"kernel_{cleaned}"


def _gmem_ref(aval: Any) -> Any:
    return _jax.AbstractRef(_jax.ShapedArray(aval.shape, aval.dtype), GMEM)


def _is_scalar(aval: Any) -> bool:
    return isinstance(aval, _jax.ShapedArray) and aval.shape == ()


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
    the inputs. References are captured as they are; a scalar becomes an input of shape ``()``, or a
    literal if it is known. Raises InvalidValueError on any other captured array.
    """
    in_avals = tuple(_jax.ShapedArray(aval.shape, aval.dtype) for aval in in_avals)
    ref_avals = [_gmem_ref(aval) for aval in (*in_avals, *out_avals)]
    info = _jax.make_debug_info("pallasite kernel", body, ref_avals, name)
    with _tracing(mesh):
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
        in_avals=(*in_avals, *captured_avals),
        out_avals=tuple(out_avals),
        input_output_aliases=tuple(input_output_aliases),
        mesh=mesh,
        params=params,
        location=location,
        debug=debug,
    )
    return spec, captured


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
    for const in jaxpr.consts:
        aval = _jax.typeof(const)
        if not isinstance(aval, _jax.AbstractRef) and not _is_scalar(aval):
            raise checks.value_error(
                f"the body of kernel {name} captures an array of shape {aval.shape}",
                got=aval,
                expected="only scalars and references are captured",
                hint="pass the array as an operand of the kernel",
            ).at(location)
        if _is_scalar(aval) and not isinstance(const, _jax.Tracer):
            sources.append(np.asarray(const)[()])
        else:
            sources.append((len(captured), _is_scalar(aval)))
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
    lifted_avals = [
        _gmem_ref(_jax.typeof(value))
        if _is_scalar(_jax.typeof(value))
        else _gmem_ref(_jax.typeof(value).inner_aval)
        for value in captured
    ]
    avals = [*avals[:num_inputs], *lifted_avals, *avals[num_inputs:]]
    with _tracing(mesh):
        new, _ = _jax.trace_to_jaxpr(
            body, avals, debug_info=_jax.make_debug_info("pallasite kernel", body, avals, name)
        )
    return new.replace(debug_info=new.debug_info.replace_func_name(info.func_name)), captured


# --- The entry point ---
def kernel(
    body: Callable[..., None] | None = None,
    *,
    out_type: Any = None,
    scratch_types: Any = None,
    compiler_params: CompilerParams | None = None,
    grid: Sequence[int] = (),
    grid_names: Sequence[Any] = (),
    cluster: Sequence[int] = (),
    cluster_names: Sequence[Any] = (),
    num_threads: int | None = None,
    thread_name: Any = None,
    interpret: Any = None,
    debug: bool = False,
    input_output_aliases: Mapping[int, int] | None = None,
    out_shape: Any = None,
    scratch_shapes: Any = None,
    **mesh_kwargs: Any,
) -> Any:
    """Makes a JAX function of a kernel body.

    The body gets a reference for each operand, each output and each scratch allocation, in this
    order, and returns nothing. Without ``body`` this is a decorator.

    Args:
      body: the kernel body.
      out_type: a tree of ``jax.ShapeDtypeStruct`` (or allocations in GMEM) for the outputs. A list
        or tuple is spread over the body's arguments, anything else is one argument.
      scratch_types: a list or tuple of allocations and barriers, or a dictionary of them, which is
        passed by keyword. All threads of a block share them.
      compiler_params: a :class:`CompilerParams`.
      grid, grid_names, cluster, cluster_names, num_threads, thread_name: see :class:`Mesh`;
        ``kernel_name`` may be given too.
      interpret: not supported; executors choose themselves by platform.
      debug: prints the jaxpr after tracing and marks the kernel, so that later stages print too.
      input_output_aliases: operand number -> output number (in flattened order) that are to share
        one buffer; the body sees the operand's data in the output.
      out_shape, scratch_shapes: older names of ``out_type`` and ``scratch_types``.

    Returns:
      A function of the operands (trees of arrays or of ``jax.Ref``) that returns the outputs.

    Raises:
      InvalidValueError, InvalidTypeError: for a mesh, types or a body that cannot work.
    """
    out_type = _one_of("out_type", out_type, "out_shape", out_shape)
    scratch_types = _one_of("scratch_types", scratch_types, "scratch_shapes", scratch_shapes)
    mesh = _make_mesh(
        mesh_kwargs,
        grid=grid,
        grid_names=grid_names,
        cluster=cluster,
        cluster_names=cluster_names,
        num_threads=num_threads,
        thread_name=thread_name,
    )
    if interpret:
        raise checks.unsupported(
            "interpret= is not supported",
            hint="on a machine without a GPU the simulator runs the compiled kernel",
        )
    if compiler_params is None:
        compiler_params = CompilerParams()
    elif not isinstance(compiler_params, CompilerParams):
        raise checks.type_error(
            "compiler_params belong to another backend",
            got=f"{type(compiler_params).__module__}.{type(compiler_params).__qualname__}",
            expected="pallasite.gpu.CompilerParams",
        )
    make = functools.partial(
        _Kernel,
        out_type=out_type,
        scratch_types=scratch_types,
        params=compiler_params,
        mesh=mesh,
        aliases=dict(input_output_aliases or {}),
        debug=bool(debug),
    )
    return make if body is None else make(body)


def _one_of(name: str, value: Any, old_name: str, old_value: Any) -> Any:
    if value is not None and old_value is not None:
        raise checks.value_error(
            f"{name} and its older name {old_name} are both given", expected=f"only {name}"
        )
    if value is None:
        value = old_value
    return () if value is None else value


def _make_mesh(extra: Mapping[str, Any], **arguments: Any) -> Mesh:
    known = {field.name for field in dataclasses.fields(Mesh)}
    for name in extra:
        if name not in known:
            raise checks.type_error(
                f"kernel has no parameter {name!r}",
                expected="one of " + ", ".join(sorted(known)) + " or a parameter of kernel itself",
            )
    return Mesh(**arguments, **extra)


class _Kernel:
    """The function that :func:`kernel` returns."""

    def __init__(
        self,
        body: Callable[..., None],
        *,
        out_type: Any,
        scratch_types: Any,
        params: CompilerParams,
        mesh: Mesh,
        aliases: dict[int, int],
        debug: bool,
    ):
        if not callable(body):
            raise checks.type_error("the kernel body is not a function", got=body)
        self.body = body
        self.params = params
        self.mesh = mesh
        self.aliases = aliases
        self.debug = debug
        self.location = _location_of(body)
        self.single_output = not isinstance(out_type, tuple | list)
        self.out_type = (out_type,) if self.single_output else out_type
        if not isinstance(scratch_types, Sequence | Mapping):
            scratch_types = (scratch_types,)
        self.scratch_types = scratch_types
        self.name = str(mesh.kernel_name or getattr(_function_of(body), "__name__", "kernel"))
        self.traced: dict[Any, tuple[KernelSpec, Any]] = {}
        functools.update_wrapper(self, _function_of(body), updated=())

    def __call__(self, *operands: Any) -> Any:
        flat, in_tree = jax.tree.flatten(operands)
        flat = [_check_operand(value, i, self.name) for i, value in enumerate(flat)]
        _check_distinct_references(flat, self.name)
        avals = tuple(_array_type_of(_jax.typeof(value)) for value in flat)
        with _jax.no_check_of_varying_axes():
            spec, captured, out_tree = self.trace(avals, in_tree)
            _check_distinct_references([*flat, *captured], self.name)
            results = kernel_call_p.bind(*flat, *captured, spec=spec)
        outputs = jax.tree.unflatten(out_tree, results)
        return outputs[0] if self.single_output else outputs

    def trace(self, in_avals: tuple[Any, ...], in_tree: Any) -> tuple[KernelSpec, list[Any], Any]:
        """The spec for these operand types, the captured values and the tree of the outputs.

        As with ``jax.jit``, the trace is kept and used again for the same types.
        """
        key = (in_avals, in_tree, _jax.trace_context())
        if key in self.traced:
            spec, out_tree = self.traced[key]
            return spec, [], out_tree
        flat_out, out_tree = jax.tree.flatten(self.out_type)
        out_avals = tuple(_output_type(t, i, self.name) for i, t in enumerate(flat_out))
        aliases = _check_aliases(self.aliases, in_avals, out_avals)

        def flat_body(*refs: Any) -> None:
            inputs = jax.tree.unflatten(in_tree, refs[: len(in_avals)])
            outputs = jax.tree.unflatten(out_tree, refs[len(in_avals) :])
            self.call_body((*inputs, *outputs))

        spec, captured = trace_kernel(
            flat_body,
            in_avals,
            out_avals,
            name=self.name,
            mesh=self.mesh,
            params=self.params,
            input_output_aliases=aliases,
            location=self.location,
            debug=self.debug,
        )
        if self.debug:
            print(f"{self.name}:\n{spec.jaxpr}")
        if not captured:
            self.traced[key] = (spec, out_tree)
        return spec, captured, out_tree

    def call_body(self, refs: tuple[Any, ...]) -> None:
        """Runs the body on its references, with the scratch allocated around it."""

        def run(*scratch: Any, **named_scratch: Any) -> None:
            result = self.body(*refs, *scratch, **named_scratch)
            if result is not None:
                raise InvalidTypeError(
                    f"the body of kernel {self.name} returns a value",
                    got=jax.tree.map(lambda x: str(_jax.typeof(x)), result),
                    expected="None; results are written to the references of the outputs",
                    location=self.location,
                )

        if not self.scratch_types:
            run()
            return
        axes = () if self.mesh.thread_name is None else (self.mesh.thread_name,)
        if isinstance(self.scratch_types, Mapping):
            pl.run_scoped(run, **self.scratch_types, collective_axes=axes)
        else:
            pl.run_scoped(run, *self.scratch_types, collective_axes=axes)


def _check_operand(value: Any, position: int, name: str) -> Any:
    if isinstance(value, _jax.TransformedRef):
        raise checks.type_error(
            f"operand {position} of kernel {name} is a view of a reference",
            got=value,
            expected="an array or a whole jax.Ref",
            hint="pass the reference and take the view inside the kernel",
        )
    if not isinstance(value, jax.Array | _jax.Ref):
        try:
            value = jnp.asarray(value)
        except (TypeError, ValueError) as error:
            raise checks.type_error(
                f"operand {position} of kernel {name} is not an array",
                got=f"{type(value).__name__}: {value!r}",
                expected="an array or a jax.Ref",
            ) from error
    aval = _array_type_of(_jax.typeof(value))
    if not isinstance(aval, _jax.ShapedArray) or not isinstance(aval.dtype, np.dtype):
        raise checks.type_error(
            f"operand {position} of kernel {name} has a dtype that kernels cannot read",
            got=aval,
            expected="an array of numbers or booleans",
        )
    return value


def _array_type_of(aval: Any) -> Any:
    return aval.inner_aval if isinstance(aval, _jax.AbstractRef) else aval


def _check_distinct_references(values: Sequence[Any], name: str) -> None:
    seen: set[int] = set()
    for value in values:
        if isinstance(value, _jax.Ref) or isinstance(_jax.typeof(value), _jax.AbstractRef):
            if id(value) in seen:
                raise checks.value_error(
                    f"one reference is given to kernel {name} twice",
                    hint="pass it once, and do not capture it as well",
                )
            seen.add(id(value))


def _output_type(out_type: Any, position: int, name: str) -> Any:
    try:
        aval = _jax.convert_out_type(out_type)
    except ValueError as error:
        raise checks.type_error(
            f"output {position} of kernel {name} has no type",
            got=repr(out_type),
            expected="jax.ShapeDtypeStruct(shape, dtype)",
        ) from error
    space = getattr(out_type, "memory_space", None)
    if space is not None and space is not GMEM and not isinstance(space, _jax.DeviceMemorySpace):
        raise checks.value_error(
            f"output {position} of kernel {name} is not in global memory",
            got=out_type,
            expected="jax.ShapeDtypeStruct(shape, dtype)",
        )
    return _jax.strip_memory_space(aval)


def _check_aliases(
    aliases: Mapping[int, int], in_avals: Sequence[Any], out_avals: Sequence[Any]
) -> tuple[tuple[int, int], ...]:
    pairs = tuple(sorted(aliases.items()))
    for i, o in pairs:
        if not (0 <= i < len(in_avals) and 0 <= o < len(out_avals)):
            raise checks.value_error(
                f"input_output_aliases has no such pair: input {i}, output {o}",
                expected=f"inputs 0..{len(in_avals) - 1}, outputs 0..{len(out_avals) - 1}",
            )
        given, wanted = in_avals[i], out_avals[o]
        if given.shape != wanted.shape or given.dtype != wanted.dtype:
            raise checks.value_error(
                f"input {i} and output {o} cannot share a buffer",
                got=f"{given.str_short()} and {wanted.str_short()}",
                expected="the same shape and dtype",
            )
    outputs = [o for _, o in pairs]
    if len(set(outputs)) != len(outputs):
        raise checks.value_error(
            "two inputs are aliased to one output", got=f"input_output_aliases={dict(pairs)}"
        )
    return pairs
