"""``emit_pipeline``: a loop over blocks whose copies overlap with its computation.

Inputs come through a ring of slots in shared memory, filled ``max_concurrent_steps`` steps ahead by
TMA copies, each slot with a barrier. An output is kept in its slot for as long as its block index
stays the same, and is stored when the index changes and after the last step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import _jax
from pallasite.language import checks
from pallasite.language.memory import GMEM, SMEM, Barrier, memory_space_of
from pallasite.language.params import BlockSpec
from pallasite.language.primitives.barriers import barrier_wait, commit_smem
from pallasite.language.primitives.copies import (
    commit_smem_to_gmem_group,
    copy_gmem_to_smem,
    copy_smem_to_gmem,
    wait_smem_to_gmem,
)
from pallasite.language.transforms import as_transformed, batch_transform


# --- Block specifications ---
@dataclasses.dataclass(frozen=True)
class _Block:
    """One operand of a pipeline: its block specification, made explicit.

    Attributes:
      dims: for each dimension of the array (kind, size): "block", "element" or "squeezed".
      index_map: block indices of a step, None for an operand that is not cut into blocks.
      in_smem: whether the body gets it in shared memory.
      varies: whether the block index depends on the step at all.
      always_changes: whether it is known to differ between any two consecutive steps.
    """

    what: str
    spec: BlockSpec
    dims: tuple[tuple[str, int], ...]
    index_map: Callable[..., tuple[Any, ...]]
    in_smem: bool
    varies: bool
    always_changes: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for kind, size in self.dims if kind != "squeezed")

    def window(self, gmem_ref: Any, indices: Sequence[Any]) -> Any:
        """The view of the array that is this step's block. It may leave the array."""
        parts: list[Any] = []
        for (kind, size), index in zip(self.dims, self.index_map(*indices), strict=True):
            if kind == "squeezed":
                parts.append(_int32(index))
            elif kind == "element":
                parts.append(_jax.Slice(index, size))
            elif checks.is_integer(index):
                parts.append(_jax.Slice(int(index) * size, size))
            else:
                parts.append(_jax.Slice(_int32(index) * jnp.int32(size), size))
        base = as_transformed(gmem_ref, self.what)
        indexer = _jax.NDIndexer(tuple(parts), tuple(base.shape), ())
        return _jax.TransformedRef(base.ref, (*base.transforms, indexer))


def _int32(value: Any) -> Any:
    return jnp.asarray(value, jnp.int32)


def _dimension(dim: Any, what: str) -> tuple[str, int]:
    match dim:
        case None | pl.Squeezed():
            return "squeezed", 1
        case int():
            return "block", dim
        case pl.Blocked():
            return "block", dim.block_size
        case pl.Element():
            if tuple(dim.padding) != (0, 0):
                raise checks.unsupported(
                    f"{what} has a padded dimension", got=dim, expected="pl.Element without padding"
                )
            return "element", dim.block_size
        case _:
            raise checks.unsupported(
                f"{what} has a block dimension that a pipeline cannot copy",
                got=repr(dim),
                expected="an integer, None, pl.Squeezed, pl.Blocked or pl.Element",
            )


def _own_spec(spec: Any, what: str) -> BlockSpec:
    if not isinstance(spec, pl.BlockSpec):
        raise checks.type_error(f"{what} has no block spec", got=spec, expected="a BlockSpec")
    if spec.pipeline_mode is not None:
        raise checks.unsupported(
            f"the block spec of {what} has a pipeline_mode",
            got=spec.pipeline_mode,
            hint="use max_concurrent_steps= for all operands together",
        )
    if isinstance(spec, BlockSpec):
        if spec.collective_axes:
            raise checks.unsupported(
                f"the block spec of {what} has collective_axes={spec.collective_axes}",
                hint="issue the collective copies by hand, or in a warp-specialized pipeline",
            )
        return spec
    return BlockSpec(spec.block_shape, spec.index_map, memory_space=spec.memory_space)


def _in_smem(space: Any, what: str) -> bool:
    if space in (None, SMEM, _jax.PallasMemorySpace.DEFAULT):
        return True
    if space in (GMEM, _jax.PallasMemorySpace.ANY):
        return False
    raise checks.value_error(
        f"a pipeline cannot put {what} into {space}",
        expected="memory_space SMEM (the default) or GMEM",
    )


