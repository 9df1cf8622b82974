"""The only door to private JAX: every other module imports what it needs from here, by plain names.

When a new JAX release moves something, this file is the one to change. It holds re-exports, grouped
by subject, and a few thin helpers whose signatures belong to Pallasite.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import jax
import jaxlib
import numpy as np
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import ad_util as _ad_util
from jax._src import api as _api
from jax._src import api_util as _api_util
from jax._src import callback as _callback
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import core as _core
from jax._src import custom_batching as _custom_batching
from jax._src import custom_derivatives as _custom_derivatives
from jax._src import debugging as _debugging
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import dtypes as _dtypes
from jax._src import effects as _effects
from jax._src import flattree as _flattree
from jax._src import literals as _literals
from jax._src import mesh as _mesh
from jax._src import pjit as _pjit
from jax._src import pretty_printer as _pretty_printer
from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util
from jax._src import tree_util as _tree_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jax._src.lax import parallel as _parallel
from jax._src.lax import special as _special
from jax._src.lax.control_flow import conditionals as _conditionals
from jax._src.lax.control_flow import loops as _loops
from jax._src.pallas import core as _pallas_core
from jax._src.pallas import mpmd as _mpmd
from jax._src.pallas import pallas_call as _pallas_call
from jax._src.pallas import primitives as _pallas_primitives
from jax._src.random import core as _random
from jax._src.random import prng as _prng
from jax._src.random import threefry2x32 as _threefry2x32
from jax._src.state import discharge as _discharge
from jax._src.state import indexing as _indexing
from jax._src.state import primitives as _state_primitives
from jax._src.state import types as _state_types

from pallasite.config import set_trace_context
from pallasite.errors import SourceLocation, UnsupportedError

# --- Jaxprs ---
# Since JAX 0.11 a closed jaxpr and a jaxpr are one class: ``jaxpr.consts`` are the values of
# ``jaxpr.constvars``, which come before ``jaxpr.invars``.
Atom = _core.Atom
ClosedJaxpr = _core.ClosedJaxpr
DropVar = _core.DropVar
Jaxpr = _core.Jaxpr
JaxprEqn = _core.JaxprEqn
Literal = _core.Literal
Primitive = _core.Primitive
Tracer = _core.Tracer
TypedNdArray = _literals.TypedNdArray
Var = _core.Var
#: ``match_varying_axes(*arrays)`` are the arrays, each varying over the manual axes of all of them.
match_varying_axes = _core.auto_insert_reshard
DebugInfo = _core.DebugInfo
eval_jaxpr = _core.eval_jaxpr
jaxpr_as_function = _core.jaxpr_as_fun
physical_aval = _core.physical_aval


def key_implementation(dtype: Any) -> str:
    """The name of the generator whose keys arrays of a dtype hold."""
    name: str = dtype._impl.name
    return name


jaxprs_in_params = _core.jaxprs_in_params
typeof = _core.typeof
pp_eqn_rules = _core.pp_eqn_rules
pp_var = _core.pp_var
pp_eqn = _core.pp_eqn
convert_constvars_jaxpr = _partial_eval.convert_constvars_jaxpr
dce_jaxpr = _partial_eval.dce_jaxpr

distributed_state = _distributed.global_state

# --- Abstract values and dtypes ---
AbstractValue = _core.AbstractValue
ShapedArray = _core.ShapedArray
DeviceMemorySpace = _core.MemorySpace
ExtendedDType = _dtypes.ExtendedDType
extended = _dtypes.extended
issubdtype = _dtypes.issubdtype
dtype_of = _dtypes.dtype
itemsize_bits = _dtypes.itemsize_bits
pytype_aval_mappings = _core.pytype_aval_mappings
NotSpecified = _api.NotSpecified

# --- References and their transforms ---
AbstractRef = _state_types.AbstractRef
BitcastTransform = _state_types.BitcastTransform
NDIndexer = _indexing.NDIndexer
Ref = _core.Ref
ReshapeTransform = _state_types.ReshapeTransform
Slice = _indexing.Slice
Transform = _state_types.Transform
TransformedRef = _state_types.TransformedRef
TransposeTransform = _state_types.TransposeTransform
transform_type = _state_types.transform_type
#: Which abstract reference (and initial value) ``pl.run_state`` makes of a Python object, by type.
ref_type_aval_mappings = _state_types._ref_type_aval_mappings
uninitialized = _state_types.uninitialized
undo_transforms = _pallas_core.undo_transforms

# --- Effects ---
AccumEffect = _state_types.AccumEffect
Effect = _effects.Effect
JaxprInputEffect = _effects.JaxprInputEffect
NamedAxisEffect = _core.NamedAxisEffect
ReadEffect = _state_types.ReadEffect
RefEffect = _state_types.RefEffect
WriteEffect = _state_types.WriteEffect
comms_effect = _pallas_core.comms_effect
get_concrete_mesh = _mesh.get_concrete_mesh
debug_effect = _debugging.debug_effect
ordered_debug_effect = _debugging.ordered_debug_effect
control_flow_allowed_effects = _effects.control_flow_allowed_effects
kernel_local_effects = _pallas_core.kernel_local_effects
lowerable_effects = _effects.lowerable_effects

# --- Primitives: references ---
addupdate_p = _state_primitives.addupdate_p
broadcast_to_p = _state_primitives.broadcast_to_p
get_p = _state_primitives.get_p
swap_p = _state_primitives.swap_p
run_state = _discharge.run_state
run_state_p = _discharge.run_state_p

# --- Primitives: Pallas ---
check_p = _checkify.check_p
debug_print_p = _debugging.debug_print_p
delay_p = _pallas_primitives.delay_p
get_global_p = _pallas_primitives.get_global_p
masked_load = _pallas_primitives.load
masked_load_p = _pallas_primitives.load_p
masked_store = _pallas_primitives.store
masked_swap = _pallas_primitives.swap
masked_swap_p = _pallas_primitives.swap_p
mpmd_map_p = _mpmd.mpmd_map_p
multiple_of_p = _pallas_primitives.multiple_of_p
num_programs_p = _pallas_primitives.num_programs_p
pallas_call_p = _pallas_call.pallas_call_p
program_id_p = _pallas_primitives.program_id_p
reciprocal_p = _pallas_primitives.reciprocal_p
run_scoped_p = _pallas_primitives.run_scoped_p
semaphore_read_p = _pallas_primitives.semaphore_read_p
semaphore_signal_p = _pallas_primitives.semaphore_signal_p
semaphore_wait_p = _pallas_primitives.semaphore_wait_p
DeviceIdType = _pallas_primitives.DeviceIdType
mpmd_map = _mpmd.mpmd_map

# --- Primitives: control flow and calls ---
axis_index_p = _parallel.axis_index_p
call_p = _core.call_p
call_hi_primitive_p = _checkify.call_hi_primitive_p
closed_call_p = _core.closed_call_p
cond_p = _conditionals.cond_p
platform_index_p = _conditionals.platform_index_p
custom_jvp_call_p = _custom_derivatives.custom_jvp_call_p
custom_vjp_call_p = _custom_derivatives.custom_vjp_call_p
custom_vmap_p = _custom_batching.custom_vmap_p
eval_jaxpr_p = _partial_eval.eval_jaxpr_p
jit_p = _pjit.jit_p
remat_p = _ad_checkpoint.remat_p
random_clone_p = _random.random_clone_p
iota_2x32_shape_p = _prng.iota_2x32_shape_p
random_unwrap_p = _prng.random_unwrap_p
random_wrap_p = _prng.random_wrap_p
scan_p = _loops.scan_p
while_p = _loops.while_p
threefry2x32 = functools.partial(_threefry2x32._threefry2x32_lowering, use_rolled_loops=False)
lax_primitives = _lax  # ``lax_primitives.add_p`` and so on

# --- Pallas core ---
BarrierSemaphore = _pallas_core.BarrierSemaphore
Blocked = _pallas_core.Blocked
BlockMapping = _pallas_core.BlockMapping
Buffered = _pallas_core.Buffered
Element = _pallas_core.Element
MemoryRef = _pallas_core.MemoryRef
PallasBlockSpec = _pallas_core.BlockSpec
PallasMemorySpace = _pallas_core.MemorySpace
PallasMesh = _pallas_core.Mesh
Semaphore = _pallas_core.Semaphore
Squeezed = _pallas_core.Squeezed
semaphore_dtype = _pallas_core.semaphore_dtype
current_grid_env = _pallas_core.current_grid_env
GridAxis = _pallas_core.GridAxis
grid_env = _pallas_core.grid_env
tracing_grid_env = _pallas_core.tracing_grid_env

# --- Pretty printing ---
pretty_printer = _pretty_printer

# --- Transformations: batching, discharge, lowering ---
primitive_batchers = _batching.primitive_batchers
fancy_primitive_batchers = _batching.fancy_primitive_batchers
primitive_jvps = _ad.primitive_jvps
DischargeContext = _discharge.DischargeContext
discharge_state = _discharge.discharge_state
discharged_aval = _discharge.discharged_aval
register_discharge_rule = _discharge.register_discharge_rule
register_neutral_memory_space = _discharge.register_neutral_memory_space
register_lowering = _mlir.register_lowering
lower_fun = _mlir.lower_fun


def default_lowering(primitive: Any) -> Callable[..., Any]:
    """JAX's lowering rule of a primitive for platforms that have none of their own."""
    rule: Callable[..., Any] = _mlir._lowerings[primitive].rule
    return rule


