"""Products of matrices in tensor memory: PTX ISA 9.7.16.10.9, tcgen05.mma in all its forms."""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from pallasite_blackwell.simulation.instruction_descriptors import DEPTHS, SCALED, Variant
from pallasite_blackwell.simulation.multiplication import Arguments, Multiplier
from pallasite_blackwell.simulation.tensor_memory import TARGETS, cta_group, require_target
from pallasite_simulator.binder import PRED, U32, U64, Binder, Source
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.ptx.syntax import Address, Immediate, Instruction, Vector

instructions = InstructionSet()

_INTEGER_TARGETS = frozenset(("sm_100a", "sm_101a", "sm_110a"))
"""Those with products of integers."""

_SCALED_D_TARGETS = frozenset(("sm_100a", "sm_100f", "sm_101a", "sm_103a", "sm_103f"))
"""Those that can scale the D that they add to."""

_SCALE_TARGETS = frozenset(("sm_100a", "sm_101a", "sm_103a", "sm_110a"))
"""Those where the name may give the number of scale factors, and with sparse elements of 4 bits."""

_BLOCKS = {
    ("mxf8f6f4", ""): 32,
    ("mxf8f6f4", "scale_vec::1X"): 32,
    ("mxf8f6f4", "block32"): 32,
    ("mxf4", ""): 32,
    ("mxf4", "scale_vec::2X"): 32,
    ("mxf4", "block32"): 32,
    ("mxf4nvf4", "scale_vec::2X"): 32,
    ("mxf4nvf4", "block32"): 32,
    ("mxf4nvf4", "scale_vec::4X"): 16,
    ("mxf4nvf4", "block16"): 16,
}
"""Elements along K that share a scale factor, by kind and what the name says."""

_COLLECTOR = re.compile(r"collector::(a|b[0-3])(::(fill|use|lastuse|discard))?")


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """What the name says.

    Attributes:
      variant: what the instruction descriptor depends on.
      block: elements that share a scale factor, or 0.
      shifted: whether the rows of A are shifted by one (``.ashift``).
    """

    variant: Variant
    block: int
    shifted: bool


@instructions.register("tcgen05.mma")
def bind_product(instruction: Instruction, binder: Binder) -> Step:
    """Multiplies matrices: PTX ISA 9.7.16.10.9.1 to 4, tcgen05.mma, .sp, .ws and .ws.sp."""
    require_target(binder, TARGETS, "tensor memory")
    form = _parse(binder)
    operands = _Operands(binder, form)
    multiplier = Multiplier(form.variant, form.block, form.shifted, instruction)

    def step(lanes: Lanes) -> None:
        multiplier.run(lanes, operands.read(lanes))

    return step


def _parse(binder: Binder) -> Form:
    """Takes the name apart.

    Raises:
      PtxError: there is no such instruction.
    """
    words = binder.instruction.modifiers
    group = cta_group(binder)
    kinds = [one.removeprefix("kind::") for one in words if one.startswith("kind::")]
    if len(kinds) != 1 or kinds[0] not in DEPTHS:
        raise binder.error("the instruction names one kind", expected=", ".join(DEPTHS))
    kind = kinds[0]
    sparse, stationary, scaled = "sp" in words, "ws" in words, "block_scale" in words
    vectors = [
        one for one in words if one.startswith("scale_vec::") or one in ("block16", "block32")
    ]
    collectors = [one for one in words if one.startswith("collector::")]
    known = {"mma", "sp", "ws", "block_scale", "ashift", f"kind::{kind}", f"cta_group::{group}"}
    for one in words:
        if one not in known and one not in vectors and one not in collectors:
            raise binder.error(f"unknown modifier .{one}")
    if scaled != (kind in SCALED) or len(vectors) > 1 or (vectors and not scaled):
        raise binder.error("scale factors belong to the kinds " + ", ".join(SCALED))
    vector = vectors[0] if vectors else ""
    block = 0
    if scaled:
        if (kind, vector) not in _BLOCKS:
            raise binder.error(
                "the kind has no such size of blocks with a scale factor", got=vector or "none"
            )
        block = _BLOCKS[kind, vector]
        if vector.startswith("scale_vec") or (sparse and kind.startswith("mxf4")):
            require_target(binder, _SCALE_TARGETS, vector or f".sp of .kind::{kind}")
    if stationary and (group == 2 or scaled):
        raise binder.error(".ws is for one block, and has no scale factors")
    if len(collectors) > 1 or not all(_COLLECTOR.fullmatch(one) for one in collectors):
        raise binder.error("unknown hint for the collector", got=", ".join(collectors))
    if collectors and (collectors[0][11] == "b") != stationary:
        raise binder.error("wrong collector", got=collectors[0])
    if kind == "i8":
        require_target(binder, _INTEGER_TARGETS, ".kind::i8")
    shifted = "ashift" in words
    if shifted and (stationary or not isinstance(binder.operand(1), Address)):
        raise binder.error(".ashift is for A in tensor memory, without .ws")
    target = binder.program.module.target
    return Form(Variant(kind, group, sparse, stationary, target), block, shifted)


