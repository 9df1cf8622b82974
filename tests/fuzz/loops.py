"""Random kernels of nested loops and branches, against JAX on the CPU.

Loops of all kinds carry scalars and arrays, splats among them, exchange them, end when what they
compute says so, or do nothing; counters have all integer types and are near the limits of these.
Bodies load and store references at places that are computed of what is carried, compare what they
load with it, and branch on the result. The last values of all variables are compared.

    python -m tests.fuzz loops --seed 0 --count 100
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from tests.fuzz import _executors
from tests.fuzz import _loop_terms as terms
from tests.fuzz._loop_programs import Block, Machine, Program, Reference, Run, Statement, Type
from tests.fuzz._loop_programs import check as check
from tests.fuzz._loop_terms import BOOL, FLOAT32, INT32
from tests.fuzz._seeds import add_options, check_seeds

from pallasite import gpu as plgpu

SIDES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 24, 33, 40)
NARROW = tuple(map(np.dtype, ("int8", "uint8", "int16", "uint16", "uint32")))
WIDE = tuple(map(np.dtype, ("int64", "uint64")))
LARGEST = 700
"""Elements of an array."""

type Operand = tuple[str, Callable[[list[Any]], Any]]
"""A value or a constant: its text, and what takes it from the values so far."""


class Generator:
    """Makes a program from a random state.

    Args:
      choose: the random state.
      length: statements, at most.
    """

    def __init__(self, choose: random.Random, length: int):
        self.choose = choose
        self.left = length
        self.types: list[Type] = []
        self.block = Block()
        self.used: set[int] = set()
        self.references: list[Reference] = []
        self.depth = 0
        self.wide = choose.random() < 0.15
        # All memory of some programs is alike, and lanes hold several of its elements, so that
        # values of loops meet one another.
        self.alike = (choose.choice([16, 24, 33, 40]), choose.choice([13, 16, 17]))
        self.is_alike = choose.random() < 0.4

    def program(self) -> Program:
        """A program."""
        choose = self.choose
        inputs = [self.input() for _ in range(choose.randint(1, 2))]
        self.references = [Reference("input", x.shape, x.dtype) for x in inputs]
        self.references += [
            Reference(choose.choice(["shared", "shared", "global"]), self.shape(), self.dtype())
            for _ in range(choose.randint(1, 2))
        ]
        blocks = choose.choice([1, 1, 2, 3])
        self.types = [Type((), INT32, (0, blocks - 1))]
        for number, one in enumerate(self.references):
            if one.kind != "input":
                self.store_all(number)
        self.load_scalar()
        self.load_all()
        while self.left > 0:
            self.step()
        for number, one in enumerate(self.references):
            if one.kind != "input":
                self.load_all(number)
        outputs = [i for i in range(1, len(self.types)) if i not in self.used]
        self.block.results = tuple(outputs[-9:])
        results = [self.types[i] for i in self.block.results]
        semantics = choose.choice(list(plgpu.LoweringSemantics))
        return Program(self.references, inputs, blocks, self.block, results, semantics, self.wide)

    # What programs are made of ----------------------------------------------------------------

    def dtype(self) -> np.dtype[Any]:
        others = (*NARROW, FLOAT32, *(WIDE if self.wide else ()))
        often = 0.9 if self.is_alike else 0.55
        return INT32 if self.choose.random() < often else self.choose.choice(others)

    def shape(self) -> tuple[int, ...]:
        if self.is_alike and self.choose.random() < 0.9:
            return self.alike
        rank = self.choose.choice([1, 2, 2])
        while True:
            shape = tuple(self.choose.choice(SIDES) for _ in range(rank))
            if np.prod(shape) <= LARGEST:
                return shape

    def input(self) -> np.ndarray:
        shape, dtype = self.shape(), self.dtype()
        values = np.random.default_rng(self.choose.getrandbits(32))
        if dtype == FLOAT32:
            return (values.integers(-64, 64, shape) / 4).astype(dtype)
        info = np.iinfo(dtype)
        if self.choose.random() < 0.25:  # All numbers of the type.
            return values.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
        return values.integers(max(info.min, -20), 45, shape).astype(dtype)

    def pick(self, suits: Callable[[Type], bool]) -> int | None:
        """The number of a value, the last ones and those without a use more likely."""
        numbers = [i for i, one in enumerate(self.types) if suits(one)]
        if not numbers:
            return None
        without = [i for i in numbers if i not in self.used]
        number = self.choose.choice([*numbers, *numbers[-3:], *without, *without])
        self.used.add(number)
        return number

    def unused(self, first: int, suits: Callable[[Type], bool]) -> int | None:
        """A value from ``first`` on that nothing uses."""
        numbers = range(first, len(self.types))
        found = [i for i in numbers if i not in self.used and suits(self.types[i])]
        number = self.choose.choice(found) if found else None
        self.used.add(-1 if number is None else number)
        return number

    def add(self, text: str, run: Run, *results: Type, blocks: Sequence[Any] = ()) -> None:
        self.block.statements.append(Statement(text, run, len(results), tuple(blocks)))
        self.types += results

    def compute(self, name: str, function: Callable[..., Any], *operands: Operand) -> None:
        """Adds the value of a function, unless it is too large."""
        given = [self.types_of(one) for one in operands]
        result = terms.struct(function, *given)
        if result.size > LARGEST or 0 in result.shape:
            return
        text = f"{name} {', '.join(text for text, _ in operands)}"
        made = Type(tuple(result.shape), np.dtype(result.dtype))
        self.add(
            f"{text} -> {made}",
            lambda m, values: [function(*(get(values) for _, get in operands))],
            made,
        )

    def types_of(self, operand: Operand) -> Any:
        known = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in self.types]
        return jax.eval_shape(lambda *values: operand[1](list(values)), *known)

    def value(self, number: int) -> Operand:
        return str(number), lambda values: values[number]

    def scalar(self, dtype: np.dtype[Any], *, constants: float = 0.25) -> Operand:
        """A number of a type."""
        if self.choose.random() >= constants:
            own = self.pick(lambda one: one.is_scalar and one.dtype == dtype)
            other = self.pick(lambda one: one.is_scalar and one.dtype != dtype)
            if own is not None and (other is None or self.choose.random() < 0.7):
                return self.value(own)
            if other is not None:
                return f"{dtype}({other})", lambda values: terms.converted(values[other], dtype)
        number = terms.constant(self.choose, dtype)
        return str(number), lambda values: jnp.asarray(number)

    def integer(self) -> Operand:
        """A number of any integer type."""
        number = self.pick(lambda one: one.is_scalar and one.is_integer)
        return self.scalar(INT32) if number is None else self.value(number)

    def array(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], *, places: float = 0.2
    ) -> Operand:
        """An array of a shape and a type, by chance of the elements' places."""
        choose = self.choose
        if dtype not in (BOOL, FLOAT32) and choose.random() < places:
            axis, after = choose.randrange(len(shape)), choose.choice([0, 0, 0, 1, 3])
            return (
                f"iota {axis}+{after}",
                lambda values: lax.broadcasted_iota(dtype, shape, axis) + dtype.type(after),
            )
        own = self.pick(lambda one: one.like(Type(shape, dtype)))
        if own is not None and choose.random() < 0.6:
            return self.value(own)
        other = self.pick(lambda one: one.shape == shape and one.dtype != dtype)
        if other is not None and choose.random() < 0.5:
            return f"{dtype}({other})", lambda values: terms.converted(values[other], dtype)
        text, get = self.scalar(dtype)
        return f"splat {text}", lambda values: jnp.full(shape, get(values), dtype)

    def of(self, kind: Type, *, constants: float = 0.25) -> Operand:
        if kind.is_scalar:
            return self.scalar(kind.dtype, constants=constants)
        return self.array(kind.shape, kind.dtype)

    def condition(self) -> Operand:
        """A scalar condition."""
        own = self.pick(lambda one: one.is_scalar and one.dtype == BOOL)
        if own is not None and self.choose.random() < 0.3:
            return self.value(own)
        number = self.pick(lambda one: one.is_scalar and one.dtype != BOOL)
        assert number is not None
        name, function = self.choose.choice(terms.COMPARISONS)
        text, get = self.scalar(self.types[number].dtype, constants=0.4)
        return f"{number} {name} {text}", lambda values: function(values[number], get(values))

    # Values -----------------------------------------------------------------------------------

    def step(self) -> None:
        """A random statement."""
        makers: list[Callable[[], None]] = [
            *[self.unary] * 3,
            *[self.binary] * 5,
            *[self.comparison] * 3,
            *[self.where] * 4,
            *[self.chosen] * 4,
            *[self.load_scalar] * 3,
            *[self.load_part] * 2,
            *[self.load_all] * 2,
            *[self.store_scalar] * 2,
            *[self.store_part] * 2,
            *[self.movement] * 2,
            *[self.reduction] * 2,
            *(self.store_all, self.splat, self.dynamic_slice, self.take, self.convert),
        ]
        if self.depth < 3:
            makers += [
                *[self.counted] * 4,
                *[self.scan] * 2,
                *[self.while_loop] * 3,
                *[self.branch] * 2,
                *[self.when] * 2,
            ]
            if self.depth == 0:
                makers += [self.counted, self.scan, self.while_loop] * 3
        self.left -= 1
        self.choose.choice(makers)()

    def any_value(self) -> int:
        is_scalar = self.choose.random() < 0.4
        number = self.pick(lambda one: one.is_scalar == is_scalar)
        return 0 if number is None else number

    def unary(self) -> None:
        number = self.any_value()
        name, function = terms.unary(self.choose, self.types[number].dtype)
        self.compute(name, function, self.value(number))

    def binary(self) -> None:
        number = self.any_value()
        name, function = terms.binary(self.choose, self.types[number].dtype)
        operands = [self.value(number), self.of(self.types[number])]
        self.choose.shuffle(operands)
        self.compute(name, function, *operands)

    def comparison(self) -> None:
        number = self.any_value()
        if self.types[number].dtype != BOOL:
            name, function = self.choose.choice(terms.COMPARISONS)
            operands = [self.value(number), self.of(self.types[number])]
            self.choose.shuffle(operands)
            self.compute(name, function, *operands)

    def where(self) -> None:
        number = self.any_value()
        own = self.types[number]
        condition = self.pick(lambda one: one.dtype == BOOL and one.shape == own.shape)
        if condition is None or self.choose.random() < 0.2:
            chosen = self.condition()
        else:
            chosen = self.value(condition)
        self.compute("where", jnp.where, chosen, self.value(number), self.of(own))

    def convert(self) -> None:
        number, dtype = self.any_value(), self.dtype()
        self.compute(str(dtype), lambda x: terms.converted(x, dtype), self.value(number))

    def chosen(self) -> None:
        """Elements chosen by a comparison of what is loaded with places or carried numbers."""
        self.choose.choice([self.load_part, self.load_all, self.load_all])()
        number = len(self.types) - 1
        own = self.types[number]
        for _ in range(self.choose.randint(1, 2)):
            name, compare = self.choose.choice(terms.COMPARISONS)
            operands = [self.value(number), self.array(own.shape, own.dtype, places=0.7)]
            self.choose.shuffle(operands)
            other = self.pick(lambda one: one.shape == own.shape)
            kind = own if other is None else self.types[other]

            def function(a: Any, b: Any, c: Any, d: Any, compare: Any = compare) -> Any:
                return jnp.where(compare(a, b), c, d)

            self.compute(f"where {name}", function, *operands, self.of(kind), self.of(kind))

    def splat(self) -> None:
        kind = Type(self.shape(), self.dtype())
        if self.choose.random() < 0.7:
            ref = self.references[self.memory()]
            kind = Type(ref.shape, INT32 if self.choose.random() < 0.5 else ref.dtype)
        text, get = self.scalar(kind.dtype, constants=0.5)
        self.add(
            f"splat {text} -> {kind}",
            lambda m, values: [jnp.full(kind.shape, get(values), kind.dtype)],
            kind,
        )

    def movement(self) -> None:
        number = self.pick(lambda one: not one.is_scalar)
        if number is not None:
            name, function = terms.movement(self.choose, self.types[number].shape)
            self.compute(name, function, self.value(number))

    def reduction(self) -> None:
        number = self.pick(lambda one: not one.is_scalar)
        if number is not None:
            own = self.types[number]
            name, function = terms.reduction(self.choose, own.dtype, len(own.shape))
            self.compute(name, function, self.value(number))

    def dynamic_slice(self) -> None:
        """A part of an array in registers that begins at computed places."""
        number = self.pick(lambda one: not one.is_scalar)
        if number is None:
            return
        own = self.types[number]
        sizes = [self.choose.randint(1, n) for n in own.shape]
        starts = [self.place(n - size + 1) for n, size in zip(own.shape, sizes, strict=True)]

        def run(m: Machine, values: list[Any]) -> list[Any]:
            places = [get(values).astype(jnp.int32) for _, get in starts]
            return [m.kept(lax.dynamic_slice(values[number], places, sizes))]

        text = ", ".join(text for text, _ in starts)
        made = Type(tuple(sizes), own.dtype)
        self.add(f"dynamic slice {number} from {text} -> {made}", run, made)

    def take(self) -> None:
        """Elements of an array in registers at computed places."""
        number = self.pick(lambda one: not one.is_scalar)
        where = self.pick(lambda one: len(one.shape) == 1 and one.dtype == INT32)
        if number is None or where is None:
            return
        own = self.types[number]
        axis = self.choose.randrange(len(own.shape))
        name, function = terms.index(self.choose, own.shape[axis])
        self.compute(
            f"take along {axis} at {name}",
            lambda x, places: jnp.take(x, function(places), axis, mode="clip"),
            self.value(number),
            self.value(where),
        )

    # Memory -----------------------------------------------------------------------------------

    def place(self, extent: int) -> Operand:
        """One of so many places."""
        choose = self.choose

        def fits(one: Type) -> bool:
            return one.bounds is not None and one.bounds[0] >= 0 and one.bounds[1] < extent

        direct = self.pick(fits)
        if direct is not None and choose.random() < 0.5:
            bounds = self.types[direct].bounds
            assert bounds is not None
            spare = extent - 1 - bounds[1]
            after = choose.choice([0, 0, spare, choose.randint(0, spare)])
            if choose.random() < 0.2:
                return f"{bounds[1]}-{direct}", lambda values: bounds[1] - values[direct]
            if not after:
                return self.value(direct)
            return f"{direct}+{after}", lambda values: values[direct] + after
        if choose.random() < 0.15:
            constant = choose.randrange(extent)
            return str(constant), lambda values: jnp.int32(constant)
        text, get = self.integer()
        name, function = terms.index(choose, extent)
        return f"({text} {name})", lambda values: function(get(values))

    def part(self, shape: tuple[int, ...]) -> tuple[str, Callable[[list[Any]], Any], Any]:
        """Places of a part of a reference: their text, the indices, the part's shape."""
        choose = self.choose
        texts, gets, sizes = [], list[Callable[[list[Any]], Any]](), list[int]()
        for axis, extent in enumerate(shape):
            is_last = axis == len(shape) - 1 and not sizes
            if choose.random() < 0.4 and not is_last:
                text, get = self.place(extent)
                texts.append(text)
                gets.append(get)
            elif choose.random() < 0.3:
                texts.append(":")
                gets.append(lambda values: slice(None))
                sizes.append(extent)
            else:
                size = choose.randint(1, extent)
                text, get = self.place(extent - size + 1)
                texts.append(f"{text}, {size} on")
                gets.append(lambda values, get=get, size=size: pl.ds(get(values), size))
                sizes.append(size)
        return (
            f"[{'; '.join(texts)}]",
            lambda values: tuple(get(values) for get in gets),
            tuple(sizes),
        )

    def memory(self, *, written: bool = False) -> int:
        numbers = [i for i, r in enumerate(self.references) if not written or r.kind != "input"]
        return self.choose.choice(numbers)

    def load_scalar(self) -> None:
        number = self.memory()
        ref = self.references[number]
        places = [self.place(extent) for extent in ref.shape]
        text = "; ".join(text for text, _ in places)
        self.add(
            f"ref{number}[{text}] -> {ref.dtype}",
            lambda m, values: [m.refs[number][tuple(get(values) for _, get in places)]],
            Type((), ref.dtype),
        )

    def load_part(self) -> None:
        number = self.memory()
        ref = self.references[number]
        text, get, shape = self.part(ref.shape)
        made = Type(shape, ref.dtype)
        self.add(
            f"ref{number}{text} -> {made}", lambda m, values: [m.refs[number][get(values)]], made
        )

    def load_all(self, number: int | None = None) -> None:
        number = self.memory() if number is None else number
        ref = self.references[number]
        self.add(
            f"ref{number} -> {ref.dtype}{list(ref.shape)}",
            lambda m, values: [m.refs[number][...]],
            Type(ref.shape, ref.dtype),
        )

    def store_scalar(self) -> None:
        number = self.memory(written=True)
        ref = self.references[number]
        places = [self.place(extent) for extent in ref.shape]
        text = "; ".join(text for text, _ in places)
        value, get_value = self.scalar(ref.dtype)

        def run(m: Machine, values: list[Any]) -> list[Any]:
            m.refs[number][tuple(get(values) for _, get in places)] = get_value(values)
            return []

        self.add(f"ref{number}[{text}] = {value}", run)

    def store_part(self) -> None:
        number = self.memory(written=True)
        ref = self.references[number]
        text, get, shape = self.part(ref.shape)
        value, get_value = self.array(shape, ref.dtype)
        kind = self.choose.choice(["=", "=", "+="])

        def run(m: Machine, values: list[Any]) -> list[Any]:
            if kind == "=":
                m.refs[number][get(values)] = get_value(values)
            else:
                m.refs[number][get(values)] += get_value(values)
            return []

        self.add(f"ref{number}{text} {kind} {value}", run)

    def store_all(self, number: int | None = None) -> None:
        number = self.memory(written=True) if number is None else number
        ref = self.references[number]
        value, get_value = self.array(ref.shape, ref.dtype)

        def run(m: Machine, values: list[Any]) -> list[Any]:
            m.refs[number][...] = get_value(values)
            return []

        self.add(f"ref{number} = {value}", run)

    # Control flow -----------------------------------------------------------------------------

    def inner(self, given: Sequence[Type], results: Sequence[Type], most: int) -> Block:
        """A block of statements, which is given values and returns others of such types."""
        outer, count = self.block, len(self.types)
        self.block, self.depth = Block(), self.depth + 1
        self.types += given
        # What is loaded is often compared with places, and goes into a sum of the same shape.
        often = 0.6 if self.is_alike else 0.3
        compares = self.choose.random() < often and any(not one.is_scalar for one in results)
        for _ in range(self.choose.randint(2 if compares else 1, most)):
            if compares and self.choose.random() < 0.8:
                self.chosen()
            else:
                self.step()
        numbers = []
        for place, one in enumerate(results):
            # Of those that are given, the last ones are carried.
            carried = count + len(given) - len(results) + place
            if self.choose.random() < 0.6:
                numbers.append(self.next(carried, count + len(given)))
            else:  # An older value, or one that takes the place of another.
                other = self.pick(lambda known, one=one: known.like(one))
                numbers.append(carried if other is None else other)
        block, self.block = self.block, outer
        self.depth -= 1
        block.results = tuple(numbers)
        del self.types[count:]
        self.used = {i for i in self.used if i < count}
        return block

    def next(self, carried: int, first: int) -> int:
        """What is carried in place of a value: what depends on it and, if there are any, on values
        from ``first`` on that have no use."""
        own = self.types[carried]
        for _ in range(6):
            other = self.unused(first, lambda one: one.shape == own.shape)
            if other is None and own.is_scalar:
                other = self.unused(first, lambda one: not one.is_scalar)
            if other is None:
                if carried >= first:
                    break
                text, get = self.of(own, constants=0.3)
            else:
                reduces = own.shape != self.types[other].shape

                def get(values: list[Any], other: int = other, reduces: bool = reduces) -> Any:
                    one = values[other]
                    return terms.converted(jnp.max(one) if reduces else one, own.dtype)

                text = f"{'max of ' if reduces else ''}{other}"
            name, function = terms.binary(self.choose, own.dtype)
            before = len(self.types)
            self.compute(name, function, self.value(carried), (text, get))
            carried = before if len(self.types) > before else carried
            self.used.add(carried)
        return carried

    def carried(self) -> list[int]:
        """What a loop carries."""
        choose = self.choose
        numbers = []
        if choose.random() < 0.6:
            self.splat()
            numbers.append(len(self.types) - 1)
        for _ in range(choose.randint(1, 4)):
            if choose.random() < 0.5 and numbers:  # One that may take the place of another.
                kind = self.types[choose.choice(numbers)]
                text, get = self.of(kind)
                self.add(
                    f"{text} -> {kind}",
                    lambda m, values, get=get: [get(values)],
                    Type(kind.shape, kind.dtype),
                )
                numbers.append(len(self.types) - 1)
            else:
                numbers.append(self.any_value())
        return numbers

    def loop(
        self,
        text: str,
        numbers: Sequence[int],
        given: Sequence[Type],
        run: Callable[[Callable[..., Any], list[Any], Any], Any],
    ) -> None:
        """Adds a loop.

        Args:
          text: that describes it.
          numbers: of the values that it carries.
          given: further values that its body is given, before these.
          run: takes the body, the values so far and those that are carried.
        """
        carried = [Type(self.types[i].shape, self.types[i].dtype) for i in numbers]
        block = self.inner([*given, *carried], carried, most=5)

        def whole(m: Machine, values: list[Any]) -> Any:
            def body(*own: Any) -> Any:
                return block.run(m, [*values, *own])

            return run(body, values, tuple(values[i] for i in numbers))

        names = ", ".join(map(str, numbers))
        blocks = [(len(given) + len(carried), block)]
        self.add(f"{text} carrying {names}", whole, *carried, blocks=blocks)

    def range_of(
        self, *, narrow: bool = True
    ) -> tuple[str, Callable[[list[Any]], Any], np.dtype[Any], Any]:
        """Bounds of a counter: their text, the numbers, their type, and known limits."""
        choose = self.choose
        dtype = (
            INT32
            if not narrow or choose.random() < 0.6
            else choose.choice([*NARROW, *(WIDE if self.wide else ())])
        )
        trips = choose.choice([0, 1, 2, 3, 3, 4, 5, 9])
        if choose.random() < 0.6:
            info = np.iinfo(dtype)
            first = choose.choice([0, 0, 0, 1, 3, info.max - trips, info.min, info.max // 2 - 1])
            end = first + trips if trips or choose.random() < 0.5 else max(first - 3, info.min)
            limits = (first, max(end - 1, first)) if end < 64 else None
            if choose.random() < 0.6 and dtype == INT32:
                return f"{first}..{end}", lambda values: (first, end), dtype, limits

            def known(values: list[Any]) -> Any:
                # JAX counts in int32 if it sees the bounds.
                zero = values[0].astype(dtype) & dtype.type(0)
                return zero + dtype.type(first), zero + dtype.type(end)

            return f"{dtype} {first}..{end}", known, dtype, limits
        text, get = self.scalar(dtype, constants=0.1)
        # Bounds that wrap around make no steps.
        other, length = self.scalar(dtype, constants=0.1)
        mask = dtype.type(choose.choice([1, 3, 3, 7]))
        kind = choose.choice(["from", "to", "up to"])

        def bounds_of(values: list[Any]) -> Any:
            if kind == "from":
                return get(values), get(values) + (length(values) & mask)
            if kind == "to":
                return get(values) - (length(values) & mask), get(values)
            return jnp.zeros((), dtype), get(values) & mask

        limits = (0, int(mask)) if kind == "up to" else None
        return f"{dtype} {kind} {text}, {other} & {mask}", bounds_of, dtype, limits

    def counted(self) -> None:
        """A fori_loop."""
        text, bounds, dtype, limits = self.range_of()
        unroll = self.choose.choice([None, None, None, 2, 3, True])

        def run(body: Callable[..., Any], values: list[Any], carry: Any) -> Any:
            low, high = bounds(values)
            further = {"unroll": unroll} if unroll and type(low) is int else {}
            return lax.fori_loop(
                low, high, lambda i, own: body(i.astype(dtype), *own), carry, **further
            )

        counter = Type((), dtype, limits)
        self.loop(f"fori_loop {text}, unroll {unroll}", self.carried(), [counter], run)

    def scan(self) -> None:
        """A scan over nothing, which has no counter."""
        length = self.choose.choice([0, 1, 2, 3, 4, 5])
        further = {
            "unroll": self.choose.choice([1, 1, 2, 3]),
            "reverse": self.choose.random() < 0.3,
        }

        def run(body: Callable[..., Any], values: list[Any], carry: Any) -> Any:
            made = lax.scan(lambda own, _: (body(*own), None), carry, length=length, **further)
            return made[0]

        self.loop(f"scan of {length}, {further}", self.carried(), [], run)

    def while_loop(self) -> None:
        """A loop that ends by what it computes."""
        choose = self.choose
        kind = choose.choice(["until a number", "while there are bits", "break", "break", "break"])
        numbers = self.carried()
        if kind == "break":
            self.breaking(numbers)
            return
        dtype = INT32 if choose.random() < 0.5 else choose.choice(NARROW)
        text, get = self.scalar(dtype, constants=0.1)
        steps, number = choose.randint(0, 5), dtype.type
        step = number(choose.choice([1, 1, 2, 3, 7]))
        shift = number(choose.choice([2, 3]) * dtype.itemsize)

        def run(body: Callable[..., Any], values: list[Any], carry: Any) -> Any:
            end = get(values)
            if kind == "until a number":  # Also around the limits of the type.
                start = end - number(steps) * step
                return lax.while_loop(
                    lambda own: own[0] != end,
                    lambda own: (own[0] + step, *body(own[0], *own[1:])),
                    (start, *carry),
                )[1:]
            return lax.while_loop(
                lambda own: own[0] > 0,
                lambda own: (own[0] >> shift, *body(own[0], *own[1:])),
                (end, *carry),
            )[1:]

        self.loop(
            f"while {kind}, {dtype} {text}, {steps} steps of {step}",
            numbers,
            [Type((), dtype)],
            run,
        )

    def breaking(self, numbers: Sequence[int]) -> None:
        """A loop of a few steps that ends sooner if a condition holds of what it carries."""
        choose = self.choose
        most = choose.choice([0, 1, 3, 5, 8])
        scalars = [i for i, n in enumerate(numbers) if self.types[n].is_scalar]
        place = choose.choice(scalars) if scalars else None
        text, test = "always", lambda one, values: jnp.bool_(True)
        if place is not None:
            dtype = self.types[numbers[place]].dtype
            if dtype == BOOL:
                text, test = f"{numbers[place]}", lambda one, values: one
            else:
                name, function = choose.choice(terms.COMPARISONS)
                limit, get = self.scalar(dtype)
                text = f"{numbers[place]} {name} {limit}"
                test = lambda one, values: function(one, get(values))  # noqa: E731
        bound_is_carried = choose.random() < 0.4

        def run(body: Callable[..., Any], values: list[Any], carry: Any) -> Any:
            if bound_is_carried and place is None:
                made = lax.while_loop(
                    lambda own: own[0] < own[1],
                    lambda own: (own[0] + 1, own[1], *body(own[0], *own[2:])),
                    (jnp.int32(0), jnp.int32(most), *carry),
                )
                return made[2:]

            def goes_on(own: Any) -> Any:
                few = own[0] < most
                return few if place is None else few & test(own[1 + place], values)

            return lax.while_loop(
                goes_on,
                lambda own: (own[0] + 1, *body(own[0], *own[1:])),
                (jnp.int32(0), *carry),
            )[1:]

        counter = Type((), INT32, (0, max(most - 1, 0)))
        self.loop(f"while {text}, at most {most} times", numbers, [counter], run)

    def branch(self) -> None:
        """A cond or a switch whose branches return new values."""
        choose = self.choose
        numbers = [self.any_value() for _ in range(choose.randint(1, 3))]
        results = [Type(self.types[i].shape, self.types[i].dtype) for i in numbers]
        count = choose.choice([2, 2, 3, 4])
        text, get = self.condition() if count == 2 else self.scalar(INT32, constants=0.0)
        branches = [self.inner(results, results, most=3) for _ in range(count)]

        def run(m: Machine, values: list[Any]) -> Any:
            def function(block: Block) -> Callable[..., Any]:
                return lambda *own: block.run(m, [*values, *own])

            functions = [function(block) for block in branches]
            own = [values[i] for i in numbers]
            if count == 2:
                return lax.cond(get(values), *functions, *own)
            return lax.switch(get(values), functions, *own)

        blocks = [(len(results), block) for block in branches]
        self.add(f"branch on {text} with {numbers}", run, *results, blocks=blocks)

    def when(self) -> None:
        """Statements that only change memory, under a condition or in a loop."""
        text, get = self.condition()
        # The counter of pl.loop begins at 0 of int32.
        bounds, range_of, dtype, limits = self.range_of(narrow=False)
        if self.choose.random() < 0.6:
            block = self.inner([], [], most=3)

            def run(m: Machine, values: list[Any]) -> list[Any]:
                pl.when(get(values))(lambda: block.change(m, values))
                return []

            self.add(f"when {text}", run, blocks=[(0, block)])
        else:
            loop = self.inner([Type((), dtype, limits)], [], most=3)

            def run_loop(m: Machine, values: list[Any]) -> list[Any]:
                # Its counter may have another type than its bounds.
                pl.loop(*range_of(values))(lambda i: loop.change(m, [*values, i.astype(dtype)]))
                return []

            self.add(f"loop {bounds}", run_loop, blocks=[(1, loop)])


def make_program(seed: int, *, length: int = 14) -> Program:
    """The program of a seed."""
    choose = random.Random(seed)
    generator = Generator(choose, choose.randint(4, length))
    with jax.enable_x64(generator.wide):
        return generator.program()


def main(arguments: Sequence[str]) -> int:
    """Checks random kernels; prints those that fail, and how many."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz loops", description=__doc__)
    add_options(parser, "kernels")
    parser.add_argument("--length", type=int, default=14, help="statements, at most, without loops")
    given = parser.parse_args(arguments)
    executors = _executors.executors(given.executor)
    return check_seeds(
        given,
        "kernels",
        lambda seed: make_program(seed, length=given.length),
        lambda program: check(program, executors),
    )