LoweringRuleContext = _mlir.LoweringRuleContext
prims_that_require_devices = _dispatch.prim_requires_devices_during_lowering
runtime_tokens = _dispatch.runtime_tokens


def callback_sharding(axis_context: Any, sharding: Any, avals_out: Sequence[Any]) -> Any:
    """How a host callback is sharded: once per device in ``jax.shard_map``, else on the first.

    Raises:
      UnsupportedError: only some axes of the mesh are those of ``jax.shard_map``.
    """
    try:
        return _callback._callback_op_sharding(axis_context, sharding, avals_out)
    except NotImplementedError as error:
        raise UnsupportedError(
            "a kernel runs on the host in a program that is sharded by hand over some axes only",
            got=f"axes {sorted(axis_context.manual_axes)} of {axis_context.mesh.axis_names}",
            expected="jax.shard_map over all axes of the mesh, or none",
        ) from error


set_trace_context(jax.make_user_context(()))
_generation = jax.make_user_context(0)


def forget_programs() -> None:
    """Makes JAX trace and compile again whatever it has in its caches."""
    _generation.set_global(_generation.get_global() + 1)


def mapped_result_axis() -> int | None:
    """Where the ``jax.vmap`` whose rule is running is told to put the dimension that it maps.

    Rules are not told. It is read off JAX's frames on the stack, and serves to choose among rules'
    results that ``jax.vmap`` transposes all the same; None if it is not one number for all results.
    """
    axis_data, frame = None, sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_qualname
        if axis_data is None and name == "BatchTrace.process_primitive":
            axis_data = frame.f_locals["self"].axis_data
        elif name == "vmap.<locals>.vmap_f" and frame.f_locals.get("axis_data") is axis_data:
            axes = set(jax.tree.leaves(frame.f_locals.get("out_axes")))
            return next(iter(axes)) if len(axes) == 1 and axes <= {*range(16)} else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


