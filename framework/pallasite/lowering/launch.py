"""The launch context: what one kernel asks of its launch while its body is being lowered.

It owns the kernel function and its parameters (pointers and TMA descriptors), the ids of thread,
warp, block and cluster, predicates that elect one lane, dynamic shared memory, and barriers. What
a rule asks for late (a descriptor, a barrier) is placed early in the function: parameters in the
signature, barrier initialisation in the prologue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.errors import InternalError, SourceLocation
from pallasite.ir import ops
from pallasite.ir.types import bit_width, parse_type, pointer_type
from pallasite.launch import (
    Allocation,
    ArrayParameter,
    Buffer,
    BufferKind,
    LaunchParameters,
    Parameter,
    TensorMapParameter,
)
from pallasite.launch_plan import canonical_order
from pallasite.lowering.geometry import Geometry
from pallasite.lowering.resources import resource_error
from pallasite.resource import BARRIER_BYTES as BARRIER_BYTES
from pallasite.resource import SHARED_MEMORY
from pallasite.targets import Target

if TYPE_CHECKING:
    from pallasite_std.profiler.events import Profiler

SHARED_MEMORY_SYMBOL = "pallasite_shared"
SHARED_MEMORY_ALIGNMENT = 1024
WARPGROUP_SIZE = 128
WARP_SIZE = 32


@dataclasses.dataclass(frozen=True)
class BarrierStorage:
    """``count`` consecutive mbarriers at byte ``offset`` of shared memory, each expecting
    ``arrivals`` arrivals per phase."""

    offset: int
    count: int
    arrivals: int


class LaunchContext:
    """State of one kernel's launch while its body is lowered; see the module's text."""

    def __init__(
        self, name: str, target: Target, geometry: Geometry, module: ir.Module, scoped_bytes: int
    ):
        self.name = name
        self.target = target
        self.geometry = geometry
        self.module = module
        self.uses_cluster_memory = False
        self.shares_memory_in_cluster = False
        self.cluster_scoped: list[ir.Operation] = []
        self.min_blocks = 1
        self.profiler: Profiler | None = None
        self.tensor_instructions: list[Any] = []
        self.allocations: list[Allocation] = []
        self._parameters: dict[Parameter, ir.Value] = {}
        self._barriers: list[BarrierStorage] = []
        self._prologue: ir.Block | None = None
        self._cached: dict[str, ir.Value] = {}
        self._shared_top = scoped_bytes
        self.buffers_in: tuple[Buffer, ...] = ()
        self.buffers_out: tuple[Buffer, ...] = ()
        self.buffers_scratch: list[Buffer] = []
        self.aliases: tuple[tuple[int, int], ...] = ()
        self._begin_function()

    # The function ----------------------------------------------------------------------------

    def _begin_function(self) -> None:
        with ir.InsertionPoint(self.module.body):
            shared = llvm.GlobalOp(
                parse_type("!llvm.array<0 x i8>"),
                SHARED_MEMORY_SYMBOL,
                ir.Attribute.parse("#llvm.linkage<external>"),
                addr_space=3,
                alignment=SHARED_MEMORY_ALIGNMENT,
            )
            del shared
            function_type = ir.TypeAttr.get(parse_type("!llvm.func<void ()>"))
            self.function = llvm.LLVMFuncOp(self.name, function_type)
        self.entry = self.function.body.blocks.append()
        with ir.InsertionPoint(self.entry):
            # Two anchors: before the first go ids and addresses that the whole kernel uses, between
            # them the initialisation of barriers. They are dead code once the body is lowered.
            self._ids_anchor = ops.i32_constant(0).owner
            self._initialise_anchor = ops.i32_constant(0).owner

    @contextlib.contextmanager
    def body(self) -> Iterator[None]:
        """Emits the kernel's body."""
        with ir.InsertionPoint(self.entry):
            yield

    @contextlib.contextmanager
    def at_entry(self) -> Iterator[None]:
        """Emits at the start of the kernel, where every later operation can use it."""
        with ir.InsertionPoint(self._ids_anchor):
            yield

    def _once(self, key: str, build: Callable[[], ir.Value]) -> ir.Value:
        found = self._cached.get(key)
        if found is None:
            with self.at_entry():
                found = build()
            self._cached[key] = found
        return found

    def emit_once(self, key: str, build: Callable[[], ir.Value]) -> ir.Value:
        """The value that ``build`` emits at the start of the kernel, built once per ``key``."""
        return self._once(key, build)

    def parameter(self, parameter: Parameter) -> ir.Value:
        """The kernel's argument for ``parameter``: a global pointer, or the generic address of a
        TMA descriptor in parameter space. Equal parameters are one argument."""
        found = self._parameters.get(parameter)
        if found is None:
            space = 1 if isinstance(parameter, ArrayParameter) else 0
            with self.at_entry():
                found = llvm.mlir_undef(pointer_type(space))
            self._parameters[parameter] = found
        return found

    def array_pointer(self, buffer: Buffer) -> ir.Value:
        """The global pointer of a buffer."""
        return self.parameter(ArrayParameter(buffer))

    def new_scratch(self, shape: Sequence[int], dtype: Any, *, zeroed: bool) -> Buffer:
        """A buffer in global memory that the launch allocates; all zeros if ``zeroed``."""
        buffer = Buffer(
            BufferKind.SCRATCH, len(self.buffers_scratch), tuple(shape), dtype, zeroed=zeroed
        )
        self.buffers_scratch.append(buffer)
        return buffer

    @contextlib.contextmanager
    def named_region(self, name: str) -> Iterator[None]:
        """What is emitted inside appears under ``name`` in the kernel's profile, if it has one."""
        with contextlib.nullcontext() if self.profiler is None else self.profiler.record(name):
            yield

    # Ids and predicates ----------------------------------------------------------------------

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
        """The warp number in the block (i32, the same in all lanes of a warp)."""
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

    def multicast_mask(self, dimensions: Sequence[int]) -> ir.Value:
        """The 16-bit mask (as i16) of the blocks that differ from this one only along
        ``dimensions`` of the cluster, by cluster rank x + X*(y + Y*z)."""
        cluster = self.geometry.cluster
        strides = (1, cluster[0], cluster[0] * cluster[1])
        mask = 0
        ranks = [0]
        for dimension in dimensions:
            ranks = [
                rank + coordinate * strides[dimension]
                for rank in ranks
                for coordinate in range(cluster[dimension])
            ]
        for rank in ranks:
            mask |= 1 << rank
        others = [d for d in range(3) if d not in dimensions and cluster[d] > 1]
        ids = [(self.cluster_block_id(d), strides[d]) for d in others]

        def build() -> ir.Value:
            value = ops.i32_constant(mask)
            if ids:
                shift: ir.Value | None = None
                for coordinate, stride in ids:
                    term = ops.multiply(coordinate, stride)
                    shift = term if shift is None else ops.add(shift, term)
                value = ops.arith.shli(value, shift)
            return ops.cast_integer(value, parse_type("i16"))

        return self._once(f"multicast_mask.{sorted(dimensions)}", build)

    # Shared memory and barriers --------------------------------------------------------------

    def note(self, allocation: Allocation) -> None:
        """Records who asked for shared memory; the same request, lowered again, counts once."""
        if allocation not in self.allocations:
            self.allocations.append(allocation)

    def shared_pointer(self, offset: int = 0) -> ir.Value:
        """A pointer to byte ``offset`` of the block's dynamic shared memory."""
        base = self._once(
            "shared_base",
            lambda: llvm.mlir_addressof(
                pointer_type(3), ir.FlatSymbolRefAttr.get(SHARED_MEMORY_SYMBOL)
            ),
        )
        if offset == 0:
            return base
        return self._once(f"shared.{offset}", lambda: ops.byte_pointer(base, offset))

    def reserve_shared(
        self, size: int, *, alignment: int, what: str, location: SourceLocation | None
    ) -> int:
        """Reserves ``size`` bytes of shared memory for the whole kernel, behind the scoped
        allocations; returns the byte offset. The limit is checked when the kernel is finished."""
        offset = -(-self._shared_top // alignment) * alignment
        self._shared_top = offset + size
        self.allocations.append(Allocation("smem", what, size, offset, location))
        return offset

    def new_barriers(
        self, count: int, arrivals: int, *, what: str, location: SourceLocation | None
    ) -> BarrierStorage:
        """``count`` mbarriers that are initialised at the start of the kernel.

        ``arrivals`` is the hardware arrival count of a phase.
        """
        offset = -(-self._shared_top // BARRIER_BYTES) * BARRIER_BYTES
        self._shared_top = offset + count * BARRIER_BYTES
        self.allocations.append(
            Allocation("barrier", what, count * BARRIER_BYTES, offset, location)
        )
        storage = BarrierStorage(offset, count, arrivals)
        self._barriers.append(storage)
        return storage

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory that the launch needs."""
        return self._shared_top

    # Synchronisation -------------------------------------------------------------------------

    def warpgroup_barrier(self) -> None:
        """All 128 lanes of the warpgroup meet; barrier 0 is left to the whole block."""
        if self.geometry.threads == 1:
            ops.inline_assembly("bar.sync 0;", "~{memory}")
            return
        barrier = self._once("warpgroup_barrier", lambda: ops.add(self.warpgroup_id, 1))
        ops.inline_assembly(f"bar.sync $0, {WARPGROUP_SIZE};", "r,~{memory}", barrier)

    def warp_barrier(self) -> None:
        """All 32 lanes of the warp meet."""
        ops.inline_assembly("bar.warp.sync 0xffffffff;", "~{memory}")

    def block_barrier(self) -> None:
        """All threads of the block meet."""
        ops.inline_assembly("bar.sync 0;", "~{memory}")

    def cluster_barrier(self, *, relaxed: bool = False) -> None:
        """All threads of the cluster meet (``barrier.cluster``, PTX ISA 9.7.13.4)."""
        order = ".relaxed" if relaxed else ""
        ops.inline_assembly(
            f"barrier.cluster.arrive{order}.aligned;\\n\\tbarrier.cluster.wait.aligned;".replace(
                "\\n\\t", "\n\t"
            ),
            "~{memory}",
        )

    # Finishing -------------------------------------------------------------------------------

    def _initialise_barriers(self) -> None:
        clustered = math.prod(self.geometry.cluster) > 1 and self.uses_cluster_memory
        if not self._barriers:
            if clustered:
                with ir.InsertionPoint(self._initialise_anchor):
                    self.cluster_barrier(relaxed=True)
            return
        leader = self.block_leader
        pointers = [self.shared_pointer(storage.offset) for storage in self._barriers]
        with ir.InsertionPoint(self._initialise_anchor):
            with ops.when(leader):
                self._prologue = ir.InsertionPoint.current.block
                for storage, pointer in zip(self._barriers, pointers, strict=True):
                    address = ops.shared_address(pointer)
                    for index in range(storage.count):
                        ops.inline_assembly(
                            f"mbarrier.init.shared::cta.b64 [$0+{index * BARRIER_BYTES}], "
                            f"{storage.arrivals};",
                            "r,~{memory}",
                            address,
                        )
                ops.inline_assembly("fence.mbarrier_init.release.cluster;", "~{memory}")
            if clustered:
                self.cluster_barrier(relaxed=True)
            self.block_barrier()

    def finish(self) -> LaunchParameters:
        """Completes the function once its body is lowered: barrier initialisation, the final
        synchronisation of clusters, the signature.

        Raises:
          ResourceError: more shared memory than the target has; the message lists who asked.
        """
        self._initialise_barriers()
        with ir.InsertionPoint(self.entry):
            profile = None if self.profiler is None else self.profiler.finish()
            if self.uses_cluster_memory and math.prod(self.geometry.cluster) > 1:
                # A block must not leave while others may still write to its shared memory.
                self.cluster_barrier()
            llvm.return_()
        self._narrow_scopes()
        self._share_tensor_maps()
        self._prefetch_tensor_maps()
        order = canonical_order(tuple(self._parameters), self.aliases)
        attributes = []
        texts = []
        location = ir.Location.unknown()
        for parameter in order:
            value = self._parameters[parameter]
            argument = self.entry.add_argument(value.type, location)
            value.replace_all_uses_with(argument)
            value.owner.erase()
            if isinstance(parameter, TensorMapParameter):
                texts.append("ptr")
                attributes.append(
                    "{llvm.byval = !llvm.array<128 x i8>, llvm.align = 64 : i64,"
                    " nvvm.grid_constant}"
                )
            else:
                texts.append("ptr<1>")
                attributes.append(f"{{llvm.align = {parameter.alignment} : i64}}")
        for _ in range(2):  # The launcher appends two pointers that we do not use.
            self.entry.add_argument(pointer_type(1), location)
            texts.append("ptr<1>")
            attributes.append("{}")
        function = self.function.operation
        function.attributes["function_type"] = ir.TypeAttr.get(
            ir.Type.parse(f"!llvm.func<void ({', '.join(texts)})>")
        )
        function.attributes["arg_attrs"] = ir.Attribute.parse(f"[{', '.join(attributes)}]")
        function.attributes["nvvm.kernel"] = ir.UnitAttr.get()
        threads = self.geometry.block_threads
        function.attributes["nvvm.reqntid"] = ir.DenseI32ArrayAttr.get([threads])
        function.attributes["nvvm.minctasm"] = ir.IntegerAttr.get(ops.i32(), self.min_blocks)
        if math.prod(self.geometry.cluster) > 1:
            function.attributes["nvvm.cluster_dim"] = ir.DenseI32ArrayAttr.get(
                list(self.geometry.cluster)
            )
        if self.shared_bytes > self.target.max_shared_memory:
            raise resource_error(
                self.name, SHARED_MEMORY, self.shared_bytes, self.target, self.allocations
            )
        return LaunchParameters(
            grid=self.geometry.cuda_grid,
            block=(threads, 1, 1),
            cluster=self.geometry.cluster,
            shared_memory_bytes=self.shared_bytes,
            parameters=order,
            inputs=self.buffers_in,
            outputs=self.buffers_out,
            scratch=tuple(self.buffers_scratch),
            aliases=self.aliases,
            profile=profile,
        )

    def _narrow_scopes(self) -> None:
        """Barriers of a cluster order accesses for the cluster only where somebody needs it."""
        if self.shares_memory_in_cluster:
            return
        for operation in self.cluster_scoped:
            text = ir.StringAttr(operation.attributes["asm_string"]).value
            for order in ("release", "acquire"):
                text = text.replace(f".{order}.cluster.", f".{order}.cta.")
            operation.attributes["asm_string"] = ir.StringAttr.get(text)

    def _share_tensor_maps(self) -> None:
        """Copies to an output use fewer tensor maps, if it has more than the launcher passes."""
        from pallasite_std.copies import shared_tensor_maps as sharing

        noted = {one.operation for one in self.tensor_instructions}

        def divisible(parameter: TensorMapParameter) -> bool:
            # What a plugin does with a tensor map is not known here.
            takers = [use.owner for use in self._parameters[parameter].uses]
            uses = [use for taker in takers for result in taker.results for use in result.uses]
            return all(taker.name == "llvm.ptrtoint" for taker in takers) and all(
                use.owner in noted for use in uses
            )

        changes = sharing.shared_parameters(tuple(self._parameters), self.aliases, divisible)
        for instruction in self.tensor_instructions:
            change = changes.get(instruction.parameter)
            if isinstance(change, TensorMapParameter):
                sharing.cut_instruction(instruction, change)
        # What takes the place of one may be equal to another one that is replaced.
        replaced = {old: self._parameters.pop(old) for old in changes}
        for old, value in replaced.items():
            value.replace_all_uses_with(self.parameter(changes[old]))
            value.owner.erase()

    def _prefetch_tensor_maps(self) -> None:
        """Descriptors are on their way while barriers are initialised; the first copy needs them
        (PTX ISA 9.7.9.15, ``prefetch.tensormap``)."""
        if self._prologue is None:
            return
        with ir.InsertionPoint.at_block_begin(self._prologue):
            for parameter, value in self._parameters.items():
                if isinstance(parameter, TensorMapParameter):
                    address = llvm.ptrtoint(ops.i64(), value)
                    ops.inline_assembly("prefetch.tensormap [$0];", "l", address)


def buffer_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array in memory, rounded up to whole bytes."""
    return -(-math.prod(shape) * bit_width(dtype) // 8)


def require(condition: bool, message: str) -> None:
    """Raises :class:`InternalError` for something that no user can cause."""
    if not condition:
        raise InternalError(message)
