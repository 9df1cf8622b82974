"""``pl.pallas_call``: makes a :class:`KernelSpec` of a traced Pallas kernel and its block specs.

Parallel axes of the grid become the grid of blocks; sequential axes become a software pipeline.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from pallasite.plugin import InvalidValueError, SourceLocation, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import (
    GMEM,
    CompilerParams,
    KernelSpec,
    Mesh,
    as_transformed,
    is_of_keys,
    trace_kernel,
)
from pallasite_std.pipelines.block_spec import BlockSpec, PipelinedBlockMapping
from pallasite_std.pipelines.pipeline import emit_pipeline
from pallasite_std.rewriting import evaluate


class GridAxisName:
    """The name of a grid axis that the user did not name."""

    def __init__(self, position: int):
        self.position = position

    def __repr__(self) -> str:
        return f"axis{self.position}"


class Scratch:
    """An allocation given by its reference type."""

    def __init__(self, aval: Any):
        self.aval = aval

    def get_ref_aval(self) -> Any:
        return self.aval


def source_location(jaxpr: Any) -> SourceLocation | None:
    """Where the kernel function is defined, from ``name at file:line``."""
    info = getattr(jaxpr.debug_info, "func_src_info", None) or ""
    name, _, place = info.partition(" at ")
    file, _, line = place.rpartition(":")
    return SourceLocation(file, int(line), 0, name) if file and line.isdigit() else None


def _check_block(mapping: Any, location: SourceLocation | None) -> None:
    def details() -> str:
        return (
            f"block shape {tuple(map(str, mapping.block_shape))} of an array of shape "
            f"{mapping.array_aval.shape}, "
            f"memory space {mapping.transformed_block_aval.memory_space}, "
            f"index map {mapping.index_map_jaxpr}"
        )

    extents = zip(mapping.block_shape, mapping.array_aval.shape, strict=True)
    if _in_global_memory(mapping) and not all(_is_in_place(*pair) for pair in extents):
        raise UnsupportedError(
            f"the block spec of {mapping.origin} cuts an array in global memory into blocks",
            got=details(),
            expected="extents that are those of the array, or None",
            hint="leave the block shape out and take the window inside the kernel: ref.at[...]",
            location=location,
        )
    for dim in mapping.block_shape:
        padded = isinstance(dim, pl.Element) and tuple(dim.padding) != (0, 0)
        if padded or not isinstance(dim, int | pl.Blocked | pl.Squeezed | pl.Element | None):
            raise UnsupportedError(
                f"the block spec of {mapping.origin} has a dimension {dim!r}",
                got=details(),
                expected="an integer, None, pl.Squeezed, pl.Blocked or pl.Element without padding",
                location=location,
            )
    if mapping.pipeline_mode is not None:
        raise UnsupportedError(
            f"pipeline_mode= is not supported, which the block spec of {mapping.origin} has",
            got=details(),
            hint="use CompilerParams(max_concurrent_steps=...)",
            location=location,
        )


def _in_global_memory(mapping: Any) -> bool:
    """Whether the kernel gets a block where it is, in global memory."""
    space = mapping.transformed_block_aval.memory_space
    return space in (GMEM, _jax.PallasMemorySpace.ANY)


def _is_in_place(dim: Any, extent: int) -> bool:
    """Whether a block has one or all of the places along a dimension."""
    return _is_squeezed(dim) or getattr(dim, "block_size", dim) == extent


def _is_squeezed(dim: Any) -> bool:
    return dim is None or isinstance(dim, pl.Squeezed)


def check_no_captured(captured: Sequence[Any], location: SourceLocation | None) -> None:
    """Raises UnsupportedError if the functions that a kernel calls hold arrays."""
    if captured:
        raise UnsupportedError(
            "the kernel calls a jitted function that captures an array",
            got=", ".join(_jax.typeof(one).str_short() for one in captured),
            hint="pass the array as an operand of the kernel",
            location=location,
        )


def _check_grid(grid_mapping: Any, location: SourceLocation | None) -> None:
    if grid_mapping.num_dynamic_grid_bounds:
        raise UnsupportedError(
            "pallas_call with a grid whose size is not known while compiling",
            expected="a grid of Python integers",
            location=location,
        )


def _is_parallel(
    grid_mapping: Any, params: CompilerParams, location: SourceLocation | None
) -> list[bool]:
    """For each axis of the grid; axes that ``jax.vmap`` added are parallel."""
    batched = set(grid_mapping.vmapped_dims)
    own_axes = len(grid_mapping.grid) - len(batched)
    semantics = params.dimension_semantics or ("parallel",) * own_axes
    if len(semantics) != own_axes:
        raise InvalidValueError(
            f"dimension_semantics has {len(semantics)} entries for a grid of {own_axes} axes",
            got=f"dimension_semantics={semantics}, grid={tuple(grid_mapping.grid)}",
            expected="one entry for each axis",
            location=location,
        )
    remaining = iter(semantics)
    return [
        axis in batched or next(remaining) == "parallel" for axis in range(len(grid_mapping.grid))
    ]


def pallas_call_spec(
    jaxpr: Any,
    grid_mapping: Any,
    params: CompilerParams | None = None,
    *,
    name: str | None = None,
    input_output_aliases: Sequence[tuple[int, int]] = (),
    debug: bool = False,
) -> KernelSpec:
    """The kernel that a ``pl.pallas_call`` equation stands for.

    Args:
      jaxpr: the kernel; its inputs are references to scalar prefetch operands (which index maps
        read too), to the blocks of inputs and outputs, then the scratch references.
      grid_mapping: the grid and the block mappings.
      params: compiler parameters.
      name: the kernel's name; that of its function if None.
      input_output_aliases: pairs (input, output).
      debug: prints the resulting jaxpr.

    Raises:
      UnsupportedError, InvalidValueError: with the location of the kernel function, for block
        specs, grids and captured values that cannot be handled.
    """
    params = params or CompilerParams()
    location = source_location(jaxpr)
    _check_grid(grid_mapping, location)
    mappings = grid_mapping.block_mappings
    for mapping in mappings:
        _check_block(mapping, location)
    if jaxpr.consts:
        raise UnsupportedError(
            "the kernel function of a pallas_call captures references", location=location
        )
    parallel = _is_parallel(grid_mapping, params, location)
    grid = tuple(grid_mapping.grid)
    names = grid_mapping.grid_names or tuple(GridAxisName(i) for i in range(len(grid)))
    names = tuple(GridAxisName(i) if name is None else name for i, name in enumerate(names))
    parallel_axes = [axis for axis in range(len(grid)) if parallel[axis]]
    sequential_axes = [axis for axis in range(len(grid)) if not parallel[axis]]
    # What the kernel calls axis i is the i-th axis that jax.vmap did not add.
    own_axes = [axis for axis in range(len(grid)) if axis not in set(grid_mapping.vmapped_dims)]
    mesh = Mesh(
        grid=tuple(grid[axis] for axis in parallel_axes),
        grid_names=tuple(names[axis] for axis in parallel_axes),
        kernel_name=name,
    )
    num_inputs = grid_mapping.num_inputs
    prefetched = grid_mapping.num_index_operands
    scratch = [var.aval for var in jaxpr.invars[prefetched + len(mappings) :]]

    def positions(sequential: Sequence[Any]) -> list[Any]:
        """The program's position in the whole grid, given that in its sequential axes."""
        result: list[Any] = [None] * len(grid)
        for axis, index in zip(sequential_axes, sequential, strict=True):
            result[axis] = index
        for rank, axis in enumerate(parallel_axes):
            result[axis] = lax.axis_index(mesh.grid_names[rank])
        return result

    def block_spec(mapping: Any, tables: Sequence[Any]) -> BlockSpec:
        if is_of_keys(mapping.array_aval) or _in_global_memory(mapping):
            return BlockSpec(memory_space=GMEM)

        def index_map(*sequential: Any) -> tuple[Any, ...]:
            arguments = [*positions(sequential), *tables]
            return tuple(evaluate(mapping.index_map_jaxpr, arguments, purpose="pallas_call"))

        return BlockSpec(
            mapping.block_shape,
            index_map,
            memory_space=mapping.transformed_block_aval.memory_space,
            transforms=tuple(mapping.transforms),
            **_own_fields(mapping),
        )

    def run(every_ref: Sequence[Any], *scratch_refs: Any) -> None:
        # Scalars stay where they are: all threads read them through the cache.
        tables, gmem_refs = every_ref[:prefetched], every_ref[prefetched:]

        def step(sequential: Sequence[Any], *refs: Any) -> None:
            whole = positions(sequential)
            views = [
                _block_in_place(ref, mapping, [*whole, *tables])
                if is_of_keys(mapping.array_aval) or _in_global_memory(mapping)
                else _physical_view(ref)
                for ref, mapping in zip(refs, mappings, strict=True)
            ]
            evaluate(
                jaxpr,
                [*tables, *views, *scratch_refs],
                program_id=lambda axis: whole[own_axes[axis]],
                axis_index={names[axis]: whole[axis] for axis in sequential_axes},
                purpose="pallas_call",
            )

        emit_pipeline(
            step,
            grid=[grid[axis] for axis in sequential_axes],
            in_specs=[block_spec(mapping, tables) for mapping in mappings[:num_inputs]],
            out_specs=[block_spec(mapping, tables) for mapping in mappings[num_inputs:]],
            max_concurrent_steps=params.max_concurrent_steps,
        )(*gmem_refs)

    def body(*gmem_refs: Any) -> None:
        if scratch:
            pl.run_scoped(functools.partial(run, gmem_refs), *map(Scratch, scratch))
        else:
            run(gmem_refs)

    avals = [mapping.array_aval for mapping in mappings]
    tables = [
        _jax.ShapedArray(variable.aval.shape, variable.aval.dtype)
        for variable in jaxpr.invars[:prefetched]
    ]
    spec, captured = trace_kernel(
        body,
        [*tables, *avals[:num_inputs]],
        [_jax.ShapedArray(aval.shape, aval.dtype) for aval in avals[num_inputs:]],
        name=name or jaxpr.debug_info.func_name,
        mesh=mesh,
        params=params,
        input_output_aliases=tuple(input_output_aliases),
        location=location,
        debug=debug,
    )
    check_no_captured(captured, location)
    if debug:
        print(f"{spec.name}:\n{spec.jaxpr}")
    return spec