# --- Source locations ---
_NEUTRAL_PATHS = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (contextlib.__file__, np.__file__, jaxlib.__file__)
)
_PACKAGE_PATH = os.path.dirname(os.path.abspath(__file__)) + os.sep


is_user_filename = _source_info_util.is_user_filename


def hide_frames_of(path: str) -> None:
    """Makes a file or folder count as library code, so that locations name its caller."""
    _source_info_util.register_exclusion(path)


hide_frames_of(_PACKAGE_PATH)


def _hide_frames_of_plugins() -> None:
    """Lines of installed plugins are library code, too; none of them is imported for this."""
    packages = {point.module.partition(".")[0] for point in entry_points(group="pallasite.plugins")}
    for package in sorted(packages):
        spec = importlib.util.find_spec(package)
        for path in (spec.submodule_search_locations or (spec.origin,)) if spec else ():
            if path is not None:
                hide_frames_of(path)


_hide_frames_of_plugins()


def _location_of_frame(frame: Any) -> SourceLocation | None:
    if frame is None:
        return None
    function = frame.function_name.rpartition(".")[2]
    return SourceLocation(frame.file_name, frame.start_line, frame.start_column, function)


def user_location(source_info: Any) -> SourceLocation | None:
    """The user's innermost frame in ``equation.source_info``, or None when there is none."""
    if source_info is None:
        return None
    return _location_of_frame(_source_info_util.user_frame(source_info.traceback))


