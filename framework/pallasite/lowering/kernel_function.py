"""The function of one kernel while it is emitted: places in it, and values emitted once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.ir import ops
from pallasite.ir.types import parse_type
from pallasite.lowering.geometry import Geometry
from pallasite.targets import Target

SHARED_MEMORY_SYMBOL = "pallasite_shared"
GLOBAL_ALIGNMENT = 256
"""Bytes that arrays in global memory are aligned to."""
SHARED_MEMORY_ALIGNMENT = 1024
"""Bytes that arrays in shared memory are aligned to."""


class KernelFunction:
    """The function of a kernel: first what the whole kernel uses, then the initialisation of
    barriers, then the body.

    Attributes:
      name: of the kernel.
      target: what is compiled for.
      geometry: grid, cluster and threads.
      module: the MLIR module.
    """

    def __init__(self, name: str, target: Target, geometry: Geometry, module: ir.Module):
        self.name = name
        self.target = target
        self.geometry = geometry
        self.module = module
        self._cached: dict[str, ir.Value] = {}
        self._deferred: list[tuple[ir.Operation, Callable[..., None]]] = []
        self._begin_function()

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

    def defer(self, build: Callable[..., None], *operands: ir.Value) -> ir.Operation:
        """Lets ``build(*operands)`` emit operations without results here, once the whole body is
        lowered.

        Returns:
          What stands here until then, and uses the operands.
        """
        placeholder = ir.Operation.create(
            "builtin.unrealized_conversion_cast", results=[ops.i32()], operands=list(operands)
        )
        self._deferred.append((placeholder, build))
        return placeholder

    def _emit_deferred(self) -> None:
        # What is deferred may defer more.
        while self._deferred:
            placeholder, build = self._deferred.pop(0)
            with ir.InsertionPoint(placeholder), placeholder.location:
                build(*placeholder.operands)
            placeholder.erase()
