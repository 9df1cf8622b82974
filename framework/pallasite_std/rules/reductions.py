"""Reductions and scans over any axes: in registers, across lanes, across warps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError, RuleSet, Semantics, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import (
    LANES,
    Layout,
    ReductionPlan,
    RegisterLayout,
    SplatLayout,
    padded,
    reduction_plan,
)
from pallasite.plugin.lowering import LayoutContext, RegisterArray, RuleContext, Value, relayout
from pallasite_std.math.table import BINARY
from pallasite_std.memory.padding import fill_padding
from pallasite_std.memory.reduced_layouts import reduced
from pallasite_std.rules.opaque import bits_of

rules = RuleSet()
lax = _jax.lax_primitives

type Combine = Callable[[ir.Value, ir.Value], ir.Value]


def combiner(ctx: RuleContext, name: str, dtype: np.dtype[Any]) -> Combine:
    """The function that combines two registers, by the name of a binary function."""
    return lambda x, y: BINARY[name](x, y, dtype, ctx.params.approx_math)


def _pairwise(combine: Combine, values: Sequence[ir.Value]) -> ir.Value:
    values = list(values)
    while len(values) > 1:
        paired = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        if len(values) % 2:
            paired.append(values[-1])
        values = paired
    return values[0]


def shuffle(value: ir.Value, mode: str, amount: ir.Value | int) -> ir.Value:
    """Another lane's value (``shfl.sync``, PTX ISA 9.7.9.6); ``mode`` is ``bfly`` or ``idx``.

    Works on scalars and vectors of any width; 32 bits move at a time.
    """
    bits = bits_of(value.type)
    amount = ops.i32_constant(amount) if isinstance(amount, int) else amount

    def move(word: ir.Value) -> ir.Value:
        return ops.intrinsic(
            ops.i32(),
            f"llvm.nvvm.shfl.sync.{mode}.i32",
            ops.i32_constant(-1),
            word,
            amount,
            ops.i32_constant(31),
        )

    if bits < 32:
        narrow = ir.IntegerType.get_signless(bits)
        word = ops.cast_integer(ops.bitcast(value, narrow), ops.i32(), signed=False)
        return ops.bitcast(ops.cast_integer(move(word), narrow), value.type)
    if bits == 32:
        return ops.bitcast(move(ops.bitcast(value, ops.i32())), value.type)
    words = ops.bitcast(value, ir.VectorType.get((bits // 32,), ops.i32()))
    moved = [move(ops.extract(words, i)) for i in range(bits // 32)]
    if bits // ops.vector_length(value) == 64:
        # LLVM would widen both words, shift one and join them.
        moved = [_joined(*moved[i : i + 2]) for i in range(0, len(moved), 2)]
    return ops.bitcast(ops.from_elements(moved), value.type)


def _joined(low: ir.Value, high: ir.Value) -> ir.Value:
    """An i64 of two words."""
    text = "mov.b64 $0, {$1, $2};"
    return ops.inline_assembly(text, "=l,r,r", low, high, results=[ops.i64()], side_effects=False)


def neutral_element(name: str, dtype: np.dtype[Any]) -> Any:
    """What a binary function combines with any element without changing it."""
    if name in ("add", "or", "xor"):
        return 0
    if name == "mul":
        return 1
    if types.is_bool(dtype):
        return 1 if name in ("min", "and") else 0
    if name == "and":
        return -1
    if types.is_float(dtype):
        info = _jax.finfo(dtype)
        if np.isinf(np.asarray(np.inf, dtype)):
            return np.inf if name == "min" else -np.inf
        return info.max if name == "min" else info.min
    bits = types.bit_width(dtype)
    signed = types.is_signed(dtype)
    least, most = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return most if name == "min" else least


def reduce_by_name(
    ctx: RuleContext, array: RegisterArray, axes: Sequence[int], name: str
) -> RegisterArray:
    """Combines the elements along ``axes`` by a binary function; see :func:`reduce_array`."""
    votes = {"or": True, "max": True, "and": False, "min": False}
    return reduce_array(
        ctx,
        array,
        axes,
        combiner(ctx, name, array.dtype),
        neutral_element(name, array.dtype),
        votes_for=votes.get(name) if types.is_bool(array.dtype) else None,
        at_once=_instruction(name, array.dtype),
    )


def _instruction(name: str, dtype: np.dtype[Any]) -> str | None:
    """The function that combines integers of all lanes of a warp at once, if there is one
    (``redux.sync``, PTX ISA 9.7.13.8)."""
    if types.is_float(dtype) or types.is_bool(dtype) or types.bit_width(dtype) != 32:
        return None
    if name in ("min", "max"):
        return name if types.is_signed(dtype) else f"u{name}"
    return name if name in ("add", "and", "or", "xor") else None


def reduce_array(
    ctx: RuleContext,
    array: RegisterArray,
    axes: Sequence[int],
    combine: Combine,
    neutral: Any,
    *,
    votes_for: bool | None = None,
    at_once: str | None = None,
) -> RegisterArray:
    """Combines the elements along ``axes``; the order of combination is fixed by the layout.

    ``neutral`` is a number that changes no element that it is combined with. Of conditions,
    ``votes_for`` is what the result is if any of them is; lanes find that out by a vote. Where one
    instruction combines numbers of 32 bits of a warp, ``at_once`` is its name.
    """
    if array.is_splat or array.size == 1:
        raise UnsupportedError("a reduction of equal elements needs its own formula")
    layout = array.layout
    assert isinstance(layout, RegisterLayout)
    try:
        plan = reduction_plan(layout, axes)
    except InvalidValueError:
        # Threads run across the reduced dimensions: bring the array into a shape that splits.
        array = relayout(ctx, array, padded(array.shape))
        assert isinstance(array.layout, RegisterLayout)
        plan = reduction_plan(array.layout, axes)
    filler = RegisterArray.constant(neutral, array.dtype).scalar
    array = fill_padding(ctx.launch, array, filler, [axis % len(array.shape) for axis in axes])
    registers = [
        _pairwise(combine, [array.registers[number] for number in group])
        for group in plan.register_groups
    ]
    if plan.vector_groups != ((0,),) or array.vector_length > 1:
        registers = [_reduce_vector(combine, register, plan) for register in registers]
    if plan.lane_masks or plan.lane_rotations:
        length = ops.vector_length(registers[0])
        if votes_for is not None and not plan.lane_rotations:
            registers = [_vote(ctx, r, plan.lane_masks, votes_for) for r in registers]
        elif at_once is not None and sum(plan.lane_masks) == LANES - 1 and len(registers) < _MANY:
            registers = [_of_warp(register, at_once) for register in registers]
        else:
            registers = _packed(registers)
            registers = _across_lanes(ctx, combine, registers, plan.lane_masks)
            for rotation in plan.lane_rotations:
                registers = [_rotate(ctx, combine, r, rotation) for r in registers]
            registers = _unpacked(registers, length)
    if plan.crosses_warps:
        registers = _across_warps(ctx, combine, registers, plan)
    if isinstance(plan.layout, SplatLayout):
        return RegisterArray.splat(ops.extract(registers[0], 0), array.dtype, plan.layout.shape)
    return RegisterArray(tuple(registers), plan.layout, array.dtype)


_MANY = 8
"""Registers of which each lane reduces some for the others."""


def _across_lanes(
    ctx: RuleContext, combine: Combine, registers: list[ir.Value], masks: Sequence[int]
) -> list[ir.Value]:
    """Combines what lanes hold whose numbers differ in some bits; all get all results.

    Where there are many registers, the lanes of a pair exchange half of them and go on with the
    other half each, so that results are distributed over the lanes, and handed round at the end.
    Elements are combined in the same order either way.
    """
    if len(registers) < _MANY or len(masks) < 3:
        for mask in masks:
            registers = [combine(r, shuffle(r, "bfly", mask)) for r in registers]
        return registers
    if registers[-1].type != registers[0].type:  # Fewer narrow elements are left for the last one.
        last = _across_lanes(ctx, combine, registers[-1:], masks)
        return [*_across_lanes(ctx, combine, registers[:-1], masks), *last]
    lane = ctx.launch.lane_id
    # Which lane, by the bits of the masks, has the result of each register; and at which place.
    owners = [0] * len(registers)
    places = list(range(len(registers)))
    for mask in masks:
        bit = ops.compare("ne", ops.bitwise_and(lane, mask), 0)
        half = len(registers) // 2
        exchanged = []
        for first, second in zip(registers[:half], registers[half : 2 * half], strict=True):
            kept = ops.arith.select(bit, second, first)
            given = ops.arith.select(bit, first, second)
            exchanged.append(combine(kept, shuffle(given, "bfly", mask)))
        last = [combine(r, shuffle(r, "bfly", mask)) for r in registers[2 * half :]]
        for number, place in enumerate(places):
            if half <= place < 2 * half:
                owners[number] |= mask
                places[number] = place - half
            elif place == 2 * half:
                places[number] = half
        registers = exchanged + last
    others = ops.bitwise_and(lane, 31 & ~sum(masks))
    return [
        shuffle(registers[place], "idx", ops.add(others, owner))
        for owner, place in zip(owners, places, strict=True)
    ]


def _of_warp(register: ir.Value, name: str) -> ir.Value:
    """What an instruction makes of the integers of all lanes, each of 32 bits."""
    everyone = ops.i32_constant(-1)
    parts = [ops.extract(register, n) for n in range(ops.vector_length(register))]
    found = [
        ops.intrinsic(ops.i32(), f"llvm.nvvm.redux.sync.{name}", part, everyone) for part in parts
    ]
    return ops.from_elements(found)


def _vote(ctx: RuleContext, register: ir.Value, masks: Sequence[int], wanted: bool) -> ir.Value:
    """Whether any condition of the lanes whose numbers differ in some bits is as wanted: then that,
    or else the opposite (``vote.sync``, PTX ISA 9.7.13.7)."""
    others = sum(1 << lane for lane in range(LANES) if not lane & ~sum(masks))
    first = ops.bitwise_and(ctx.launch.lane_id, LANES - 1 & ~sum(masks))

    def found(condition: ir.Value) -> ir.Value:
        if not wanted:
            condition = ops.bitwise_xor(condition, ops.i1_constant(True))
        everyone = ops.i32_constant(-1)
        votes = ops.intrinsic(ops.i32(), "llvm.nvvm.vote.ballot.sync", everyone, condition)
        if others != (1 << LANES) - 1:
            group = ops.arith.shli(ops.i32_constant(others), first)
            votes = ops.bitwise_and(votes, group)
        return ops.compare("ne" if wanted else "eq", votes, 0)

    parts = [found(ops.extract(register, n)) for n in range(ops.vector_length(register))]
    return ops.from_elements(parts)


def _reduce_vector(combine: Combine, register: ir.Value, plan: ReductionPlan) -> ir.Value:
    length = ops.vector_length(register)
    if len(plan.vector_groups) == length:
        return register
    if len(plan.vector_groups) == 1:
        # Halves first, so that packed instructions do most of the work.
        while length > 1 and length % 2 == 0:
            length //= 2
            register = combine(
                ops.slice_vector(register, 0, length),
                ops.slice_vector(register, length, length),
            )
    parts = (
        [
            _pairwise(combine, [ops.extract(register, element) for element in group])
            for group in plan.vector_groups
        ]
        if ops.vector_length(register) > 1
        else [ops.extract(register, 0)]
    )
    return ops.from_elements(parts)


def _packed(registers: Sequence[ir.Value]) -> list[ir.Value]:
    """Narrow registers side by side in 32 bits, which shuffles move at a time."""
    bits = bits_of(registers[0].type)
    each = 32 // bits if bits in (8, 16) else 1
    return [_side_by_side(registers[i : i + each]) for i in range(0, len(registers), each)]


def _side_by_side(registers: Sequence[ir.Value]) -> ir.Value:
    if len(registers) == 1:
        return registers[0]
    length = ops.vector_length(registers[0])
    return ops.from_elements([ops.extract(r, i) for r in registers for i in range(length)])


def _unpacked(registers: Sequence[ir.Value], length: int) -> list[ir.Value]:
    """Registers of a length, of which some lie side by side."""
    parts = []
    for register in registers:
        whole = ops.vector_length(register)
        if whole == length:
            parts.append(register)
        else:
            starts = range(0, whole, length)
            elements = [ops.extract(register, i) for i in range(whole)]
            parts += [ops.from_elements(elements[start : start + length]) for start in starts]
    return parts


def _rotate(ctx: RuleContext, combine: Combine, value: ir.Value, rotation: Any) -> ir.Value:
    """Combines the values of lanes whose number is no power of two.

    The first of them combines runs of 1, 2, 4 ... lanes, as many as its number has binary digits.
    All get its result, as rounding depends on the order.
    """
    own = ctx.launch.lane_id

    def behind(value: ir.Value, count: int) -> ir.Value:
        # What comes from outside of the group does not reach its first lane.
        return shuffle(value, "idx", ops.add(own, count * rotation.stride))

    total: ir.Value | None = None
    covered, length, run = 0, 1, value
    while True:
        if rotation.size & length:
            part = behind(run, covered) if covered else run
            total = part if total is None else combine(total, part)
            covered += length
        if covered == rotation.size:
            break
        run = combine(run, behind(run, length))
        length *= 2
    assert total is not None
    lane = ops.remainder_unsigned(own, rotation.modulus)
    digit = ops.remainder_unsigned(ops.divide_unsigned(lane, rotation.stride), rotation.size)
    return shuffle(total, "idx", ops.arith.subi(lane, ops.multiply(digit, rotation.stride)))


def _across_warps(
    ctx: RuleContext, combine: Combine, registers: list[ir.Value], plan: ReductionPlan
) -> list[ir.Value]:
    """Exchanges partial results between warps through scratch shared memory."""
    launch = ctx.launch
    if ctx.in_warp:
        raise UnsupportedError("a reduction across warps inside a warp-mapped region")
    lanes = [lane for lane in range(32) if plan.lane_mask >> lane & 1]
    value = registers[0]
    is_bit = isinstance(value.type, ir.IntegerType) and value.type.width == 1
    store_type = ops.i8() if is_bit else value.type
    size = max(1, bits_of(store_type) // 8)
    per_register = 4 * len(lanes) * size
    limit = max(ctx.params.reduction_scratch_bytes, 512)
    batch = min(max(1, limit // per_register), len(registers))
    results: list[ir.Value] = []
    warp, lane = launch.warp_id, launch.lane_id
    with ctx.scratch(batch * per_register, "scratch for layout changes and reductions") as (
        pointer,
        _,
    ):
        position = _position(ctx, lane, lanes)
        slot = ops.multiply(position, 4)
        mine = ops.element_pointer(pointer, ops.add(slot, warp), store_type)
        holds = None
        if len(lanes) < 32:
            mask = ops.i32_constant(plan.lane_mask)
            bit = ops.bitwise_and(ops.arith.shrui(mask, lane), 1)
            holds = ops.compare("ne", bit, 0)
        for start in range(0, len(registers), batch):
            group = registers[start : start + batch]
            ctx.synchronize()

            def put(group: Sequence[ir.Value] = group) -> None:
                for number, register in enumerate(group):
                    stored = ops.arith.extui(ops.i8(), register) if is_bit else register
                    ops.store(
                        stored,
                        ops.element_pointer(mine, number * 4 * len(lanes), store_type),
                        alignment=size,
                    )

            if holds is None:
                put()
            else:
                with ops.when(holds):
                    put()
            ctx.synchronize()
            for number in range(len(group)):
                base = ops.element_pointer(pointer, slot, store_type)
                base = ops.element_pointer(base, number * 4 * len(lanes), store_type)
                partners = set(plan.warp_partners)
                if len(partners) == 1 and partners == {(0, 1, 2, 3)}:
                    chosen: list[ir.Value | int] = [0, 1, 2, 3]
                else:
                    count = len(plan.warp_partners[0])
                    chosen = [
                        _lookup(warp, [p[k] for p in plan.warp_partners]) for k in range(count)
                    ]
                loaded = []
                for other in chosen:
                    word = ops.load(
                        store_type, ops.element_pointer(base, other, store_type), alignment=size
                    )
                    loaded.append(ops.cast_integer(word, ops.i1()) if is_bit else word)
                results.append(_pairwise(combine, loaded))
    return results


def _position(ctx: RuleContext, lane: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """The number of this lane's result among the lanes that hold different ones."""
    if len(lanes) == 32:
        return lane
    if len(lanes) == 1:
        return ops.i32_constant(0)
    step = lanes[1] - lanes[0]
    if list(lanes) == [i * step for i in range(len(lanes))]:
        return ops.remainder_unsigned(ops.divide_unsigned(lane, step), len(lanes))
    result: ir.Value | None = None
    weight = 1
    remaining = list(lanes)
    bit = 1
    while bit < 32:
        if any(number & bit for number in remaining):
            digit = ops.bitwise_and(ops.divide_unsigned(lane, bit), 1)
            term = ops.multiply(digit, weight)
            result = term if result is None else ops.add(result, term)
            weight *= 2
        bit *= 2
    if weight != len(lanes) or result is None:
        raise UnsupportedError("a reduction over lanes that do not form a power of two")
    return result