def _own_fields(mapping: Any) -> dict[str, Any]:
    """What our BlockSpec says beyond that of Pallas."""
    if not isinstance(mapping, PipelinedBlockMapping):
        return {}
    return {"delay_release": mapping.delay_release, "oob_fill_mode": mapping.oob_fill_mode}


def _block_in_place(ref: Any, mapping: Any, arguments: Sequence[Any]) -> Any:
    """A block that is read where it is: in global memory, or of random keys, of which there are a
    few words, which no copy moves."""
    if mapping.has_trivial_window() and not any(map(_is_squeezed, mapping.block_shape)):
        return ref
    places = evaluate(mapping.index_map_jaxpr, arguments, purpose="pallas_call")
    window: list[Any] = []
    for place, dim in zip(places, mapping.block_shape, strict=True):
        if _is_squeezed(dim):
            window.append(place)
        elif isinstance(dim, pl.Element):
            window.append(pl.ds(place, dim.block_size))
        else:
            size = dim.block_size if isinstance(dim, pl.Blocked) else dim
            window.append(pl.ds(place * size, size))
    return ref.at[tuple(window)]


def _physical_view(ref: Any) -> Any:
    """The slot that ``ref`` (what the body of a pipeline gets) selects, in its physical layout.

    That is the reference on which the inverse transforms of the block spec are still to come.
    """
    base = as_transformed(ref)
    slots = [t for t in base.transforms if isinstance(t, _jax.NDIndexer)]
    if not slots:
        return base.ref
    if len(base.transforms) == 1:
        return base  # There are no transforms to invert, and perhaps less than the whole slot.
    shape = tuple(_jax.typeof(base.ref).shape)
    indices = (slots[-1].indices[0], *(slice(None) for _ in shape[1:]))
    return _jax.TransformedRef(base.ref, (_jax.NDIndexer.from_indices_shape(indices, shape),))