def _block(spec: Any, array_shape: tuple[int, ...], grid: _Grid, what: str) -> _Block:
    spec = _own_spec(spec, what)
    in_smem = _in_smem(spec.memory_space, what)
    if spec.block_shape is None:
        dims: tuple[tuple[str, int], ...] = tuple(("block", size) for size in array_shape)
    else:
        dims = tuple(_dimension(dim, what) for dim in spec.block_shape)
    if len(dims) != len(array_shape):
        raise checks.value_error(
            f"the block shape of {what} does not have the rank of the array",
            got=f"block shape {tuple(spec.block_shape)}, array shape {array_shape}",
        )
    rank = len(dims)
    given = spec.index_map if spec.block_shape is not None else None

    def index_map(*indices: Any) -> tuple[Any, ...]:
        if given is None:
            return (0,) * rank
        result = given(*indices)
        result = tuple(result) if isinstance(result, tuple | list) else (result,)
        if len(result) != rank:
            raise checks.value_error(
                f"the index map of {what} returns {len(result)} indices",
                expected=f"{rank}, one for each dimension of the array",
            )
        return result

    varies, always_changes = grid.analyse(index_map) if in_smem else (False, False)
    return _Block(what, spec, dims, index_map, in_smem, varies, always_changes)


# --- Walking through the grid ---
class _Grid:
    """The steps of a pipeline: positions in a grid, in row-major order."""

    def __init__(self, sizes: Sequence[Any]):
        self.static = all(checks.is_integer(size) for size in sizes)
        for position, size in enumerate(sizes):
            if checks.is_integer(size) and size < 1:
                raise checks.value_error(
                    f"grid[{position}] of a pipeline is not positive", got=tuple(sizes)
                )
        self.sizes = tuple(int(s) if checks.is_integer(s) else _int32(s) for s in sizes)
        self.num_steps: Any = math.prod(self.sizes) if self.static else _product(self.sizes)
        # Dimensions along which steps move.
        self.moving = [i for i, size in enumerate(self.sizes) if not _is_one(size)]

    def analyse(self, index_map: Callable[..., tuple[Any, ...]]) -> tuple[bool, bool]:
        """Whether block indices depend on the step, and whether every step changes them."""
        scalar = _jax.ShapedArray((), jnp.int32)
        jaxpr, _ = _jax.trace_to_jaxpr(
            index_map, [scalar] * len(self.sizes), traced_for="index map"
        )
        for var in jaxpr.outvars:
            aval = var.aval
            if aval.shape != () or aval.dtype.kind not in "iu":
                raise checks.type_error(
                    "an index map returns something that is not an integer scalar", got=aval
                )
        _, used = _jax.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        used = used[len(used) - len(self.sizes) :] if self.sizes else []
        varies = any(used[i] for i in self.moving)
        # The innermost dimension moves at every step; if its size is unknown it may be 1, and then
        # the next one does.
        always = False
        for dim in reversed(self.moving):
            if not any(jaxpr.invars[dim] is var for var in jaxpr.outvars):
                break
            if isinstance(self.sizes[dim], int):
                always = True
                break
        return varies, always

    def start(self, ahead: int) -> tuple[Any, ...]:
        """What to carry along to know the position ``ahead`` steps ahead; begins at step 0."""
        if len(self.moving) <= 1:
            return ()
        position: tuple[Any, ...] = tuple(jnp.int32(0) for _ in self.sizes)
        if self.static:
            digits = []
            for size in reversed(self.sizes):
                digits.append(jnp.int32(ahead % size))
                ahead //= size
            return tuple(digits[::-1])
        for _ in range(ahead):
            position = self.advance(position)
        return position

    def advance(self, carried: tuple[Any, ...]) -> tuple[Any, ...]:
        """What to carry along after one more step."""
        if not carried:
            return ()
        result = list(carried)
        carry: Any = True
        for dim in reversed(self.moving):
            index = carried[dim]
            moved = index + 1 if carry is True else lax.select(carry, index + 1, index)
            wraps = moved == jnp.int32(self.sizes[dim])
            result[dim] = lax.select(wraps, jnp.int32(0), moved)
            carry = wraps
        return tuple(result)

    def position(self, step: Any, ahead: int, carried: tuple[Any, ...]) -> tuple[Any, ...]:
        """The position ``ahead`` steps after ``step``; int32 scalars."""
        if carried:
            return carried
        result = [jnp.int32(0) for _ in self.sizes]
        for dim in self.moving:
            result[dim] = _int32(step) + jnp.int32(ahead) if ahead else _int32(step)
        return tuple(result)


def _is_one(size: Any) -> bool:
    return checks.is_integer(size) and size == 1


def _product(sizes: Sequence[Any]) -> Any:
    return functools.reduce(lambda a, b: a * b, (_int32(size) for size in sizes))