def _lookup(index: ir.Value, values: Sequence[int]) -> ir.Value:
    """``values[index]`` for small numbers, packed into one constant (8 bits each)."""
    packed = sum(value << (8 * position) for position, value in enumerate(values))
    word = ops.i32_constant(packed)
    shifted = ops.arith.shrui(word, ops.multiply(index, 8))
    return ops.bitwise_and(shifted, 255)


def _splat_reduction(ctx: RuleContext, name: str, x: RegisterArray, count: int) -> RegisterArray:
    shape = ctx.avals_out[0].shape
    if name == "add":
        from pallasite_std.math.conversion import convert

        number = np.asarray(count)
        value = convert(ops.constant(int(number), ops.i64()), np.dtype(np.int64), x.dtype)
        return RegisterArray.splat(BINARY["mul"](x.scalar, value, x.dtype, False), x.dtype, shape)
    if name in ("max", "min", "and", "or"):
        return RegisterArray.splat(x.scalar, x.dtype, shape)
    value = x.scalar
    total: ir.Value | None = None
    while count:
        if count & 1:
            total = value if total is None else BINARY[name](total, value, x.dtype, False)
        value = BINARY[name](value, value, x.dtype, False)
        count >>= 1
    assert total is not None
    return RegisterArray.splat(total, x.dtype, shape)