class _Operands:
    """The operands of an instruction."""

    def __init__(self, binder: Binder, form: Form):
        variant = form.variant
        self._d = binder.address(0)
        self._in_tensor_memory = isinstance(binder.operand(1), Address)
        self._a = binder.address(1) if self._in_tensor_memory else binder.source(1, U64)
        self._b = binder.source(2, U64)
        place = 3
        self._metadata: Source | None = None
        if variant.sparse:
            self._metadata = binder.address(place)
            place += 1
        self._descriptor = binder.source(place, U32)
        place += 1
        self._scales: list[Source] = []
        if form.block:
            self._scales = [binder.address(place), binder.address(place + 1)]
            place += 2
        self._disabled: list[Source] = []
        if not variant.stationary and isinstance(binder.operand(place), Vector):
            elements = binder.elements(place)
            if form.block or len(elements) != 4 * variant.group:
                raise binder.error(
                    "wrong number of registers for disabled lanes",
                    got=len(elements),
                    expected="none" if form.block else str(4 * variant.group),
                )
            self._disabled = [binder.source(one, U32) for one in elements]
            place += 1
        self._keep = binder.source(place, PRED)
        place += 1
        self._mask: Source | None = None
        self.shift = 0
        count = len(binder.instruction.operands)
        if count > place and variant.stationary:
            self._mask = binder.source(place, U64)
            place += 1
        elif count == place + 1 and not form.block:
            if variant.kind not in ("f16", "tf32"):
                raise binder.error("a scale of D is for products of the kinds f16 and tf32")
            require_target(binder, _SCALED_D_TARGETS, "scaled input of D")
            scale = binder.operand(place)
            if not isinstance(scale, Immediate) or not 0 <= scale.value <= 15:
                raise binder.error("the scale of D must be a constant", expected="0 to 15")
            self.shift = scale.value
            place += 1
        binder.expect_operands(place)

    def read(self, lanes: Lanes) -> list[Arguments]:
        """The arguments of each lane."""

        def each(source: Source | None) -> list[int]:
            if source is None:
                return [0] * lanes.count
            found: list[int] = np.broadcast_to(source(lanes), (lanes.count,)).tolist()
            return found

        scales = [each(one) for one in self._scales] or [each(None)] * 2
        disabled = [each(one) for one in self._disabled]
        columns = zip(
            each(self._d),
            each(self._a),
            each(self._b),
            each(self._descriptor),
            each(self._keep),
            each(self._metadata),
            *scales,
            each(self._mask),
            strict=True,
        )
        return [
            Arguments(
                d,
                a,
                self._in_tensor_memory,
                b,
                descriptor,
                bool(keep),
                metadata,
                (scale_a, scale_b),
                tuple(one[number] for one in disabled),
                self.shift,
                mask,
            )
            for number, (d, a, b, descriptor, keep, metadata, scale_a, scale_b, mask) in enumerate(
                columns
            )
        ]
