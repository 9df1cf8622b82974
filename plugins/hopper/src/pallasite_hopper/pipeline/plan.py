"""What a pipeline is made of: blocks, rings of slots, the barriers between its threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallasite import _jax
from pallasite.language import checks
from pallasite.language.blocks import Block, Grid, make_block
from pallasite.language.buffers import Buffer, allocation
from pallasite.language.memory import GMEM, Barrier, ClusterBarrier, memory_space_of
from pallasite.language.params import BlockSpec
from pallasite.language.transforms import as_transformed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """The arguments of ``emit_pipeline_warp_specialized``, checked as far as they can be."""

    body: Callable[..., Any]
    grid: tuple[Any, ...]
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    max_concurrent_steps: int
    memory_registers: int | None
    wg_axis: Any
    num_compute_wgs: int
    pipeline_state: Any
    manual_produced_barriers: bool
    manual_consumed_barriers: bool
    compute_context: Callable[..., None] | None


@dataclasses.dataclass(frozen=True)
class Group:
    """Inputs whose slots are released together.

    Attributes:
      members: their numbers.
      delay: how many further steps their blocks stay untouched.
      axes: cluster axes along which blocks share one of them.
    """

    members: tuple[int, ...]
    delay: int
    axes: tuple[Any, ...]


def is_spec(tree: Any) -> bool:
    """Whether a node of a tree of block specs is a leaf."""
    return isinstance(tree, jax.experimental.pallas.BlockSpec)


class Plan:
    """A pipeline for certain operands.

    Attributes:
      steps: the grid.
      depth: number of slots of each ring.
      inputs, outputs: the blocks of each operand, flat.
      streamed, constant: numbers of the inputs that are fetched for each step, and once.
      groups: streamed inputs by when they are released.
    """

    def __init__(self, configuration: Configuration, gmem_refs: Sequence[Any]):
        self.configuration = configuration
        num_inputs, num_outputs = len(configuration.in_specs), len(configuration.out_specs)
        if len(gmem_refs) != num_inputs + num_outputs:
            raise checks.type_error(
                f"a pipeline of {num_inputs} inputs and {num_outputs} outputs got"
                f" {len(gmem_refs)} references"
            )
        self.steps = Grid(configuration.grid)
        self.depth = configuration.max_concurrent_steps
        if self.steps.static:
            self.depth = min(self.depth, self.steps.num_steps)
        self.input_tree, self.input_refs, self.inputs = self._blocks(
            "input", configuration.in_specs, gmem_refs[:num_inputs]
        )
        self.output_tree, self.output_refs, self.outputs = self._blocks(
            "output", configuration.out_specs, gmem_refs[num_inputs:]
        )
        manual = configuration.manual_produced_barriers or configuration.manual_consumed_barriers
        one_step = self.steps.static and self.steps.num_steps == 1
        in_smem = [i for i, block in enumerate(self.inputs) if block.in_smem]
        # With manual barriers, every input in shared memory has a block for every step.
        self.streamed = [i for i in in_smem if self.inputs[i].varies or one_step or manual]
        self.constant = [i for i in in_smem if i not in self.streamed]
        self.groups = self._groups()

    def _blocks(
        self, kind: str, specs: tuple[Any, ...], refs: Sequence[Any]
    ) -> tuple[Any, list[Any], list[Block]]:
        with_path, tree = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
        flat_refs, ref_tree = jax.tree.flatten(tuple(refs))
        if tree != ref_tree:
            raise checks.value_error(
                f"the {kind} references do not have the structure of the {kind} specs",
                got=f"references: {ref_tree}",
                expected=f"as in the specs: {tree}",
            )
        blocks = []
        for (path, spec), ref in zip(with_path, flat_refs, strict=True):
            name = f"{kind} {path[0].idx}{jax.tree_util.keystr(path[1:])}"
            base = as_transformed(ref, name)
            if memory_space_of(_jax.typeof(base.ref)) is not GMEM:
                raise checks.value_error(
                    f"{name} of a pipeline is not in global memory", got=_jax.typeof(base.ref)
                )
            blocks.append(
                make_block(spec, tuple(base.shape), self.steps, name, collective=kind == "input")
            )
        return tree, flat_refs, blocks

    def _groups(self) -> list[Group]:
        by_delay: dict[Any, list[int]] = {}
        for number in self.streamed:
            delay = self.inputs[number].spec.delay_release
            manual = self.configuration.manual_consumed_barriers
            by_delay.setdefault((delay, number if manual else 0), []).append(number)
        return [
            Group(tuple(members), delay, self._axes(members))
            for (delay, _), members in sorted(by_delay.items())
        ]

    def _axes(self, members: Sequence[int]) -> tuple[Any, ...]:
        axes: dict[Any, None] = {}
        for number in members:
            axes |= dict.fromkeys(self.inputs[number].spec.collective_axes or ())
        return tuple(axes)

    # Allocations ------------------------------------------------------------------------------

    def input_slots(self, number: int) -> int:
        """How many slots an input has."""
        return self.depth if number in self.streamed else 1

    def allocations(self) -> dict[str, Any]:
        """Describes the memory and the barriers, for ``pl.run_scoped``."""
        configuration = self.configuration
        refs = self.input_refs
        if not self.streamed:
            produced = []
        elif configuration.manual_produced_barriers:
            produced = [self._ring(1) for _ in self.streamed]
        else:
            produced = [self._ring(len(self.groups))]
        return {
            "inputs": [
                allocation(block, refs[i], self.input_slots(i))
                for i, block in enumerate(self.inputs)
            ],
            "produced": produced,
            "consumed": [
                self._ring(configuration.num_compute_wgs, axes=group.axes) for group in self.groups
            ],
            "constant_full": Barrier() if self.constant else None,
            "constant_free": _barrier(configuration.num_compute_wgs, (), self._axes(self.constant))
            if self.constant
            else None,
        }

    def _ring(self, num_arrivals: int, axes: tuple[Any, ...] = ()) -> Any:
        return _barrier(num_arrivals, () if self.depth == 1 else self.depth, axes)

    def input_buffers(self, smem_refs: Sequence[Any]) -> list[Buffer]:
        """The inputs in their memory."""
        return [
            Buffer(block, gmem_ref, smem_ref, self.input_slots(i))
            for i, (block, gmem_ref, smem_ref) in enumerate(
                zip(self.inputs, self.input_refs, smem_refs, strict=True)
            )
        ]


def _barrier(num_arrivals: int, count: Any, axes: tuple[Any, ...]) -> Any:
    if axes:
        return ClusterBarrier(collective_axes=axes, num_arrivals=num_arrivals, num_barriers=count)
    return Barrier(num_arrivals=num_arrivals, num_barriers=count)


def checked_specs(specs: Any, kind: str) -> tuple[Any, ...]:
    """A sequence of trees of block specs; a single spec may be given bare."""
    trees = tuple(specs) if isinstance(specs, list | tuple) else (specs,)
    for spec in jax.tree.leaves(trees, is_leaf=is_spec):
        if kind == "output" and isinstance(spec, BlockSpec) and spec.collective_axes:
            raise checks.value_error(
                "an output of a pipeline has collective_axes",
                got=spec.collective_axes,
                expected="collective_axes of inputs only",
            )
    return trees
