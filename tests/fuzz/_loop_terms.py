"""Random functions of the values of programs with control flow: numbers, indices, arrays."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

type Function = Callable[..., Any]
type Named = tuple[str, Function]

BOOL = np.dtype(np.bool_)
INT32 = np.dtype(np.int32)
FLOAT32 = np.dtype(np.float32)


def constant(choose: random.Random, dtype: np.dtype[Any]) -> Any:
    """A number, often a small one or a limit of the type."""
    if dtype == BOOL:
        return np.bool_(choose.random() < 0.5)
    if dtype == FLOAT32:
        return np.float32(choose.randint(-64, 64) / 4)
    info = np.iinfo(dtype)
    number = choose.choice(
        [
            *(0, 1, 2, 3, choose.randint(-9, 40), choose.randint(-9, 40)),
            choose.choice([info.max, info.max - choose.randint(0, 9), info.max // 2 + 1]),
            choose.choice([info.min, info.min + choose.randint(0, 9), -1, info.min // 2]),
            1 << choose.randrange(info.bits),
        ]
    )
    return np.array(number & (2**info.bits - 1), f"u{dtype.itemsize}").astype(dtype)[()]


def unary(choose: random.Random, dtype: np.dtype[Any]) -> Named:
    """A function of one number of a type."""
    if dtype == BOOL:
        return "not", jnp.logical_not
    if dtype == FLOAT32:
        return choose.choice([("neg", jnp.negative), ("abs", jnp.abs)])
    bits = dtype.itemsize * 8
    shift, low = choose.randrange(1, bits), choose.randint(0, 40)
    size = choose.choice([1, 2, 3, 5, 7, 8, 10, 16, 33, 100])
    number = dtype.type
    negative = number(-size) if dtype.kind == "i" and size > 1 else number(size)
    return choose.choice(
        [
            ("neg", jnp.negative),
            ("not", jnp.bitwise_not),
            ("abs", jnp.abs),
            ("bits of", lax.population_count),
            (f"{shift} >>", lambda x: x >> number(shift)),
            (f"{shift} >> logical", lambda x: lax.shift_right_logical(x, number(shift))),
            (f"{shift} <<", lambda x: x << number(shift)),
            (f"{low} up to {low + 9}", lambda x: jnp.clip(x, number(low), number(low + 9))),
            (f"mod {size}", lambda x: jnp.mod(x, number(size))),
            (f"rem {size}", lambda x: lax.rem(x, number(size))),
            (f"rem {negative}", lambda x: lax.rem(x, negative)),
            (f"div {size}", lambda x: lax.div(x, number(size))),
            (f"floor div {negative}", lambda x: x // negative),
            (f"and {2**shift - 1}", lambda x: x & number(2**shift - 1)),
            (f"times {size} plus {low}", lambda x: x * number(size) + number(low)),
            (f"{low} minus", lambda x: number(low) - x),
        ]
    )


def binary(choose: random.Random, dtype: np.dtype[Any]) -> Named:
    """A function of two numbers of a type."""
    if dtype == BOOL:
        return choose.choice(
            [("and", jnp.logical_and), ("or", jnp.logical_or), ("xor", jnp.logical_xor)]
        )
    # A product and a sum of floating-point numbers may be rounded once or twice.
    table: list[Named] = [
        *[("add", jnp.add), ("sub", jnp.subtract)] * 3,
        *[("max", jnp.maximum), ("min", jnp.minimum)] * 2,
    ]
    if dtype != FLOAT32:
        one, seven, bits = dtype.type(1), dtype.type(7), dtype.type(dtype.itemsize * 8 - 1)
        table += [
            *[("mul", jnp.multiply)] * 2,
            ("and", jnp.bitwise_and),
            ("or", jnp.bitwise_or),
            ("xor", jnp.bitwise_xor),
            ("<<", lambda x, y: x << (y & bits)),
            (">>", lambda x, y: x >> (y & bits)),
            ("rem", lambda x, y: lax.rem(x, (y & seven) + one)),
            ("mod", lambda x, y: jnp.mod(x, (y & seven) + one)),
        ]
    return choose.choice(table)


COMPARISONS: list[Named] = [
    ("<", jnp.less),
    ("<=", jnp.less_equal),
    (">", jnp.greater),
    (">=", jnp.greater_equal),
    ("==", jnp.equal),
    ("!=", jnp.not_equal),
]


def converted(x: Any, dtype: np.dtype[Any]) -> Any:
    """A number in another type, of integers its last bits."""
    if dtype == BOOL:
        return x != 0 if x.dtype != FLOAT32 else x > 0
    if x.dtype == FLOAT32 and dtype != FLOAT32:
        low = 0.0 if dtype.kind == "u" else -100.0
        x = jnp.where(x == x, jnp.clip(x, low, 100.0), jnp.float32(0))
    return x.astype(dtype)


def index(choose: random.Random, extent: int) -> Named:
    """A function that makes a place among so many of any integer."""
    bits = extent.bit_length() - 1

    def last_bits(x: Any) -> Any:
        return x & x.dtype.type(2**bits - 1)

    def first_bits(x: Any) -> Any:
        if not bits:
            return jnp.int32(0)
        word = lax.shift_right_logical(x.astype(jnp.uint32), jnp.uint32(32 - bits))
        return word.astype(jnp.int32)

    def positive_rem(x: Any) -> Any:
        most = jnp.iinfo(x.dtype).max
        return lax.rem(x & x.dtype.type(most), x.dtype.type(extent))

    name, function = choose.choice(
        [
            ("mod", lambda x: jnp.mod(x, x.dtype.type(extent))),
            ("rem", positive_rem),
            ("clip", lambda x: jnp.clip(x, x.dtype.type(0), x.dtype.type(extent - 1))),
            ("last bits", last_bits),
            ("first bits", first_bits),
            ("from behind", lambda x: extent - 1 - jnp.mod(x, x.dtype.type(extent))),
            ("min of max", lambda x: jnp.minimum(jnp.maximum(x, 0), extent - 1)),
            ("mod of sum", lambda x: jnp.mod(x + x.dtype.type(7), x.dtype.type(extent))),
        ]
    )
    if choose.random() < 0.6:
        return f"{name} {extent}", lambda x: function(x).astype(jnp.int32)
    return f"{name} {extent}", function


def movement(choose: random.Random, shape: tuple[int, ...]) -> Named:
    """A function that moves the elements of an array of a shape."""
    axis, size = choose.randrange(len(shape)), math.prod(shape)
    extent = shape[axis]
    order = list(range(len(shape)))
    choose.shuffle(order)
    factors = [n for n in range(1, size + 1) if size % n == 0]
    first = choose.choice(factors)
    other = choose.choice([(size,), (first, size // first), (size // first, first)])
    start = choose.randrange(extent)
    stop, step = choose.randint(start + 1, extent), choose.choice([1, 1, 2, 3])
    part = tuple(slice(start, stop, step) if d == axis else slice(None) for d in range(len(shape)))
    shift = choose.randint(-3, 5)
    return choose.choice(
        [
            (f"roll {axis} by {shift}", lambda x: jnp.roll(x, shift, axis)),
            (f"flip {axis}", lambda x: jnp.flip(x, axis)),
            (f"transpose {order}", lambda x: jnp.transpose(x, order)),
            (f"reshape {other}", lambda x: x.reshape(other)),
            (f"slice {start}:{stop}:{step} of {axis}", lambda x: x[part]),
            (f"twice along {axis}", lambda x: jnp.concatenate([x, x], axis)),
            (
                f"rotate {start} of {axis}",
                lambda x: jnp.concatenate(
                    [
                        lax.slice_in_dim(x, start, extent, axis=axis),
                        lax.slice_in_dim(x, 0, start, axis=axis),
                    ],
                    axis,
                ),
            ),
        ]
    )


def reduction(choose: random.Random, dtype: np.dtype[Any], rank: int) -> Named:
    """A function of an array that has fewer elements."""
    table: list[Named] = [("max", jnp.max), ("min", jnp.min)]
    if dtype == BOOL:
        table = [("any", jnp.any), ("all", jnp.all)]
    elif dtype != FLOAT32:
        table.append(("sum", lambda x, **rest: jnp.sum(x, dtype=x.dtype, **rest)))
        if choose.random() < 0.3:
            axis = choose.randrange(rank)
            name, scan = choose.choice([("cumsum", lax.cumsum), ("cummax", lax.cummax)])
            return f"{name} along {axis}", lambda x: scan(x, axis)
    if dtype != BOOL and choose.random() < 0.2:
        name, extreme = choose.choice([("argmax", jnp.argmax), ("argmin", jnp.argmin)])
        return name, lambda x: extreme(x).astype(jnp.int32)
    name, function = choose.choice(table)
    if choose.random() < 0.6:
        return f"{name} of all", function
    axis = choose.randrange(rank)
    return f"{name} over {axis}", lambda x: function(x, axis=axis, keepdims=True)


def struct(function: Function, *types: Any) -> jax.ShapeDtypeStruct:
    """What a function returns for arrays of types."""
    given = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in types]
    return jax.eval_shape(function, *given)
