"""The syntax tree of PTX (PTX ISA, chapters 4, 5 and 11): plain frozen records.

The parser makes it, the loader flattens it, instruction rules read it. Names are kept as they are
written, with their leading ``%`` or ``$``.
"""

from __future__ import annotations

import builtins
import dataclasses

from pallasite.plugin import SourceLocation


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """A place in the PTX text: 1-based line and column."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


# Operands -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Register:
    """A declared register. ``name`` is unique in the kernel: where nested scopes declare the same
    name again, the parser appends ``#`` and a number. ``type`` is the declared one (``"b32"``)."""

    name: str
    type: str


@dataclasses.dataclass(frozen=True, slots=True)
class Special:
    """A special register, such as ``%tid.x`` (name ``"%tid"``, component ``"x"``) or
    ``%laneid`` (component empty)."""

    name: str
    component: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Immediate:
    """A constant. ``value`` is the integer (of any size and sign), or for ``kind`` ``"f32"`` and
    ``"f64"`` the bits of the float as an unsigned integer. Constant expressions are folded.
    Decimal floats such as ``1.5`` have kind ``"f64"``; ``WARP_SZ`` is 32."""

    value: int
    kind: str = "int"


@dataclasses.dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable or function, plus ``offset`` bytes (``mov.u64 %rd, name+16``).
    ``generic`` for ``generic(name)`` in initializers. Also a label, where one is meant."""

    name: str
    offset: int = 0
    generic: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """``[base+offset]``; ``base`` is None for an absolute address. ``coordinates`` is set for
    ``[map, {c0, c1}]`` of tensor instructions: coordinates may be followed by more operands in
    brackets (im2col offsets), which then are in ``extra``."""

    base: Register | Symbol | Special | None
    offset: int = 0
    coordinates: tuple[Operand, ...] | None = None
    extra: tuple[Operand, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, c, d}``."""

    elements: tuple[Operand, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Negated:
    """``!p`` as an operand, or ``-a`` where an instruction allows it."""

    operand: Operand


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``: two destinations of one instruction (``setp``, ``shfl``, ``match``, ``elect``)."""

    first: Operand
    second: Operand


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """``r.b2``: bytes (``b``) or halves (``h``) of a register, by their numbers, the highest first,
    for video instructions."""

    register: Register
    selection: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sink:
    """``_``: a destination that is thrown away, or a source that is not given."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """``(a, b)``: the results or arguments of ``call``."""

    elements: tuple[Operand, ...]


Operand = (
    Register
    | Special
    | Immediate
    | Symbol
    | Address
    | Vector
    | Negated
    | Part
    | Pair
    | Sink
    | Arguments
)


# Statements ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
      opcode: what stands before the first dot (``"ld"``, ``"cp"``).
      modifiers: the other parts of the name, in order (``("global", "v4", "b32")``); a ``::`` stays
        inside its part (``"shared::cta"``, ``"mbarrier::complete_tx::bytes"``).
      operands: in order of appearance.
      predicate: the guard, or None; executed where it is true, or false if ``predicate_negated``.
      position: of the opcode in the PTX.
      text: as written, without guard and semicolon, with white space collapsed.
      location: the user's source line, from ``.loc`` and ``.file``.
    """

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    position: Position
    text: str
    predicate: Register | None = None
    predicate_negated: bool = False
    location: SourceLocation | None = None

    @property
    def name(self) -> str:
        """The whole dotted name."""
        return ".".join((self.opcode, *self.modifiers))

    def has(self, *modifiers: str) -> bool:
        """Whether all these modifiers are there."""
        return all(one in self.modifiers for one in modifiers)


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """``name:``; unique in the kernel, made so like :class:`Register` names."""

    name: str
    position: Position


@dataclasses.dataclass(frozen=True, slots=True)
class BranchTargets:
    """``name: .branchtargets a, b, c;``: the table of a ``brx.idx``."""

    name: str
    labels: tuple[str, ...]
    position: Position


@dataclasses.dataclass(frozen=True, slots=True)
class ImplicitDefinition:
    """LLVM's comment ``// implicit-def: %r1``: the value of the register does not matter."""

    register: Register
    position: Position


Statement = Instruction | Label | BranchTargets | ImplicitDefinition


# Declarations -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Variable:
    """A variable in a state space, or a parameter.

    Attributes:
      name: unique in the module (parameters: in the function).
      space: ``"global"``, ``"const"``, ``"shared"``, ``"local"`` or ``"param"``.
      type: of an element, as written (``"b8"``, ``"u64"``, ``"f32"``).
      bytes: size in all; 0 for an array of unknown size (``.extern .shared x[];``).
      alignment: in bytes.
      initial: the initial contents, at most ``bytes`` long (zeros follow), or None.
      addresses: pairs of a byte offset in ``initial`` and the symbol whose address stands there.
      external: declared ``.extern``.
    """

    name: str
    space: str
    type: str
    bytes: int
    alignment: int
    position: Position
    initial: builtins.bytes | None = None
    addresses: tuple[tuple[int, Symbol], ...] = ()
    external: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """An ``.entry`` or ``.func``.

    Attributes:
      name: its name.
      entry: whether it is a kernel.
      parameters: in order; of a ``.func`` they may be registers.
      results: of a ``.func``.
      directives: performance directives by name without dot: ``{"reqntid": (128, 1, 1),
        "maxntid": ..., "minnctapersm": (1,), "maxnreg": ..., "reqnctapercluster": (2, 1, 1),
        "explicitcluster": (), "noreturn": ()}``.
      registers: all declared registers.
      variables: declared inside (``local``, ``shared``, ``param`` and others), renamed if needed.
      body: the statements, scopes flattened; None for a declaration.
      error: why the body could not be read; it is empty then.
    """

    name: str
    entry: bool
    parameters: tuple[Variable | Register, ...]
    results: tuple[Variable | Register, ...]
    directives: dict[str, tuple[int, ...]]
    registers: tuple[Register, ...]
    variables: tuple[Variable, ...]
    body: tuple[Statement, ...] | None
    position: Position
    error: Exception | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A PTX file."""

    version: tuple[int, int]
    target: str
    address_size: int
    variables: tuple[Variable, ...]
    functions: tuple[Function, ...]
    files: dict[int, str]
