"""Further steps of random kernels: products, orders, quotients, scans, and functions of these."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BOOL = np.dtype(bool)
FACTORS = ((np.float32, "highest"), (np.float16, None), (jnp.bfloat16, None))


class ArraySteps:
    """Makers of steps, which a generator of kernels inherits.

    Attributes:
      choose: the random state.
      values: what is known of the values so far.
    """

    choose: random.Random
    values: list[Any]
    pick: Callable[..., int | None]
    add: Callable[..., None]

    def product(self) -> None:
        """Rows times rows, of one matrix or of two."""
        types = [np.dtype(one) for one, _ in FACTORS] + [np.dtype(np.int8), np.dtype(np.uint8)]
        i = self.pick(lambda value: len(value.shape) == 2 and value.dtype in types)
        if i is None:
            return
        own = self.values[i]
        j = self.pick(
            lambda value: (
                value.dtype == own.dtype
                and len(value.shape) == 2
                and value.shape[1] == own.shape[1]
            )
        )
        precision = {np.dtype(one): precision for one, precision in FACTORS}.get(own.dtype)
        kind = jnp.float32 if own.is_float else jnp.int32

        def step(m: Any, pool: list[Any]) -> Any:
            # Of numbers whose sums do not depend on their order, as long as they are small.
            factors = [m.factor(jnp.clip(jnp.round(pool[n]), -9, 9)) for n in (i, j)]
            return jnp.einsum(
                "ik,jk->ij", *factors, precision=precision, preferred_element_type=kind
            )

        self.add(f"product {i} {j}", step, i, j, exact=not own.is_float)

    def places_in_order(self) -> None:
        """Where the elements are that come first, second, and so on."""
        i = self.pick(lambda value: value.exact and value.shape != () and value.dtype != BOOL)
        if i is None:
            return
        axis = self.choose.randrange(len(self.values[i].shape))
        count = self.choose.randint(1, self.values[i].shape[-1])
        name, function = self.choose.choice(
            [
                ("argsort", lambda x: jnp.argsort(x, axis)),
                ("argsort down", lambda x: jnp.argsort(x, axis, descending=True)),
                (f"top {count}", lambda x: lax.top_k(jnp.abs(x), count)[1]),
                ("ranks", lambda x: jnp.searchsorted(jnp.sort(x.ravel()), x.ravel())),
            ]
        )
        self.add(f"{name} {i} along {axis}", lambda m, pool: function(pool[i]), i, exact=True)

    def along(self) -> None:
        """Elements at places along an axis, of which each has its own."""
        i = self.pick(lambda value: value.shape != ())
        if i is None:
            return
        own = self.values[i]
        j = self.pick(
            lambda v: v.exact and v.shape == own.shape and v.dtype != BOOL and not v.is_float
        )
        if j is None:
            return
        axis = self.choose.randrange(len(own.shape))

        def step(m: Any, pool: list[Any]) -> Any:
            places = jnp.abs(pool[j].astype(jnp.int32)) % own.shape[axis]
            return m.kept(jnp.take_along_axis(pool[i], places, axis))

        self.add(f"take {i} along {axis} at {j}", step, i, j, exact=True)

    def quotient(self) -> None:
        """Integers by odd ones: rounded down or towards zero, what remains, and shifted."""
        i = self.pick(lambda value: not value.is_float and value.dtype != BOOL)
        if i is None:
            return
        own = self.values[i]
        j = self.pick(lambda value: value.dtype == own.dtype and value.shape == own.shape)
        assert j is not None
        name, function = self.choose.choice(
            [
                ("//", lambda x, y: x // (y | 1)),
                ("%", lambda x, y: x % (y | 1)),
                ("div", lambda x, y: lax.div(x, y | 1)),
                ("rem", lambda x, y: lax.rem(x, y | 1)),
                ("<<", lambda x, y: x << (y & 7)),
                (">>", lambda x, y: x >> (y & 7)),
                ("power", lambda x, y: x ** (y & 3)),
                ("divmod 7", lambda x, y: jnp.divmod(x, 7)[0] - y),
            ]
        )
        self.add(f"{i} {name} {j}", lambda m, pool: function(pool[i], pool[j]), i, j, exact=True)

    def masked(self) -> None:
        """A choice by a mask, or the mask itself."""
        i = self.pick(lambda value: value.exact and value.dtype != BOOL)
        if i is None:
            return
        bound = self.choose.choice([0, 1, 3])
        j = self.pick(lambda value: value.dtype == BOOL and value.shape == self.values[i].shape)
        if j is None:
            step = lambda m, pool: pool[i] > bound  # noqa: E731
            self.add(f"{i} > {bound}", step, i, exact=True)
            return
        step = lambda m, pool: jnp.where(pool[j], pool[i], pool[i].dtype.type(bound))  # noqa: E731
        self.add(f"where {j}: {i}, {bound}", step, i, j, exact=True)

    def scanned(self) -> None:
        """What a loop over rows carries, after each row."""
        i = self.pick(lambda value: len(value.shape) > 1 and value.dtype != BOOL)
        if i is None:
            return
        is_float, reverse = self.values[i].is_float, self.choose.random() < 0.5

        def combine(carry: Any, row: Any) -> tuple[Any, Any]:
            if is_float:
                carry = jnp.maximum(carry, row)
                return carry, carry - row
            return (carry >> 1) ^ row, carry

        def step(m: Any, pool: list[Any]) -> Any:
            start = jnp.zeros(pool[i].shape[1:], pool[i].dtype)
            return lax.scan(combine, start, pool[i], reverse=reverse)[1]

        self.add(f"scan {i}, reverse={reverse}", step, i, exact=not is_float)

    def associative(self) -> None:
        """An associative scan, of pairs or of numbers."""
        i = self.pick(lambda value: value.shape != () and value.dtype != BOOL)
        if i is None or self.values[i].is_float:
            return
        axis = self.choose.randrange(len(self.values[i].shape))
        reverse = self.choose.random() < 0.5

        def combine(left: Any, right: Any) -> Any:
            # The last one that is odd, and how many there were.
            odd = (right[0] & 1) == 1
            return jnp.where(odd, right[0], left[0]), left[1] + right[1]

        def step(m: Any, pool: list[Any]) -> Any:
            pair = (pool[i], pool[i] & 1)
            found = lax.associative_scan(combine, pair, axis=axis, reverse=reverse)
            return found[0] ^ found[1]

        self.add(f"associative scan {i} along {axis}, reverse={reverse}", step, i, exact=True)

    def stacked(self) -> None:
        """Two arrays beside each other, or halves of one in the other order."""
        i = self.pick(lambda value: value.shape != ())
        if i is None:
            return
        own = self.values[i]
        j = self.pick(lambda value: value.dtype == own.dtype and value.shape == own.shape)
        axis = self.choose.randint(0, len(own.shape))
        place = self.choose.randint(0, own.shape[0])
        if self.choose.random() < 0.5:
            step = lambda m, pool: jnp.stack([pool[i], pool[j]], axis)  # noqa: E731
            self.add(f"stack {i} {j} along {axis}", step, i, j, exact=True)
            return

        def swapped(m: Any, pool: list[Any]) -> Any:
            first, second = jnp.split(pool[i], [place])
            return jnp.concatenate([second, first]) if second.size else first

        self.add(f"swap {i} at {place}", swapped, i, exact=True)

    def counted(self) -> None:
        """How often numbers occur, or as rows of zeros and ones."""
        i = self.pick(lambda value: value.exact and value.shape != () and value.dtype != BOOL)
        if i is None or self.values[i].is_float:
            return
        groups = self.choose.choice([3, 8, 13])

        def step(m: Any, pool: list[Any]) -> Any:
            group = jnp.abs(pool[i].astype(jnp.int32)).ravel() % groups
            if groups == 8:
                return jax.nn.one_hot(group, groups, dtype=jnp.int32).sum(0)
            return jax.ops.segment_sum(group + 1, group, groups)

        self.add(f"count {i} in {groups} groups", step, i, exact=True)

    def words(self) -> None:
        """Integers of 16 or 32 bits as bytes."""
        i = self.pick(lambda value: value.exact and value.dtype in (np.int32, np.uint32, np.int16))
        if i is None:
            return
        step = lambda m, pool: lax.bitcast_convert_type(pool[i], jnp.uint8)  # noqa: E731
        self.add(f"bytes of {i}", step, i, exact=True)

    def folded(self) -> None:
        """Integers multiplied, or bits combined, along an axis."""
        i = self.pick(lambda value: value.shape != () and value.dtype != BOOL)
        if i is None or self.values[i].is_float:
            return
        axis = self.choose.randrange(len(self.values[i].shape))
        name, function = self.choose.choice(
            [
                ("prod", lambda x: jnp.prod(x, axis, dtype=x.dtype, keepdims=True)),
                ("xor", lambda x: jnp.bitwise_xor.reduce(x, axis=axis, keepdims=True)),
                ("and", lambda x: jnp.bitwise_and.reduce(x, axis=axis, keepdims=True)),
                ("or", lambda x: jnp.bitwise_or.reduce(x, axis=axis, keepdims=True)),
            ]
        )
        self.add(f"{name} {i} over {axis}", lambda m, pool: function(pool[i]), i, exact=True)

    def spread(self) -> None:
        """Elements in a further dimension, or differences from the largest."""
        i = self.pick(lambda value: value.shape != () and value.dtype != BOOL)
        if i is None:
            return
        own = self.values[i]
        if self.choose.random() < 0.5:
            count = self.choose.choice([2, 3, 5])
            shape = (*own.shape, count)
            step = lambda m, pool: jnp.broadcast_to(pool[i][..., None], shape)  # noqa: E731
            self.add(f"broadcast {i} to {shape}", step, i, exact=True)
            return
        step = lambda m, pool: pool[i] - jnp.max(pool[i])  # noqa: E731
        self.add(f"{i} less its largest", step, i, exact=not own.is_float)

    @property
    def array_steps(self) -> list[Callable[[], None]]:
        """All of them."""
        return [
            *(self.product, self.places_in_order, self.along, self.quotient, self.masked),
            *(self.scanned, self.associative, self.stacked, self.counted, self.words),
            *(self.folded, self.spread),
        ]
