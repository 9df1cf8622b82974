"""Ids of lanes, warps, warpgroups, blocks and clusters, and predicates that elect one lane."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from jaxlib.mlir import ir

from pallasite.ir import ops
from pallasite.ir.types import parse_type
from pallasite.lowering.kernel_function import KernelFunction

WARP_SIZE = 32


class ThreadIds(KernelFunction):
    """Which thread this is; every id is read once, at the start of the kernel."""

    def _special_register(self, name: str) -> ir.Value:
        return self._once(name, lambda: ops.intrinsic(ops.i32(), f"llvm.nvvm.read.ptx.sreg.{name}"))

    @property
    def thread_id(self) -> ir.Value:
        """The CUDA thread number in the block (i32)."""
        return self._special_register("tid.x")

    @property
    def lane_id(self) -> ir.Value:
        """The lane number in the warp, 0 to 31 (i32)."""
        return self._once("lane", lambda: ops.bitwise_and(self.thread_id, WARP_SIZE - 1))

    def _uniform(self, value: ir.Value) -> ir.Value:
        # A shuffle from lane 0 tells ptxas that the value is the same in the whole warp, so that
        # branches on it are uniform and what depends on it may use uniform registers.
        return ops.intrinsic(
            ops.i32(),
            "llvm.nvvm.shfl.sync.idx.i32",
            ops.i32_constant(-1),
            value,
            ops.i32_constant(0),
            ops.i32_constant(31),
        )

    @property
    def block_warp_id(self) -> ir.Value:
        """The warp number in the block (i32, warp-uniform)."""
        return self._once(
            "block_warp", lambda: self._uniform(ops.divide_unsigned(self.thread_id, WARP_SIZE))
        )

    @property
    def warp_id(self) -> ir.Value:
        """The warp number in the warpgroup, 0 to 3 (i32)."""
        if self.geometry.threads == 1:
            return self.block_warp_id
        return self._once("warp", lambda: ops.bitwise_and(self.block_warp_id, 3))

    @property
    def warpgroup_id(self) -> ir.Value:
        """The warpgroup number in the block (i32): the index of the user's thread."""
        if self.geometry.threads == 1:
            return self._once("warpgroup", lambda: ops.i32_constant(0))
        return self._once("warpgroup", lambda: ops.divide_unsigned(self.block_warp_id, 4))

    @property
    def elected_lane(self) -> ir.Value:
        """True in one lane of each warp, the same one for the whole kernel (i1)."""

        def build() -> ir.Value:
            # elect.sync picks one lane of the warp (PTX ISA 9.7.14.5, sm_90 and later).
            predicate = ops.inline_assembly(
                "{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 $0, 1, 0, p; }",
                "=r",
                results=[ops.i32()],
            )
            return ops.compare("ne", predicate, 0)

        if not self.target.has("elect"):
            return self._once("elected", lambda: ops.compare("eq", self.lane_id, 0))
        return self._once("elected", build)

    @property
    def warpgroup_leader(self) -> ir.Value:
        """True in one lane of each warpgroup, the same one for the whole kernel (i1)."""

        def build() -> ir.Value:
            first = ops.compare("eq", self.warp_id, 0)
            return ops.arith.andi(first, self.elected_lane)

        elected = self.elected_lane
        del elected
        return self._once("warpgroup_leader", build)

    @property
    def block_leader(self) -> ir.Value:
        """True in one lane of the block (i1)."""

        def build() -> ir.Value:
            first = ops.compare("eq", self.block_warp_id, 0)
            return ops.arith.andi(first, self.elected_lane)

        elected = self.elected_lane
        del elected
        return self._once("block_leader", build)

    def block_id(self, dimension: int) -> ir.Value:
        """The CUDA block number along x, y or z (i32)."""
        if self.geometry.cuda_grid[dimension] == 1:
            return self._once(f"ctaid.{dimension}", lambda: ops.i32_constant(0))
        return self._special_register(f"ctaid.{'xyz'[dimension]}")

    def cluster_block_id(self, dimension: int) -> ir.Value:
        """This block's coordinate in its cluster along x, y or z (i32)."""
        if self.geometry.cluster[dimension] == 1:
            return self._once(f"cluster.{dimension}", lambda: ops.i32_constant(0))
        return self._special_register(f"cluster.ctaid.{'xyz'[dimension]}")

    def cluster_index(self, dimensions: Sequence[int]) -> ir.Value:
        """Linear number of this block among those that differ from it only along
        ``dimensions`` of the cluster (x fastest; i32)."""

        def build() -> ir.Value:
            index: ir.Value | None = None
            stride = 1
            for dimension in sorted(dimensions):
                extent = self.geometry.cluster[dimension]
                if extent == 1:
                    continue
                term = ops.multiply(self.cluster_block_id(dimension), stride)
                index = term if index is None else ops.add(index, term)
                stride *= extent
            return ops.i32_constant(0) if index is None else index

        for dimension in dimensions:
            self.cluster_block_id(dimension)
        return self._once(f"cluster_index.{sorted(dimensions)}", build)

    def _rank_stride(self, dimension: int) -> int:
        return math.prod(self.geometry.cluster[:dimension])

    def cluster_rank(self, coordinates: Mapping[int, ir.Value | int]) -> ir.Value:
        """The rank in the cluster, x + X*(y + Y*z), of a block (i32).

        Args:
          coordinates: of the block in its cluster, by dimension (0 is x); along the dimensions that
            are left out it is where this block is.
        """
        rank: ir.Value | None = None
        for dimension in range(3):
            if dimension not in coordinates and self.geometry.cluster[dimension] == 1:
                continue
            coordinate = coordinates.get(dimension)
            if coordinate is None:
                coordinate = self.cluster_block_id(dimension)
            elif isinstance(coordinate, int):
                if coordinate == 0:
                    continue
                coordinate = ops.i32_constant(coordinate)
            term = ops.multiply(coordinate, self._rank_stride(dimension))
            rank = term if rank is None else ops.add(rank, term)
        return ops.i32_constant(0) if rank is None else rank

    def multicast_mask(self, dimensions: Sequence[int]) -> ir.Value:
        """The 16-bit mask (as i16) of the blocks that differ from this one only along
        ``dimensions`` of the cluster, by cluster rank x + X*(y + Y*z)."""
        mask = 0
        for coordinates in itertools.product(
            *(range(self.geometry.cluster[dimension]) for dimension in dimensions)
        ):
            mask |= 1 << sum(
                coordinate * self._rank_stride(dimension)
                for dimension, coordinate in zip(dimensions, coordinates, strict=True)
            )
        first = dict.fromkeys(dimensions, 0)
        others = [d for d in range(3) if d not in first and self.geometry.cluster[d] > 1]
        for dimension in others:
            self.cluster_block_id(dimension)

        def build() -> ir.Value:
            value = ops.i32_constant(mask)
            if others:
                value = ops.arith.shli(value, self.cluster_rank(first))
            return ops.cast_integer(value, parse_type("i16"))

        return self._once(f"multicast_mask.{sorted(dimensions)}", build)