def current_user_location() -> SourceLocation | None:
    """The user's innermost frame on the current Python stack."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_generated = code.co_filename == "<string>" and code.co_name == "__init__"
        if not is_generated and is_user_filename(code.co_filename):
            return SourceLocation(code.co_filename, frame.f_lineno, 0, code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def users_line(own: SourceLocation | None) -> SourceLocation | None:
    """A kernel's line, or, if a library has made it, the program's, as far as it is known."""
    if own and is_user_filename(own.file):
        return own
    return user_location(current_source_info()) or current_user_location() or own


def raised_by_user(error: BaseException) -> bool:
    """Whether the user's own code raised an exception, not JAX or Pallasite.

    Frames of the standard library, NumPy and jaxlib belong to whoever called them.
    """
    frames = list(_frames_that_count(error))
    return bool(frames) and frames[-1][1]


def last_user_frame(error: BaseException) -> SourceLocation | None:
    """The user's last line in the traceback of an exception."""
    users = [location for location, is_user in _frames_that_count(error) if is_user]
    return users[-1] if users else None


def _frames_that_count(error: BaseException) -> Iterator[tuple[SourceLocation, bool]]:
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not code.co_filename.startswith(("<", *_NEUTRAL_PATHS)):
            location = SourceLocation(code.co_filename, line, 0, code.co_name)
            yield location, _source_info_util.is_user_filename(code.co_filename)


@contextlib.contextmanager
def whole_tracebacks() -> Iterator[None]:
    """Keeps JAX from removing its frames from the tracebacks of exceptions."""
    with _config.traceback_filtering("off"):
        yield


def current_source_info() -> Any:
    """Of what is lowered now, else of the current stack; :func:`traced_at` takes its traceback."""
    return _source_info_util.current()


@contextlib.contextmanager
def traced_at(stack: Any) -> Iterator[None]:
    """Gives the equations traced inside the location of a stack; None means their own again."""
    state = _source_info_util._source_info_context
    outer = state.context
    state.context = _source_info_util.SourceInfo(stack, outer.name_stack)
    try:
        yield
    finally:
        state.context = outer


def name_stack(source_info: Any) -> str:
    """The ``jax.named_scope`` names around an equation, joined by ``/``."""
    return str(source_info.name_stack)


def scope_names(source_info: Any) -> tuple[str, ...]:
    """The ``jax.named_scope`` names around an equation, outermost first, inside its own jaxpr."""
    stack = source_info.name_stack.stack
    return tuple(one.name for one in stack if isinstance(one, _source_info_util.Scope))


def api_boundary[Function: Callable[..., Any]](function: Function) -> Function:
    """Marks a public function, so that JAX may shorten tracebacks that pass through it."""
    marked: Function = _traceback_util.api_boundary(function)
    return marked


# --- Trees ---
def flatten_with_references(tree: Any) -> tuple[list[Any], Any]:
    """Flattens a tree in which a transformed reference is a node, not a leaf.

    The leaves of a transformed reference are the reference itself and the traced indices of its
    transforms; static parts go to the returned tree definition, which is hashable and has
    ``unflatten``.
    """
    leaves, tree_definition = _tree_util.tracing_registry.flatten(tree)
    return leaves, tree_definition


# --- Tracing ---
@contextlib.contextmanager
def extend_axis_env(axes: Sequence[tuple[Any, int]]) -> Iterator[None]:
    """Makes named axes known to ``lax.axis_index`` and ``lax.axis_size`` while tracing."""
    with _core.extend_axis_env_nd(axes):
        yield


def allow_ordered_effect(effect_type: type) -> None:
    """Permits an effect everywhere, in its order on each device."""
    for kind in ("lowerable", "ordered", "shardable_ordered", "control_flow_allowed"):
        getattr(_effects, f"{kind}_effects").add_type(effect_type)
    for kind in ("remat", "custom_derivatives"):
        getattr(_effects, f"{kind}_allowed_effects").add_type(effect_type)


