"""The state of the translation of one function from MLIR to LLVM IR text.

Handlers are functions ``handler(emitter, operation)``, found by the name of the operation. They
read operands from :attr:`Emitter.values` and append lines of LLVM IR. A value is a pair of texts,
its LLVM type and its name; constants have no instruction, their name is the constant itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pallasite.codegen.translation.locations import DebugInfo, Metadata, source_location
from pallasite.codegen.translation.types import TypeTable
from pallasite.errors import CompilationError, PallasiteError

Handler = Callable[["Emitter", Any], None]
"""Takes an emitter and an operation; appends instructions and binds the results."""
Operand = tuple[str, str]
"""An LLVM value: its type and its name (or the text of a constant)."""


class HandlerTable:
    """Handlers by operation name, looked up by the Python class of the operation."""

    def __init__(self, *tables: Mapping[str, Handler]):
        self._by_name: dict[str, Handler] = {}
        for table in tables:
            self._by_name.update(table)
        self.by_class: dict[type, Handler] = {}

    def find(self, operation: Any) -> Handler:
        """The handler of an operation whose class has not been seen before."""
        name = operation.operation.name
        handler = self._by_name.get(name)
        if handler is None:
            raise CompilationError(
                f"operation {name!r} has no translation to LLVM IR",
                expected="operations of arith, math, scf, llvm, static ones of vector, and those"
                " that plugins translate (memref, some of gpu and nvvm)",
                hint="write the instruction as llvm.inline_asm, or lower the operation to others"
                " in a rule or an MLIR pass",
            )
        # Operations without a generated class share one class, which says nothing.
        if getattr(type(operation), "OPERATION_NAME", None) == name:
            self.by_class[type(operation)] = handler
        return handler


class Emitter:
    """Translates the operations of one function; see the module's docstring.

    Attributes:
      lines: the LLVM IR so far.
      allocations: what belongs to the beginning of the function: LLVM promotes memory to registers
        only if it is allocated in the first basic block.
      values: LLVM type and name of each MLIR value.
      block: label of the basic block that lines are appended to.
      suffix: what ends each instruction: its debug location, or nothing.
      yielded: operands of the last region terminator, else None.
      condition: the condition of the last ``scf.condition``.
      device: whether the code is for a GPU (else it is for the host, in tests).
      metadata: the metadata of the module.
      successors: labels of the MLIR blocks of the innermost region that has several.
      incoming: by label, the edges to it so far: block that they come from, and operands.
      alignments: bytes that the addresses of memrefs are known to be multiples of.
      extents: along x, y and z, what the function fixes of its launch: the threads of a block
        ("ntid") and the blocks of a cluster ("cluster.nctaid").
    """

    def __init__(
        self,
        handlers: HandlerTable,
        types: TypeTable,
        debug: DebugInfo | None,
        metadata: Metadata,
        device: bool,
    ):
        self.types = types
        self.lines: list[str] = []
        self.allocations: list[str] = []
        self.values: dict[Any, Operand] = {}
        self.block = ""
        self.suffix = ""
        self.yielded: list[Operand] | None = None
        self.condition: Operand = ("i1", "true")
        self.device = device
        self.metadata = metadata
        self.successors: list[tuple[Any, str]] = []
        self.incoming: dict[str, list[tuple[str, list[Operand]]]] = {}
        self.alignments: dict[Any, int] = {}
        self.extents: dict[str, tuple[int, ...]] = {}
        self._handlers = handlers
        self._debug = debug
        self._number = 0
        self._label = 0

    def run(self, block: Any) -> None:
        """Emits the operations of an MLIR block into the current basic block."""
        by_class = self._handlers.by_class
        debug = self._debug
        operation = None
        self.yielded = None
        try:
            for operation in block.operations:
                if debug is not None:
                    self.suffix = debug[operation.location.attr]
                handler = by_class.get(type(operation))
                if handler is None:
                    handler = self._handlers.find(operation)
                handler(self, operation)
        except PallasiteError as error:
            raise error.at(source_location(operation.location if operation else None)) from None

    def operands(self, operation: Any) -> list[Operand]:
        """Type and name of each operand."""
        values = self.values
        return [values[value] for value in operation.operation.operands]

    def typed(self, operation: Any) -> list[str]:
        """Each operand as ``type name``."""
        return [" ".join(operand) for operand in self.operands(operation)]

    def result_type(self, operation: Any) -> str:
        """LLVM type of the only result."""
        return self.types[operation.operation.result.type]

    def instruction(self, text: str) -> str:
        """Appends an instruction and returns the name of its result."""
        name = f"%{self._number}"
        self._number += 1
        self.lines.append(f"  {name} = {text}{self.suffix}")
        return name

    def allocate(self, text: str) -> str:
        """Puts an ``alloca`` at the beginning of the function and returns its name."""
        name = f"%local{len(self.allocations)}"
        self.allocations.append(f"  {name} = {text}{self.suffix}")
        return name

    def statement(self, text: str) -> None:
        """Appends an instruction that has no result."""
        self.lines.append(f"  {text}{self.suffix}")

    def define(self, operation: Any, type_: str, text: str) -> None:
        """Appends the instruction that computes the only result of an operation."""
        name = f"%{self._number}"
        self._number += 1
        self.lines.append(f"  {name} = {text}{self.suffix}")
        self.values[operation.operation.result] = (type_, name)

    def bind(self, operation: Any, type_: str, name: str) -> None:
        """Makes ``name`` the only result of an operation."""
        self.values[operation.operation.result] = (type_, name)

    def new_label(self) -> str:
        """A label for a basic block that :meth:`start` begins later."""
        self._label += 1
        return f"b{self._label}"

    def start(self, label: str) -> None:
        """Begins a basic block."""
        self.block = label
        self.lines.append(f"{label}:")

    def phi(self, type_: str) -> tuple[str, int]:
        """Reserves a phi instruction: its name, and the line for :meth:`fill_phi`."""
        name = f"%{self._number}"
        self._number += 1
        self.lines.append(f"  {name} = phi {type_} ")
        return name, len(self.lines) - 1

    def fill_phi(self, line: int, incoming: list[tuple[str, str]]) -> None:
        """Completes a phi instruction with pairs of value name and label."""
        pairs = ", ".join(f"[ {name}, %{label} ]" for name, label in incoming)
        self.lines[line] += pairs + self.suffix
