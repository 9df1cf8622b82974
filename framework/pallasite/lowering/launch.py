"""The launch context: what one kernel asks of its launch while its body is being lowered.

It owns dynamic shared memory and barriers, and completes the kernel. The function itself is in
:mod:`pallasite.lowering.kernel_function`, its parameters are in
:mod:`pallasite.lowering.kernel_parameters`, the ids of threads and blocks in
:mod:`pallasite.lowering.thread_ids`. What a rule asks for late (a descriptor, a barrier) is placed
early in the function: parameters in the signature, barrier initialisation in the prologue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.errors import SourceLocation
from pallasite.ir import ops
from pallasite.ir.types import bit_width, pointer_type
from pallasite.launch import (
    Allocation,
    LaunchParameters,
    TensorMapParameter,
)
from pallasite.launch_plan import canonical_order
from pallasite.lowering.geometry import Geometry
from pallasite.lowering.kernel_function import SHARED_MEMORY_ALIGNMENT as SHARED_MEMORY_ALIGNMENT
from pallasite.lowering.kernel_function import SHARED_MEMORY_SYMBOL
from pallasite.lowering.kernel_parameters import KernelParameters
from pallasite.lowering.resources import resource_error
from pallasite.resource import BARRIER_BYTES as BARRIER_BYTES
from pallasite.resource import SHARED_MEMORY
from pallasite.targets import Target

if TYPE_CHECKING:
    from pallasite.lowering.lifecycles import ActiveLifecycles

WARPGROUP_SIZE = 128


@dataclasses.dataclass(frozen=True)
class BarrierStorage:
    """``count`` consecutive mbarriers at byte ``offset`` of shared memory, each expecting
    ``arrivals`` arrivals per phase."""

    offset: int
    count: int
    arrivals: int


class LaunchContext(KernelParameters):
    """State of one kernel's launch while its body is lowered; see the module's text.

    Attributes:
      uses_cluster_memory: whether blocks of a cluster touch each other's shared memory.
      shares_memory_in_cluster: whether they do so by ordinary accesses, or through global memory,
        so that barriers of the cluster have to order those too.
    """

    def __init__(
        self, name: str, target: Target, geometry: Geometry, module: ir.Module, scoped_bytes: int
    ):
        super().__init__(name, target, geometry, module)
        self.uses_cluster_memory = False
        self.shares_memory_in_cluster = False
        self.min_blocks = 1
        self.named_scopes: tuple[Callable[[str], AbstractContextManager[None]], ...] = ()
        self.allocations: list[Allocation] = []
        self._barriers: list[BarrierStorage] = []
        self._before_barriers: list[Callable[[], None]] = []
        self._shared_top = scoped_bytes

    @contextlib.contextmanager
    def named_region(self, name: str) -> Iterator[None]:
        """What is emitted inside is in a region of this name, for whoever wants to know."""
        with contextlib.ExitStack() as stack:
            for opened in self.named_scopes:
                stack.enter_context(opened(name))
            yield

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

    def release_shared(self, offset: int, size: int) -> None:
        """Takes back what was reserved at an offset, if it was the last."""
        if offset + size == self._shared_top:
            self._shared_top = offset
            own = next(a for a in self.allocations if (a.space, a.offset) == ("smem", offset))
            self.allocations.remove(own)

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

    def before_barriers(self, build: Callable[[], None]) -> None:
        """Lets ``build`` emit something in the lane that initialises the block's barriers, before
        it does; nothing where the kernel has no barriers."""
        self._before_barriers.append(build)

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory that the launch needs."""
        return self._shared_top

    # Synchronisation -------------------------------------------------------------------------

    def warpgroup_barrier(self) -> None:
        """All 128 lanes of the warpgroup converge; barrier 0 is reserved for the whole block."""
        if self.geometry.threads == 1:
            ops.inline_assembly("bar.sync 0;", "~{memory}")
            return
        barrier = self._once("warpgroup_barrier", lambda: ops.add(self.warpgroup_id, 1))
        ops.inline_assembly(f"bar.sync $0, {WARPGROUP_SIZE};", "r,~{memory}", barrier)

    def warp_barrier(self) -> None:
        """All 32 lanes of the warp converge."""
        ops.inline_assembly("bar.warp.sync 0xffffffff;", "~{memory}")

    def block_barrier(self) -> None:
        """All threads of the block synchronize."""
        ops.inline_assembly("bar.sync 0;", "~{memory}")

    def cluster_barrier(self, *, relaxed: bool = False) -> None:
        """All threads of the cluster synchronize (``barrier.cluster``, PTX ISA 9.7.13.4)."""
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
                for build in self._before_barriers:
                    build()
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

    def finish(self, lifecycles: ActiveLifecycles) -> LaunchParameters:
        """Completes the function once its body is lowered: epilogues, the final synchronisation of
        clusters, what was deferred, barrier initialisation, the signature.

        Args:
          lifecycles: of plugins, in this kernel.

        Raises:
          ResourceError: more shared memory than the target has; the message lists who asked.
        """
        with ir.InsertionPoint(self.entry):
            lifecycles.call("epilogue")
            if self.uses_cluster_memory and math.prod(self.geometry.cluster) > 1:
                # A block must not leave while others may still write to its shared memory.
                self.cluster_barrier()
            llvm.return_()
        lifecycles.call("finish")
        self._emit_deferred()
        self._initialise_barriers()
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
            inputs=self.hidden.inputs,
            outputs=self.hidden.outputs,
            scratch=tuple(self.buffers_scratch),
            aliases=self.aliases,
            hidden_operands=self.hidden.operands(),
            hidden_results=self.hidden.results(),
            before_first_launch=lifecycles.host_steps(),
        )


def buffer_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array in memory, rounded up to whole bytes."""
    return -(-math.prod(shape) * bit_width(dtype) // 8)