# --- Buffers ---
@dataclasses.dataclass(frozen=True)
class _Buffer:
    """One operand with its place in shared memory.

    With one slot the allocation has the shape of the block, otherwise a leading dimension.
    """

    block: _Block
    gmem_ref: Any
    smem_ref: Any
    num_slots: int

    def slot(self, slot: Any) -> Any:
        """The reference that holds the block of one slot."""
        if not self.block.in_smem:
            return self.gmem_ref
        return self.smem_ref if self.num_slots == 1 else self.smem_ref.at[slot]

    def copy_in(self, slot: Any, indices: Sequence[Any], barrier: Any) -> None:
        copy_gmem_to_smem(
            self.block.window(self.gmem_ref, indices),
            self.slot(slot),
            barrier,
            oob_mode=self.block.spec.oob_fill_mode,
        )

    def copy_out(self, slot: Any, indices: Sequence[Any], predicate: Any = None) -> None:
        copy_smem_to_gmem(
            self.slot(slot),
            self.block.window(self.gmem_ref, indices),
            predicate=predicate,
            commit_group=False,
        )


def physical_view(ref: Any) -> Any:
    """The slot that ``ref`` (what the body of a pipeline gets) selects, in its physical layout.

    That is the reference on which the inverse transforms of the block spec are still to come.
    """
    base = as_transformed(ref)
    slots = [t for t in base.transforms if isinstance(t, _jax.NDIndexer)]
    if not slots:
        return base.ref
    shape = tuple(_jax.typeof(base.ref).shape)
    indices = (slots[-1].indices[0], *(slice(None) for _ in shape[1:]))
    return _jax.TransformedRef(base.ref, (_jax.NDIndexer.from_indices_shape(indices, shape),))


def _allocation(block: _Block, gmem_ref: Any, num_slots: int) -> Any:
    if not block.in_smem:
        return None
    leading = () if num_slots == 1 else (num_slots,)
    transforms = tuple(batch_transform(t, len(leading)) for t in block.spec.transforms)
    return SMEM((*leading, *block.shape), gmem_ref.dtype, transforms=transforms)


# --- The pipeline ---
def emit_pipeline(
    body: Callable[..., Any],
    *,
    grid: Sequence[Any],
    in_specs: Sequence[Any] = (),
    out_specs: Sequence[Any] = (),
    max_concurrent_steps: int = 1,
    init_carry: Any = None,
) -> Callable[..., Any]:
    """Makes a function that runs ``body`` over a grid of blocks.

    Args:
      body: called as ``body(indices, *input_refs, *output_refs)`` with the position in the grid and
        references to the blocks in shared memory; with ``init_carry`` it also gets the carry as the
        last argument and returns the next one. An output block keeps its contents over consecutive
        steps with the same block index, so it can be accumulated into; it is not read from global
        memory first.
      grid: sizes; integers or integer scalars. The last dimension moves fastest.
      in_specs, out_specs: one BlockSpec per operand. Dimensions may be None (or ``pl.Squeezed``),
        or ``pl.Element``. With ``memory_space=GMEM`` the body gets the whole array as it is. Blocks
        may leave the array: there inputs are filled with zeros, and outputs are dropped.
      max_concurrent_steps: how many steps are in flight; so many slots each operand gets.
      init_carry: the first value that is carried from step to step.

    A spec's ``delay_release`` keeps its blocks untouched for that many further steps; it must be
    below ``max_concurrent_steps``.

    Returns:
      A function of the GMEM references of inputs and outputs that runs the pipeline, and returns
      the last carry if there is one.

    Raises:
      InvalidValueError, InvalidTypeError, UnsupportedError: for specs that cannot be copied.
    """
    grid = tuple(grid)
    in_specs, out_specs = tuple(in_specs), tuple(out_specs)
    checks.count(max_concurrent_steps, "max_concurrent_steps", minimum=1)
    delays = [getattr(spec, "delay_release", 0) for spec in in_specs]
    if delays and max(delays) >= max_concurrent_steps:
        raise checks.value_error(
            "delay_release is not below max_concurrent_steps",
            got=f"delay_release={max(delays)}, max_concurrent_steps={max_concurrent_steps}",
            hint=f"max_concurrent_steps={max(delays) + 1} or more",
        )
    _Grid(grid)  # For its errors.

    def pipeline(*gmem_refs: Any) -> Any:
        if len(gmem_refs) != len(in_specs) + len(out_specs):
            raise checks.type_error(
                f"a pipeline of {len(in_specs)} inputs and {len(out_specs)} outputs got "
                f"{len(gmem_refs)} references"
            )
        steps = _Grid(grid)
        depth = max_concurrent_steps
        if steps.static:
            depth = min(depth, steps.num_steps)
        names = [f"input {i}" for i in range(len(in_specs))]
        names += [f"output {i}" for i in range(len(out_specs))]
        blocks, slots = [], []
        for spec, ref, name in zip((*in_specs, *out_specs), gmem_refs, names, strict=True):
            base = as_transformed(ref, name)
            if memory_space_of(_jax.typeof(base.ref)) is not GMEM:
                raise checks.value_error(
                    f"{name} of a pipeline is not in global memory", got=_jax.typeof(base.ref)
                )
            block = _block(spec, tuple(base.shape), steps, name)
            blocks.append(block)
            slots.append(depth if block.varies else 1)
        num_inputs = len(in_specs)
        streamed = sum(b.in_smem and b.varies for b in blocks[:num_inputs])
        constant = sum(b.in_smem and not b.varies for b in blocks[:num_inputs])

        def run(smem_refs: Any, stream_barrier: Any, constant_barrier: Any) -> Any:
            parts = zip(blocks, gmem_refs, smem_refs, slots, strict=True)
            buffers = [_Buffer(*part) for part in parts]
            loop = _Loop(
                body,
                steps,
                depth,
                buffers[:num_inputs],
                buffers[num_inputs:],
                stream_barrier,
                constant_barrier,
                init_carry,
            )
            return loop.run()

        return pl.run_scoped(
            run,
            smem_refs=[
                _allocation(block, ref, n)
                for block, ref, n in zip(blocks, gmem_refs, slots, strict=True)
            ],
            stream_barrier=Barrier(num_arrivals=streamed, num_barriers=() if depth == 1 else depth)
            if streamed
            else None,
            constant_barrier=Barrier(num_arrivals=constant) if constant else None,
        )

    return pipeline


