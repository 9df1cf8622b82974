"""Which kind of work an instruction is, and which unit of a multiprocessor does it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from pallasite_simulator.ptx.syntax import Instruction

KINDS = (
    "integer",
    "float16",
    "float32",
    "float64",
    "special function",
    "conversion",
    "comparison and selection",
    "move",
    "load",
    "store",
    "atomic",
    "asynchronous copy",
    "tensor",
    "warp exchange",
    "barrier and fence",
    "control",
    "other",
)
"""In the order in which they are shown. Loads, stores and atomic operations are split by space:
``"load global"``."""

_FLOATS = {
    **dict.fromkeys(("f16", "f16x2", "bf16", "bf16x2"), "float16"),
    **dict.fromkeys(("f32", "f32x2"), "float32"),
    "f64": "float64",
}
_OPCODES: dict[str, str] = {
    **dict.fromkeys(
        ("rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh"), "special function"
    ),
    **dict.fromkeys(("set", "setp", "selp", "slct", "testp"), "comparison and selection"),
    **dict.fromkeys(("mov", "cvta", "mapa", "getctarank", "isspacep", "szext"), "move"),
    **dict.fromkeys(("ld", "ldu", "ldmatrix"), "load"),
    **dict.fromkeys(("st", "stmatrix"), "store"),
    **dict.fromkeys(("atom", "red", "multimem"), "atomic"),
    **dict.fromkeys(("mma", "wmma", "wgmma", "tcgen05"), "tensor"),
    **dict.fromkeys(
        ("shfl", "vote", "match", "redux", "activemask", "elect", "movmatrix"), "warp exchange"
    ),
    **dict.fromkeys(("bar", "barrier", "mbarrier", "fence", "membar"), "barrier and fence"),
    **dict.fromkeys(("bra", "brx", "call", "ret", "exit", "trap", "brkpt"), "control"),
    **dict.fromkeys(
        (
            "nanosleep", "griddepcontrol", "setmaxnreg", "pmevent", "discard", "applypriority",
            "prefetch", "prefetchu", "createpolicy", "clusterlaunchcontrol", "tensormap", "alloca",
            "stacksave", "stackrestore",
        ),
        "other",
    ),
    "cvt": "conversion",
    "cp": "asynchronous copy",
}  # fmt: skip
_SPACES = ("global", "shared", "local", "const", "param")

_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")

_TENSOR_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("f16", "bf16"), "f16"),
    "tf32": "tf32",
    "f64": "f64",
    **dict.fromkeys(("e4m3", "e5m2"), "f8"),
    **dict.fromkeys(("e2m3", "e3m2"), "f6"),
    "e2m1": "f4",
    **dict.fromkeys(("s8", "u8"), "i8"),
    **dict.fromkeys(("s4", "u4"), "i4"),
    "b1": "b1",
}
"""Types of multiplicands to the name of their rate in :mod:`.chips`."""


def kind_of(instruction: Instruction) -> str:
    """One of :data:`KINDS`, with the state space for accesses to memory."""
    opcode = instruction.opcode
    kind = _OPCODES.get(opcode)
    if kind is None:
        types = [one for one in instruction.modifiers if one in _FLOATS]
        if opcode == "div" and types == ["f32"] and instruction.has("approx"):
            return "special function"
        return _FLOATS[types[0]] if types else "integer"
    if opcode in ("wgmma", "tcgen05"):
        return kind if tensor_work(instruction) or instruction.has("mma") else _tensor_help(opcode)
    if kind in ("load", "store", "atomic"):
        return f"{kind} {space_of(instruction)}"
    return kind


def space_of(instruction: Instruction) -> str:
    """The state space that a load, store or atomic operation names, else ``"generic"``."""
    if instruction.opcode in ("ldmatrix", "stmatrix"):
        return "shared"
    for modifier in instruction.modifiers:
        space = modifier.partition("::")[0]
        if space in _SPACES:
            return space
    return "generic"


def tensor_work(instruction: Instruction) -> tuple[str, int] | None:
    """Multiplications and additions of one warp's MMA instruction.

    Returns:
      The type of the multiplicands as in a :class:`Chip`'s rates, and the operations; None for an
      instruction that is no MMA, or whose name does not give its shape. Sparse MMA counts as the
      dense MMA that takes the same time.
    """
    if instruction.opcode not in ("mma", "wmma", "wgmma"):
        return None
    match = next(filter(None, map(_SHAPE.fullmatch, instruction.modifiers)), None)
    types = [one for one in instruction.modifiers if one in (*_TENSOR_TYPES, "f32", "s32")]
    if match is None or (instruction.opcode == "wmma" and not instruction.has("mma")):
        return None
    # The result's type comes first: mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32.
    multiplicands = [_TENSOR_TYPES[one] for one in types[1:] if one in _TENSOR_TYPES]
    if not multiplicands:
        multiplicands = ["f16"]  # wmma.mma of f16 names only the types of C and D.
    operations = 2 * math.prod(map(int, match.groups()))
    if instruction.has("sp") or any(one.startswith("sp::") for one in instruction.modifiers):
        operations //= 2
    if instruction.opcode == "wgmma":
        operations //= 4  # A warpgroup does it together.
    return multiplicands[0], operations


def _tensor_help(opcode: str) -> str:
    """The kind of fences and moves of the tensor cores."""
    return "barrier and fence" if opcode == "wgmma" else "tensor"


RESULTS_PER_CLOCK: Mapping[str, str] = {
    "integer": "integer",
    "comparison and selection": "integer",
    "float16": "float32",
    "float32": "float32",
    "float64": "float64",
    "special function": "special",
    "conversion": "conversion",
}
"""Kinds of instructions to the pipes that execute them, by their names in :mod:`.chips`."""