def add_effects(primitive: Any, effects_of: Callable[[Mapping[str, Any]], set[Any]]) -> None:
    """Gives equations of a primitive further effects, by their parameters."""
    known = primitive.abstract_eval

    def abstract_eval(*avals: Any, **params: Any) -> Any:
        types, effects = known(*avals, **params)
        return types, effects | effects_of(params)

    primitive.def_effectful_abstract_eval(abstract_eval)


def platform_of_mesh() -> str | None:
    """Of the devices of the mesh around what is being traced, such as "gpu"; None if not known."""
    return getattr(_mesh.get_abstract_mesh().abstract_device, "platform", None)


def axis_size(name: Any) -> int:
    """The size of a named axis; raises NameError when it is unbound."""
    size: int = _core.get_axis_env().axis_size(name)
    return size


def axis_exists(name: Any) -> bool:
    """Whether a named axis is bound while tracing."""
    return bool(_core.get_axis_env().axis_exists(name))


@contextlib.contextmanager
def no_check_of_varying_axes() -> Iterator[None]:
    """Switches off the check of varying manual axes, which kernels do not take part in."""
    with _config._check_vma(False):
        yield


def varying_axes(aval: Any) -> frozenset[Any]:
    """The manual axes of the device mesh over which an array or a reference varies."""
    found: frozenset[Any] = getattr(aval, "inner_aval", aval).manual_axis_type.varying
    return found


def checked_manual_axes() -> frozenset[Any]:
    """The manual axes of the device mesh, where JAX checks which arrays vary over them."""
    return frozenset(_mesh.get_abstract_mesh().manual_axes if _config._check_vma.value else ())


def varying_over(aval: Any, axes: frozenset[Any]) -> Any:
    """An array type that varies over these manual axes, where JAX checks them."""
    if not _config._check_vma.value:
        return aval
    sharding = aval.sharding.update(mesh=_core.get_cur_mesh_sharding().mesh)
    return aval.update(sharding=sharding, manual_axis_type=_core.ManualAxisType(varying=axes))


@contextlib.contextmanager
def no_check_of_mutable_arrays() -> Iterator[None]:
    """Permits closing over references while tracing an inner function."""
    with _config.mutable_array_checks(False):
        yield


def make_debug_info(
    traced_for: str, function: Callable[..., Any], args: Sequence[Any], name: str | None = None
) -> Any:
    """Debug information for a trace: where the function is and what its arguments are called."""
    info = _api_util.debug_info(traced_for, function, tuple(args), {})
    return info if name is None else info.replace_func_name(name)


def trace_to_jaxpr(
    function: Callable[..., Any],
    in_avals: Sequence[Any],
    *,
    traced_for: str = "pallasite kernel",
    debug_info: Any = None,
) -> tuple[Any, Any]:
    """Traces ``function`` on flat abstract values.

    Returns the jaxpr, whose ``consts`` are the values that the function captured, and the tree
    definition of what it returned.
    """
    if debug_info is None:
        debug_info = make_debug_info(traced_for, function, in_avals)
    with no_check_of_mutable_arrays():
        jaxpr, outs = _partial_eval.trace_to_jaxpr_nocache(
            function, _flattree.flatten_args(*in_avals), debug_info
        )
    return jaxpr, outs.tree


def new_var(aval: Any) -> Any:
    """A fresh jaxpr variable."""
    return _core.Var(aval)


@contextlib.contextmanager
def location_of_equation(equation: Any) -> Iterator[None]:
    """Gives everything that is traced inside the location and name scopes of ``equation``."""
    stack = _source_info_util.current_name_stack() + equation.source_info.name_stack
    with _source_info_util.user_context(equation.source_info.traceback, name_stack=stack):
        yield


def convert_out_type(out_type: Any) -> Any:
    """The array type that an entry of ``out_type=`` stands for."""
    return _pallas_core._convert_out_shape_to_aval(out_type)


def strip_memory_space(aval: Any) -> Any:
    """An array type with the memory space that the outside world uses."""
    if isinstance(aval, ShapedArray) and not isinstance(aval.memory_space, DeviceMemorySpace):
        return aval.update(memory_space=DeviceMemorySpace.Device)
    return aval


