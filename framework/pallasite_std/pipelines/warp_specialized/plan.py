"""What a pipeline is made of: blocks, circular buffers, the barriers between its threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import GMEM, as_transformed, checks, memory_space_of
from pallasite_std.barriers.types import Barrier, ClusterBarrier
from pallasite_std.pipelines.block_spec import BlockSpec, shared_axes
from pallasite_std.pipelines.blocks import Block, Grid, make_block
from pallasite_std.pipelines.buffers import Buffer, allocation
from pallasite_std.pipelines.warp_specialized.states import Place, place_of


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
class InputGroup:
    """Streamed inputs whose stages are released together.

    Attributes:
      members: their numbers.
      delay: how many further steps their blocks stay untouched.
      axes: cluster axes along which blocks share one of them.
    """

    members: tuple[int, ...]
    delay: int
    axes: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class OutputGroup:
    """Outputs that are stored together.

    Attributes:
      members: their numbers.
      kind: "every" step; "held" while the block index stays the same, of a single output; "once",
        after the last step.
      stages: how many stages each of them has.
    """

    members: tuple[int, ...]
    kind: str
    stages: int


def is_spec(tree: Any) -> bool:
    """Whether a node of a tree of block specs is a leaf."""
    return isinstance(tree, pl.BlockSpec)


class Plan:
    """A pipeline for certain operands.

    Attributes:
      place: where it stands in a sequence of pipelines.
      steps: the grid.
      depth: number of stages of each ring.
      inputs, outputs: the blocks of each operand, flat.
      streamed, constant: numbers of the inputs that are fetched for each step, and once.
      input_groups: streamed inputs by when they are released.
      output_groups: outputs in shared memory by when they are stored.
    """

    def __init__(self, configuration: Configuration, gmem_refs: Sequence[Any]):
        self.configuration = configuration
        num_inputs, num_outputs = len(configuration.in_specs), len(configuration.out_specs)
        if len(gmem_refs) != num_inputs + num_outputs:
            raise checks.type_error(
                f"a pipeline of {num_inputs} inputs and {num_outputs} outputs got"
                f" {len(gmem_refs)} references"
            )
        self.place: Place = place_of(configuration.pipeline_state)
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
        self.input_groups = self._group_inputs()
        self.output_groups = self._group_outputs()

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
            blocks.append(make_block(spec, tuple(base.shape), self.steps, name))
        return tree, flat_refs, blocks

    def _group_inputs(self) -> list[InputGroup]:
        groups: dict[Any, list[int]] = {}
        for number in self.streamed:
            delay = self.inputs[number].spec.delay_release
            manual = self.configuration.manual_consumed_barriers
            groups.setdefault((delay, number if manual else 0), []).append(number)
        return [
            InputGroup(tuple(members), delay, self.shared_axes(members))
            for (delay, _), members in sorted(groups.items())
        ]

    def _group_outputs(self) -> list[OutputGroup]:
        numbers = [i for i, block in enumerate(self.outputs) if block.in_smem]
        every = [i for i in numbers if self.outputs[i].always_changes]
        held = [i for i in numbers if self.outputs[i].varies and i not in every]
        once = [i for i in numbers if not self.outputs[i].varies]
        groups = [OutputGroup(tuple(every), "every", self.depth)] if every else []
        groups += [OutputGroup((number,), "held", self.depth) for number in held]
        return groups + ([OutputGroup(tuple(once), "once", 1)] if once else [])

    def shared_axes(self, members: Sequence[int]) -> tuple[Any, ...]:
        """Cluster axes along which a block must hear of the release of some inputs."""
        return shared_axes(self.inputs[number].spec for number in members)

    # Allocations ------------------------------------------------------------------------------

    def allocations(self, *, scoped: bool) -> dict[str, Any]:
        """Describes the memory and the barriers, for ``pl.run_scoped``.

        Args:
          scoped: whether they are for a single run, before which they may have been in other use.
        """
        configuration = self.configuration
        refs = self.input_refs
        if not self.streamed:
            produced = []
        elif configuration.manual_produced_barriers:
            produced = [self._ring(1) for _ in self.streamed]
        else:
            produced = [self._ring(len(self.input_groups))]
        shared = self.shared_axes(range(len(self.inputs)))
        readers = configuration.num_compute_wgs
        return {
            "inputs": [
                allocation(block, refs[i], self.input_stages(i))
                for i, block in enumerate(self.inputs)
            ],
            "outputs": [
                allocation(block, ref, self.output_stages(i))
                for i, (block, ref) in enumerate(zip(self.outputs, self.output_refs, strict=True))
            ],
            "produced": produced,
            "consumed": [self._ring(readers, axes=group.axes) for group in self.input_groups],
            "constant_full": Barrier() if self.constant else None,
            "constant_free": _barrier(readers, 1, self.shared_axes(self.constant))
            if self.constant
            else None,
            "written": [_barrier(readers, group.stages) for group in self.output_groups],
            "stored": [_barrier(1, group.stages) for group in self.output_groups],
            "ready": ClusterBarrier(collective_axes=shared) if scoped and shared else None,
        }

    def _ring(self, num_arrivals: int, axes: tuple[Any, ...] = ()) -> Any:
        return _barrier(num_arrivals, self.depth, axes)

    def check_allocations(self, memory: Any) -> None:
        """Raises unless ``memory`` is what the allocations describe."""
        expected, tree = jax.tree.flatten(self.allocations(scoped=False))
        leaves, given_tree = jax.tree.flatten(memory)
        if tree != given_tree:
            raise checks.value_error(
                "allocations do not belong to this pipeline",
                got=given_tree,
                expected="what get_allocations describes and pl.run_scoped allocates, or that of a"
                " pipeline that differs only in its index maps and its body",
            )
        for allocated, leaf in zip(expected, leaves, strict=True):
            wanted = allocated.get_ref_aval()
            wanted = wanted.ref if isinstance(wanted, _jax.TransformedRef) else wanted
            aval = _jax.typeof(as_transformed(leaf, "allocations").ref)
            if (aval.shape, aval.dtype) != (wanted.shape, wanted.dtype):
                raise checks.value_error(
                    "allocations belong to a pipeline with other blocks or other barriers",
                    got=aval,
                    expected=str(wanted),
                )

    # Operands in their memory -----------------------------------------------------------------

    def input_stages(self, number: int) -> int:
        """How many stages an input has."""
        return self.depth if number in self.streamed else 1

    def output_stages(self, number: int) -> int:
        """How many stages an output has."""
        return self.depth if self.outputs[number].varies else 1

    def input_buffers(self, memory: Any) -> list[Buffer]:
        """The inputs in their memory."""
        parts = zip(self.inputs, self.input_refs, memory["inputs"], strict=True)
        return [Buffer(*part, self.input_stages(i)) for i, part in enumerate(parts)]

    def output_buffers(self, memory: Any) -> list[Buffer]:
        """The outputs in their memory."""
        parts = zip(self.outputs, self.output_refs, memory["outputs"], strict=True)
        return [Buffer(*part, self.output_stages(i)) for i, part in enumerate(parts)]


def _barrier(num_arrivals: int, count: int, axes: tuple[Any, ...] = ()) -> Any:
    shape = () if count == 1 else count
    if axes:
        return ClusterBarrier(collective_axes=axes, num_arrivals=num_arrivals, num_barriers=shape)
    return Barrier(num_arrivals=num_arrivals, num_barriers=shape)


def checked_specs(specs: Any, kind: str) -> tuple[Any, ...]:
    """A sequence of trees of block specs; a single spec may be given bare.

    Raises:
      InvalidValueError: an output that blocks of a cluster are to share.
    """
    trees = tuple(specs) if isinstance(specs, list | tuple) else (specs,)
    for spec in jax.tree.leaves(trees, is_leaf=is_spec):
        if kind == "output" and isinstance(spec, BlockSpec) and spec.collective_axes:
            raise checks.value_error(
                "an output of a pipeline has collective_axes",
                got=spec.collective_axes,
                expected="collective_axes of inputs only",
            )
    return trees