class _Loop:
    """One run of a pipeline, inside the scope of its allocations."""

    def __init__(
        self,
        body: Callable[..., Any],
        steps: _Grid,
        depth: int,
        inputs: Sequence[_Buffer],
        outputs: Sequence[_Buffer],
        stream_barrier: Any,
        constant_barrier: Any,
        init_carry: Any,
    ):
        self.body = body
        self.steps = steps
        self.depth = depth
        self.inputs, self.outputs = inputs, outputs
        self.streamed = [b for b in inputs if b.block.in_smem and b.block.varies]
        self.constant = [b for b in inputs if b.block.in_smem and not b.block.varies]
        self.stored = [b for b in outputs if b.block.in_smem and b.block.varies]
        self.stored_once = [b for b in outputs if b.block.in_smem and not b.block.varies]
        # Outputs whose slot moves on only when the block index changes.
        self.held = [b for b in self.stored if not b.block.always_changes]
        self.stream_barrier = stream_barrier
        self.constant_barrier = constant_barrier
        self.init_carry = init_carry
        self.delays = sorted({b.block.spec.delay_release for b in self.streamed})

    def run(self) -> Any:
        steps = self.steps
        first = steps.position(jnp.int32(0), 0, steps.start(0))
        for buffer in self.constant:
            buffer.copy_in(0, first, self.constant_barrier)
        self.prologue()
        if self.constant:
            barrier_wait(self.constant_barrier)
        carry = (
            steps.start(0),
            [steps.start(self.depth - delay) for delay in self.delays],
            [jnp.int32(0) for _ in self.held],
            self.init_carry,
        )
        if steps.static and steps.num_steps == 1:
            carry = self.step(jnp.int32(0), carry)
        else:
            carry = lax.fori_loop(0, steps.num_steps, self.step, carry)
        self.epilogue(first)
        return carry[-1]

    def barrier(self, slot: Any) -> Any:
        return self.stream_barrier if self.depth == 1 else self.stream_barrier.at[slot]

    def fetch(self, buffers: Sequence[_Buffer], slot: Any, position: Sequence[Any]) -> None:
        for buffer in buffers:
            buffer.copy_in(slot, position, self.barrier(slot))

    def prologue(self) -> None:
        """Fills the slots for the first steps."""
        if not self.streamed:
            return
        for step in range(self.depth):
            position = self.steps.position(jnp.int32(0), step, self.steps.start(step))
            fetch = functools.partial(self.fetch, self.streamed, step, position)
            if self.steps.static:
                fetch()
            else:
                lax.cond(jnp.int32(step) < self.steps.num_steps, fetch, lambda: None)

    def step(self, step: Any, carry: Any) -> Any:
        step = _int32(step)
        carried, fetch_carried, held_slots, user_carry = carry
        steps, depth = self.steps, self.depth
        slot = jnp.int32(0) if depth == 1 else lax.rem(step, jnp.int32(depth))
        position = steps.position(step, 0, carried)
        if self.streamed:
            barrier_wait(self.barrier(slot))
        every_step = len(self.stored) > len(self.held)
        if every_step:
            wait_smem_to_gmem(depth - 1, wait_read_only=True)
        slots_of_held = dict(zip(map(id, self.held), held_slots, strict=True))
        refs = [
            buffer.slot(slots_of_held.get(id(buffer), slot))
            for buffer in (*self.inputs, *self.outputs)
        ]
        extra = () if self.init_carry is None else (user_carry,)
        user_carry = self.body(position, *refs, *extra)
        if self.init_carry is None:
            user_carry = None
        next_carried = steps.advance(carried)
        if self.stored:
            next_position = steps.position(step, 1, next_carried)
            held_slots = self.store(step, slot, position, next_position, held_slots, every_step)
        self.fetch_ahead(step, fetch_carried)
        return (
            next_carried,
            [steps.advance(c) for c in fetch_carried],
            held_slots,
            user_carry,
        )

    def store(
        self,
        step: Any,
        slot: Any,
        position: Sequence[Any],
        next_position: Sequence[Any],
        held_slots: Sequence[Any],
        every_step: bool,
    ) -> list[Any]:
        """Starts the copies of output blocks that are complete; returns the slots of held ones."""
        is_last = step == _int32(self.steps.num_steps) - 1
        done = [
            lax.bitwise_or(is_last, _differ(buffer.block, position, next_position))
            for buffer in self.held
        ]

        def start() -> None:
            commit_smem()
            held = iter(zip(held_slots, done, strict=True))
            for buffer in self.stored:
                if buffer.block.always_changes:
                    buffer.copy_out(slot, position)
                else:
                    held_slot, is_done = next(held)
                    predicate = is_done if every_step or len(self.held) > 1 else None
                    buffer.copy_out(held_slot, position, predicate)
            commit_smem_to_gmem_group()
            if not every_step:
                wait_smem_to_gmem(self.depth - 1, wait_read_only=True)

        if every_step:
            start()
        else:
            lax.cond(functools.reduce(lax.bitwise_or, done), start, lambda: None)
        if self.depth == 1:
            return list(held_slots)
        return [
            lax.select(is_done, lax.rem(held_slot + 1, jnp.int32(self.depth)), held_slot)
            for held_slot, is_done in zip(held_slots, done, strict=True)
        ]

    def fetch_ahead(self, step: Any, fetch_carried: Sequence[Any]) -> None:
        """Refills slots whose contents this step (or an earlier one, with a delay) used last."""
        steps = self.steps
        for delay, carried in zip(self.delays, fetch_carried, strict=True):
            ahead = self.depth - delay
            target = step + jnp.int32(ahead)
            slot = jnp.int32(0) if self.depth == 1 else lax.rem(target, jnp.int32(self.depth))
            buffers = [b for b in self.streamed if b.block.spec.delay_release == delay]
            fetch = functools.partial(
                self.fetch, buffers, slot, steps.position(step, ahead, carried)
            )
            if steps.static and steps.num_steps <= ahead:
                continue
            needed = target < _int32(steps.num_steps)
            if delay:
                needed = lax.bitwise_and(step >= jnp.int32(delay), needed)
            lax.cond(needed, fetch, lambda: None)

    def epilogue(self, first: Sequence[Any]) -> None:
        """Stores what no step stores, and waits for all stores."""
        if self.stored_once:
            ran = None if self.steps.static else self.steps.num_steps > 0
            commit_smem()
            for buffer in self.stored_once:
                buffer.copy_out(0, first, ran)
            commit_smem_to_gmem_group()
        if self.stored or self.stored_once:
            wait_smem_to_gmem(0)


def _differ(block: _Block, position: Sequence[Any], other: Sequence[Any]) -> Any:
    """Whether two steps have different blocks of an operand."""
    pairs = zip(block.index_map(*position), block.index_map(*other), strict=True)
    differences = [
        _int32(a) != _int32(b)
        for a, b in pairs
        if not (checks.is_integer(a) and checks.is_integer(b) and a == b)
    ]
    if not differences:
        return jnp.bool_(False)
    return functools.reduce(lax.bitwise_or, differences)