def append_inputs(jaxpr: Any, variables: Sequence[Any]) -> Any:
    """The jaxpr with further inputs, which it does not use."""
    info = jaxpr.debug_info
    if info.arg_names is not None:
        info = info._replace(arg_names=(*info.arg_names, *("",) * len(variables)))
    return jaxpr.replace(invars=[*jaxpr.invars, *variables], debug_info=info)


def trace_context() -> Any:
    """A hashable summary of the settings that a trace depends on."""
    return (_config.trace_context(), _core.get_axis_env())


# What rules of debugging primitives need.
FailedCheckError = _checkify.FailedCheckError
debug_checks_enabled = _pallas_core.debug_checks_enabled
merge_callback_args = _debugging.merge_callback_args

# More primitives for the built-in rules.
RoundingMethod = _lax.RoundingMethod
finfo = _dtypes.finfo
erf_p = _special.erf_p
erfc_p = _special.erfc_p
erf_inv_p = _special.erf_inv_p
slice_p = jax.lax.slice_p


def input_of_effect(effect: Any) -> Any:
    """The variable that an effect of a jaxpr is about; None if it is not about one."""
    return effect.input if isinstance(effect, _effects.JaxprInputEffect) else None


def new_equation(primitive: Any, params: Any, effects: Any, source_info: Any) -> Any:
    """An equation of a primitive without operands and results."""
    return _core.new_jaxpr_eqn([], [], primitive, params, effects, source_info)


def scan_operand_counts(params: Any) -> tuple[int, int, int]:
    """How many operands of a ``scan`` equation are constants, carried values and scanned arrays."""
    consts, carry, scanned = params["ft_in"].unpack()
    return len(consts), len(carry), len(scanned)


# --- Rules of primitives ---
def abstract_eval[Function: Callable[..., Any]](primitive: Any) -> Callable[[Function], Function]:
    """A decorator for the rule that gives a primitive's result types and effects, as a pair."""

    def register(function: Function) -> Function:
        primitive.def_effectful_abstract_eval(function)
        return function

    return register


def discharge_rule[Function: Callable[..., Any]](primitive: Any) -> Callable[[Function], Function]:
    """A decorator for the rule that replaces references of a primitive's operands by values."""

    def register(function: Function) -> Function:
        _discharge.register_discharge_rule(primitive)(function)
        return function

    return register


# --- The values of the reference backend, for inlined code ---
_MOSAIC_GPU = "jax.experimental.mosaic.gpu"


def mosaic_gpu() -> Any:
    """The module ``jax.experimental.mosaic.gpu``, which is imported when code first needs it.

    Raises:
      UnsupportedError: this JAX has none, or what it needs is not installed.
    """
    try:
        return importlib.import_module(_MOSAIC_GPU)
    except ImportError as error:
        raise UnsupportedError(
            f"{_MOSAIC_GPU} cannot be imported: {error}",
            hint='inline_mgpu(..., values="pallasite") does without it',
        ) from error


def fragmented_array(registers: Any, layout: Any, is_signed: bool | None) -> Any:
    """A ``FragmentedArray`` of registers that are there already."""
    return mosaic_gpu().FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def tiled_layout(
    tiles: Any, warp_dims: tuple[Any, ...], lane_dims: tuple[Any, ...], vector_dim: int
) -> Any:
    """A ``TiledLayout``, in the form that makes equal layouts compare equal."""
    mosaic = mosaic_gpu()
    layout = mosaic.TiledLayout(
        mosaic.fragmented_array.Tiling(tiles),
        warp_dims,
        lane_dims,
        vector_dim,
        _check_canonical=False,
    )
    return layout.canonicalize()


def replicated(times: int) -> Any:
    """A dimension of a ``TiledLayout`` along which so many lanes or warps hold the same."""
    return mosaic_gpu().fragmented_array.Replicated(times)


def imported_mosaic_gpu() -> Any:
    """The same if it has been imported, else None."""
    return sys.modules.get(_MOSAIC_GPU)


stop_gradient_p = _ad_util.stop_gradient_p
reshard_p = _pjit.reshard_p
