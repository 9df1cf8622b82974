"""Random calls of attention, with all its options."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from tests.fuzz import _references as references
from tests.fuzz._programs import BF16, F16, F32, TOLERANCES, Draw, Program, lengths, steepness
from tests.ops.dropped_weights import growth, kept

from pallasite import ops

NAMES = ("attention", "attention", "attention_forward", "attention_backward")


def attention(draw: Draw, *, plain: bool = False) -> Program:
    """Attention of many queries, its forward with log-sum-exp, or its backward alone.

    Args:
      draw: random choices.
      plain: whether there are only those options that all implementations have.
    """
    dtype = draw.one(BF16, BF16, F16, F32)
    batch, kv_heads = draw.extent(1, 2), draw.extent(1, 2)
    heads = kv_heads * draw.one(1, 1, 3)
    q_seq, kv_seq = (draw.extent(1, 5, 31, 64, 65, 130) for _ in range(2))
    dim = draw.one(8, 24, 64, 64, 80, 128)
    v_dim = dim if plain or draw.chance(0.7) else draw.one(8, 40, 64, 72, 128)
    arrays = {
        "q": draw.array((batch, q_seq, heads, dim), dtype),
        "k": draw.array((batch, kv_seq, kv_heads, dim), dtype),
        "v": draw.array((batch, kv_seq, kv_heads, v_dim), dtype),
        "q_lengths": draw.maybe(0.3, lambda: lengths(draw, batch, q_seq)),
        "kv_lengths": draw.maybe(0.3, lambda: lengths(draw, batch, kv_seq)),
    }
    options: dict[str, Any] = {"causal": draw.chance(0.5)}
    if draw.chance(0.3):
        options["scale"] = draw.one(0.07, 0.5, 1.7)
    if draw.chance(0.2):
        options["soft_cap"] = draw.one(2.0, 30.0)
    if draw.chance(0.3):
        sides = tuple(draw.one(None, 0, 3, 40, 64, 200) for _ in range(2))
        options["window"] = draw.one(0, 7, 64) if draw.chance(0.4) else sides
    factors = None
    if not plain:
        _hide(draw, arrays, options)
        arrays["bias"] = draw.maybe(0.3, lambda: _bias(draw, (batch, heads, q_seq, kv_seq)))
        slopes = draw.one((heads,), (batch, heads))
        arrays["alibi_slopes"] = draw.maybe(0.2, lambda: draw.array(slopes, F32, 0.1))
        if draw.chance(0.2):
            rate, seed = draw.one(0.1, 0.5, 0.9), draw.one(0, 1, 123456789)
            factors = kept(seed, (batch, heads, q_seq, kv_seq), rate) * growth(rate)
    further = {} if factors is None else {"dropout_rate": rate, "dropout_seed": seed}
    name = draw.one(
        "attention", "attention", "attention", "attention_forward", "attention_backward"
    )
    scale = options.get("scale", dim**-0.5)
    tolerance = TOLERANCES[dtype] * steepness(dtype, arrays["q"], arrays["k"], scale)
    gradients: tuple[str, ...] = ()
    if name == "attention" and draw.chance(0.4):
        gradients = ("q", "k", "v")
        if arrays.get("bias") is not None:
            gradients = (*gradients, "bias")
    if name == "attention_backward":
        arrays["d_out"] = draw.array((batch, q_seq, heads, v_dim), dtype)
    # Parts of gradients cancel out: all of them where there is one key, or a bias for all keys.
    terms = None
    if gradients or name == "attention_backward":
        terms = functools.partial(references.attention_terms, **options, factors=factors)
    refer = functools.partial(
        references.attention_gradients if name == "attention_backward" else references.attention,
        **options,
        factors=factors,
    )
    if name == "attention_forward":
        refer = functools.partial(refer, logarithms=True)

    def function(q: Any, k: Any, v: Any, d_out: Any = None, **given: Any) -> Any:
        given.update(options, **further)
        if name != "attention_backward":
            return getattr(ops, name)(q, k, v, **given)
        out, lse = ops.attention_forward(q, k, v, **given)
        return ops.attention_backward(q, k, v, out, lse, d_out, **given)

    return Program(
        name,
        arrays,
        {**options, **further},
        function,
        lambda **given: refer(**given),
        gradients,
        tolerance * (2 if terms else 1),
        terms=terms,
        unit=TOLERANCES[dtype],
        # Weights are dropped by the number of their batch.
        mappable=factors is None,
    )


def plain_attention(draw: Draw) -> Program:
    """Attention that no implementation leaves to another."""
    return attention(draw, plain=True)


def _hide(draw: Draw, arrays: dict[str, Any], options: dict[str, Any]) -> None:
    """Adds what hides keys: segments, a block mask."""
    (batch, q_seq, heads, _), kv_seq = arrays["q"].shape, arrays["k"].shape[1]
    arrays["q_segments"] = arrays["kv_segments"] = arrays["block_mask"] = None
    if draw.chance(0.3):
        ordered = draw.chance(0.7)
        for name, extent in (("q_segments", q_seq), ("kv_segments", kv_seq)):
            drawn = draw.random.integers(0, draw.one(1, 3, 6), (batch, extent)).astype(np.int32)
            arrays[name] = np.sort(drawn, axis=1) if ordered else drawn
    if draw.chance(0.25):
        block = draw.one(32, 64, 96, 128), draw.one(32, 64, 96, 128)
        outer = draw.one(1, batch), draw.one(1, heads)
        shape = (*outer, -(-q_seq // block[0]), -(-kv_seq // block[1]))
        arrays["block_mask"] = draw.random.random(shape) < 0.6
        options["mask_block"] = block


def _bias(draw: Draw, full: tuple[int, ...]) -> np.ndarray:
    shape = tuple(1 if draw.chance(0.3) else extent for extent in full)
    return draw.array(shape, draw.one(F32, BF16, F16))


KINDS = (attention, attention, plain_attention)