def _register(primitive: Any, name: str) -> None:
    @rules.lowering(primitive, Semantics.LANE)
    def _rule(ctx: RuleContext, x: RegisterArray, *, axes: Sequence[int], **params: Any) -> Value:
        if not axes:
            return x
        if x.is_splat or x.size == 1:
            count = int(np.prod([x.shape[axis] for axis in axes]))
            return _splat_reduction(ctx, name, x, count)
        wide, back = _accumulate_in(name, x.dtype)
        if wide != x.dtype:
            from pallasite_std.math.conversion import convert

            source = x.dtype
            x = x.map(lambda r: _widened(r, source) or convert(r, source, wide), wide)
            result = reduce_by_name(ctx, x, axes, name)
            return result.map(lambda r: convert(r, wide, back), back)
        return reduce_by_name(ctx, x, axes, name)

    @rules.layout(primitive)
    def _layout(
        ctx: LayoutContext, wanted: Sequence[Layout | None], *, axes: Sequence[int], **params: Any
    ) -> list[Layout | None]:
        aval = ctx.avals_in[0]
        return [reduced(tuple(aval.shape), tuple(axes), types.bit_width(aval.dtype))]


def _widened(value: ir.Value, dtype: np.dtype[Any]) -> ir.Value | None:
    """Bytes as halves of words, two by one instruction; None of an odd number of bytes."""
    if dtype not in (np.int8, np.uint8) or ops.vector_length(value) % 2:
        return None
    half = ir.IntegerType.get_signless(16)
    if not isinstance(value.owner, ir.Block) and value.owner.name == "vector.from_elements":
        # What was loaded byte by byte is so wide anyway.
        signed = dtype == np.int8
        parts = [ops.cast_integer(one, half, signed=signed) for one in value.owner.operands]
        return ops.from_elements(parts)
    count = ops.vector_length(value)
    # Bytes 0 to 3, each followed by 0 or by its sign (PTX ISA 9.7.10.5, prmt).
    selectors = [0x9180, 0xB3A2] if dtype == np.int8 else [0x4140, 0x4342]
    if count % 4:
        selectors = selectors[:1]
        halves = ops.bitcast(value, ir.VectorType.get((count // 2,), half))
        parts = [ops.extract(halves, number) for number in range(count // 2)]
        words = [ops.cast_integer(part, ops.i32(), signed=False) for part in parts]
    else:
        whole = ops.bitcast(value, ir.VectorType.get((count // 4,), ops.i32()))
        words = [ops.extract(whole, number) for number in range(count // 4)]
    wide = [
        ops.intrinsic(
            ops.i32(), "llvm.nvvm.prmt", word, ops.i32_constant(0), ops.i32_constant(selector)
        )
        for word in words
        for selector in selectors
    ]
    return ops.bitcast(ops.from_elements(wide), ir.VectorType.get((count,), half))


def _accumulate_in(name: str, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Narrow floats are summed in f32 and rounded once; there are no instructions for bytes."""
    if name in ("add", "mul") and types.is_float(dtype) and types.bit_width(dtype) < 32:
        return np.dtype(np.float32), dtype
    if dtype in (np.int8, np.uint8):
        return np.dtype(np.int16 if dtype == np.int8 else np.uint16), dtype
    return dtype, dtype


for _primitive, _name in (
    (lax.reduce_sum_p, "add"),
    (lax.reduce_prod_p, "mul"),
    (lax.reduce_max_p, "max"),
    (lax.reduce_min_p, "min"),
    (lax.reduce_and_p, "and"),
    (lax.reduce_or_p, "or"),
    (lax.reduce_xor_p, "xor"),
):
    _register(_primitive, _name)


def _register_arg(primitive: Any, largest: bool) -> None:
    @rules.lowering(primitive, Semantics.LANE)
    def _rule(
        ctx: RuleContext, x: RegisterArray, *, axes: Sequence[int], index_dtype: Any
    ) -> RegisterArray:
        """The smallest index of an extreme element: extreme first, then the least index."""
        from pallasite.plugin.lowering import elementwise
        from pallasite_std.rules.shape import iota

        (axis,) = axes
        wide = np.dtype(index_dtype)
        # Wider numbers would take more registers, and more exchanges between lanes.
        index_dtype = np.dtype(np.int32) if types.bit_width(wide) > 32 else wide
        if x.is_splat or x.shape[axis] == 1:
            return RegisterArray.constant(0, wide, ctx.avals_out[0].shape)
        if isinstance(x.layout, RegisterLayout) and x.layout.flat:
            x = relayout(ctx, x, padded(x.shape))
        extreme = reduce_by_name(ctx, x, axes, "max" if largest else "min")
        layout = x.layout
        assert isinstance(layout, RegisterLayout)
        from pallasite.plugin.layouts import transforms as tf
        from pallasite.plugin.lowering import rearrange

        dims = tuple(d for d in range(len(x.shape)) if d != axis)
        if extreme.is_splat:
            broadcast = RegisterArray.splat(extreme.scalar, x.dtype, x.shape)
        else:
            broadcast = rearrange(extreme, tf.broadcast_with_target(extreme.layout, layout, dims))
        numbers = iota(ctx, layout, index_dtype, axis)
        worst = RegisterArray.constant(x.shape[axis] - 1, index_dtype, x.shape)
        same = elementwise(
            lambda a, b: BINARY["eq"](a, b, x.dtype, False), [x, broadcast], np.bool_, x.shape
        )
        if types.is_float(x.dtype):
            nan = elementwise(
                lambda a, b: BINARY["ne"](a, b, x.dtype, False), [x, x], np.bool_, x.shape
            )
            same = elementwise(lambda a, b: ops.arith.ori(a, b), [same, nan], np.bool_, x.shape)
        chosen = elementwise(
            lambda p, a, b: ops.arith.select(p, a, b), [same, numbers, worst], index_dtype, x.shape
        )
        least = reduce_by_name(ctx, chosen, axes, "min")
        if wide == index_dtype:
            return least
        from pallasite_std.math.conversion import convert

        return least.map(lambda r: convert(r, index_dtype, wide), wide)

    @rules.layout(primitive)
    def _layout(
        ctx: LayoutContext, wanted: Sequence[Layout | None], *, axes: Sequence[int], **params: Any
    ) -> list[Layout | None]:
        # Indices are compared, too, which have 32 bits or more.
        aval = ctx.avals_in[0]
        return [reduced(tuple(aval.shape), tuple(axes), max(32, types.bit_width(aval.dtype)))]


_register_arg(lax.argmax_p, True)
_register_arg(lax.argmin_p, False)
