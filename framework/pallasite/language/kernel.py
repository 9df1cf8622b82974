"""``kernel``: turns a function over references into a JAX function, by tracing it.

A call becomes one equation of ``kernel_call_p``, whose only parameter is the :class:`KernelSpec`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallasite import _jax
from pallasite.errors import InvalidTypeError, SourceLocation
from pallasite.language import checks
from pallasite.language.interpretation import interpretation
from pallasite.language.kernel_call import call_kernel
from pallasite.language.memory import GMEM
from pallasite.language.mesh import Mesh
from pallasite.language.params import CompilerParams
from pallasite.language.spec import KernelSpec
from pallasite.language.tracing import is_of_keys, trace_kernel

THREEFRY = "threefry2x32"
"""The generator whose keys kernels can use."""


def kernel(
    body: Callable[..., None] | None = None,
    *,
    out_type: Any = (),
    scratch_types: Any = (),
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
      out_type: a tree of ``jax.ShapeDtypeStruct`` for the outputs; allocations in GMEM and arrays
        stand for their type. A list or tuple is unpacked into the body's arguments, anything else
        is one argument. Inside ``jax.shard_map``, an output varies over the mesh axes of its
        ``manual_axis_type``; else those of operands and ``axis_index``, all if it communicates.
      scratch_types: a list or tuple of allocations and barriers, or a dictionary of them, which is
        passed by keyword. All threads of a block share them.
      compiler_params: a :class:`CompilerParams`.
      grid, grid_names, cluster, cluster_names, num_threads, thread_name: see :class:`Mesh`;
        ``kernel_name`` may be given too.
      interpret: True or ``InterpretGPUParams`` runs the kernel on the CPU even in a program
        for a GPU; False and None leave that to ``force_gpu_interpret_mode``.
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
        interpretation().params(interpret)
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
        interpret=interpret,
    )
    return make if body is None else make(body)


def _function_of(body: Callable[..., Any]) -> Any:
    while isinstance(body, functools.partial):
        body = body.func
    return body


def _location_of(body: Callable[..., Any]) -> SourceLocation | None:
    code = getattr(_function_of(body), "__code__", None)
    if code is None:
        return _jax.current_user_location()
    return SourceLocation(code.co_filename, code.co_firstlineno, 0, code.co_name)


def _signature_of(body: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of what is called itself, not of a function that it wraps."""
    try:
        return inspect.signature(body, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def _positional(body: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a body that are given by position; none if it takes any number of them."""
    signature = _signature_of(body)
    given = [] if signature is None else list(signature.parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    several = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in given)
    return [] if several else [one for one in given if one.kind in kinds]


def _one_of(name: str, value: Any, old_name: str, old_value: Any) -> Any:
    given = value is not None and not (isinstance(value, tuple) and not value)
    if given and old_value is not None:
        raise checks.value_error(
            f"{name} and its older name {old_name} are both given", expected=f"only {name}"
        )
    value = value if given else old_value
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
        interpret: Any,
    ):
        if not callable(body):
            raise checks.type_error("the kernel body is not a function", got=body)
        self.body = body
        self.params = params
        self.mesh = mesh
        self.aliases = aliases
        self.debug = debug
        self.interpret = interpret
        self.location = _location_of(body)
        self.definition = _jax.current_source_info().traceback
        self.single_output = not isinstance(out_type, tuple | list)
        self.out_type = (out_type,) if self.single_output else out_type
        several = isinstance(scratch_types, Sequence | Mapping)
        self.scratch_types = scratch_types if several else (scratch_types,)
        if not all(hasattr(one, "get_ref_aval") for one in jax.tree.leaves(self.scratch_types)):
            raise checks.type_error("scratch_types are no allocations", got=scratch_types)
        self.name = str(mesh.kernel_name or getattr(_function_of(body), "__name__", "kernel"))
        self.traced: dict[Any, tuple[KernelSpec, list[Any], Any]] = {}
        functools.update_wrapper(self, _function_of(body), updated=())
        self.__signature__ = self.operand_signature()

    def __call__(self, *operands: Any, **named: Any) -> Any:
        operands = self.__signature__.bind(*operands, **named).args if named else operands
        flat, in_tree = jax.tree.flatten(operands)
        flat = [_check_operand(value, i, self.name) for i, value in enumerate(flat)]
        _check_distinct_references(flat, self.name)
        flat = _jax.match_varying_axes(*flat)
        avals = tuple(_plain(_array_type_of(_jax.typeof(value))) for value in flat)
        with _jax.no_check_of_varying_axes():
            spec, captured, out_tree = self.trace(avals, in_tree)
        _check_distinct_references([*flat, *captured], self.name)
        results = call_kernel(*map(_words, (*flat, *captured)), spec=spec)
        results = list(map(_keys, results, jax.tree.leaves(self.out_type)))
        outputs = jax.tree.unflatten(out_tree, results)
        return outputs[0] if self.single_output else outputs

    def operand_signature(self) -> inspect.Signature:
        """The parameters of the body that are operands: they come before outputs and scratch."""
        scratch = self.scratch_types
        named = isinstance(scratch, Mapping)
        given = [one for one in _positional(self.body) if not (named and one.name in scratch)]
        needed = [one for one in given if one.default is one.empty]
        count = len(needed) - len(self.out_type) - (0 if named else len(scratch))
        # A parameter with a default is scratch, or given by nobody; if it may be either, only the
        # number of operands in a call tells which ones they are.
        unclear = len(needed) < len(given) and not named and bool(scratch)
        if count < 0 or not given or unclear:
            return inspect.signature(lambda *operands: None)
        return inspect.Signature(needed[:count])

    def trace(self, in_avals: tuple[Any, ...], in_tree: Any) -> tuple[KernelSpec, list[Any], Any]:
        """The spec for these operand types, the captured values and the tree of the outputs.

        As with ``jax.jit``, the trace is kept and used again for the same types.
        """
        interpret = interpretation().params(self.interpret)
        key = (in_avals, in_tree, _jax.trace_context(), interpret)
        if key in self.traced:
            return self.traced[key]
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
        spec = spec.replace(interpret=interpret, out_varying=tuple(map(_own_axes, flat_out)))
        if self.debug:
            print(f"{self.name}:\n{spec.jaxpr}")
        if not captured:
            self.traced[key] = (spec, captured, out_tree)
        return spec, captured, out_tree

    def call_body(self, refs: tuple[Any, ...]) -> None:
        """Runs the body on its references, with the scratch allocated around it."""

        def run(*scratch: Any, **named_scratch: Any) -> None:
            self.check_signature(refs, scratch, named_scratch)
            with _jax.traced_at(None), checks.errors_at_user_line(), jax.disable_jit(False):
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
        with _jax.traced_at(self.definition):
            if isinstance(self.scratch_types, Mapping):
                pl.run_scoped(run, **self.scratch_types, collective_axes=axes)
            else:
                names = _positional(self.body)[len(refs) :][: len(self.scratch_types)]
                if len(names) == len(self.scratch_types):
                    run.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
                pl.run_scoped(run, *self.scratch_types, collective_axes=axes)

    def check_signature(
        self, refs: Sequence[Any], scratch: Sequence[Any], named_scratch: Mapping[str, Any]
    ) -> None:
        """Raises InvalidTypeError if the body does not take the references that it gets."""
        signature = _signature_of(self.body)
        if signature is None:
            return
        try:
            signature.bind(*refs, *scratch, **named_scratch)
        except TypeError as error:
            outputs = len(self.out_type)
            raise InvalidTypeError(
                f"the body of kernel {self.name} cannot take its references: {error}",
                got=f"{len(refs) - outputs} inputs, {outputs} outputs,"
                f" {len(scratch) + len(named_scratch)} scratch allocations",
                expected="one parameter for each, in this order; the body is"
                f" {self.name}{signature}",
                location=self.location,
            ) from None


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
    _check_dtype(_array_type_of(_jax.typeof(value)), f"operand {position} of kernel {name}")
    if isinstance(value, _jax.Ref) and is_of_keys(_array_type_of(_jax.typeof(value))):
        raise checks.type_error(
            f"operand {position} of kernel {name} is a reference to random keys",
            got=_jax.typeof(value),
            expected="an array of keys, or a reference to numbers",
            hint="make the reference of jax.random.key_data(keys)",
        )
    return value


def _check_dtype(aval: Any, what: str) -> None:
    """Raises InvalidTypeError unless kernels can read and write arrays of a type."""
    if not isinstance(aval, _jax.ShapedArray) or not (
        isinstance(aval.dtype, np.dtype) or is_of_keys(aval)
    ):
        raise checks.type_error(
            f"{what} has a dtype that kernels cannot read",
            got=aval,
            expected="an array of numbers, booleans, or random keys",
        )
    if is_of_keys(aval) and _jax.key_implementation(aval.dtype) != THREEFRY:
        raise checks.type_error(
            f"{what} has keys of a generator that kernels do not have",
            got=aval,
            expected=f"keys of jax.random.key(seed, impl={THREEFRY!r})",
        )


def _words(value: Any) -> Any:
    """An operand; of random keys, their words."""
    aval = _jax.typeof(value)
    if isinstance(aval, _jax.AbstractRef) or not is_of_keys(aval):
        return value
    return jax.random.key_data(value)


def _keys(result: Any, kind: Any) -> Any:
    """A result; random keys, where those are its type."""
    if not is_of_keys(kind):
        return result
    return jax.random.wrap_key_data(result, impl=THREEFRY)


def _array_type_of(aval: Any) -> Any:
    return aval.inner_aval if isinstance(aval, _jax.AbstractRef) else aval


def _plain(aval: Any) -> Any:
    return _jax.ShapedArray(aval.shape, aval.dtype)


def _own_axes(out_type: Any) -> frozenset[Any] | None:
    """The manual axes over which an output varies, if its type says that itself."""
    kind = out_type.manual_axis_type if isinstance(out_type, jax.ShapeDtypeStruct) else None
    return None if kind is None else kind.varying


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
    if isinstance(out_type, jax.Array):
        out_type = _jax.typeof(out_type)  # a traced array has no attribute for its memory space
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
    _check_dtype(aval, f"output {position} of kernel {name}")
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
