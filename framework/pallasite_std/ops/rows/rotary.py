"""``rotary_embedding``: the function that programs call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite.plugin import InvalidTypeError
from pallasite_std.ops.arguments import matched, positive, without_derivatives, zeros
from pallasite_std.ops.rows.arguments import float_array
from pallasite_std.ops.rows.elementwise import ELEMENTS
from pallasite_std.ops.rows.tiling import LANES


def rotary_embedding(
    x: jax.Array,
    positions: jax.Array,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> jax.Array:
    """Rotates pairs of elements of each head by angles that grow with the position.

    Pair i of a head is multiplied, as a complex number, by
    ``exp(1j * position * base**(-2 * i / rotary_dim))``.

    Args:
      x: (..., tokens, heads, head_dim), bfloat16, float16 or float32; it is computed in float32.
      positions: (tokens,), or (..., tokens) as the leading axes of x: numbers.
      base: of the angles.
      rotary_dim: how many elements of each head are rotated, an even number; the rest is copied.
        By default all.
      interleaved: whether a pair is of neighbours (2i, 2i + 1), instead of halves
        (i, i + rotary_dim / 2).

    Returns:
      An array like x, which has gradients by it, of any order.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.

    Source: J. Su et al., "RoFormer", arXiv 2104.09864.
    """
    x, positions = float_array(x, "x", rank=3), jnp.asarray(positions)
    *lead, tokens, heads, head_dim = x.shape
    rotated = head_dim if rotary_dim is None else rotary_dim
    if not 0 < rotated <= head_dim or rotated % 2:
        raise InvalidTypeError(
            "so many elements of a head cannot be rotated",
            got=f"rotary_dim {rotated}, heads of {head_dim}",
            expected="an even number, at most that of a head",
        )
    if positions.shape not in ((tokens,), (*lead, tokens)):
        raise InvalidTypeError(
            "positions do not fit the tokens",
            got=f"{positions.dtype}{list(positions.shape)}",
            expected=f"shape {(tokens,)} or {(*lead, tokens)}",
        )
    frequencies = positive(base, "base") ** (-np.arange(0, rotated, 2) / rotated)
    angles = without_derivatives(
        "rotary_embedding by positions",
        "use jax.numpy, or jax.lax.stop_gradient of the positions",
        functools.partial(_angles, tuple(frequencies), (*lead, tokens)),
    )
    x, cosines, sines = matched(x, *angles(positions))
    if x.size == 0:
        return zeros(x.shape, np.dtype(x.dtype), x)
    rows = x.reshape(-1, heads, head_dim)
    result: jax.Array = _rotate(interleaved, rows, cosines, sines)
    return result.reshape(x.shape)


def _angles(
    frequencies: tuple[float, ...], shape: tuple[int, ...], positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, (all tokens, pairs)."""
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)
    angles = jnp.broadcast_to(angles, (*shape, len(frequencies))).reshape(-1, len(frequencies))
    return jnp.cos(angles), jnp.sin(angles)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(interleaved: bool, x: Any, cosines: Any, sines: Any) -> Any:
    kernel = _kernel(interleaved, *x.shape, cosines.shape[1], np.dtype(x.dtype))
    return kernel(x, cosines, sines)


def _forward(interleaved: bool, x: Any, cosines: Any, sines: Any) -> tuple[Any, Any]:
    return _rotate(interleaved, x, cosines, sines), (cosines, sines)


def _backward(interleaved: bool, saved: Any, d_out: Any) -> tuple[Any, Any, Any]:
    cosines, sines = saved
    # The transpose of a rotation is the one back; nobody asks for gradients by angles.
    d_x = _rotate(interleaved, d_out, cosines, -sines)
    return d_x, jnp.zeros_like(cosines), jnp.zeros_like(sines)


_rotate.defvjp(_forward, _backward)


@functools.lru_cache(maxsize=512)
def _kernel(
    interleaved: bool,
    tokens: int,
    heads: int,
    head_dim: int,
    pairs: int,
    dtype: np.dtype[Any],
) -> Callable[..., Any]:
    """A kernel of which each block rotates some heads of some tokens."""
    most = max(1, 2 * LANES * ELEMENTS // head_dim)
    together = 1
    while heads % (2 * together) == 0 and 2 * together <= most:
        together *= 2
    height = 1
    while 2 * height * together <= most and 2 * height <= tokens:
        height *= 2
    full, left = tokens // height, tokens % height

    def body(*refs: Any) -> None:
        tile = lax.axis_index("tokens")
        if left:
            pl.when(tile < full)(lambda: rotate(height, *refs))
            pl.when(tile == full)(lambda: rotate(left, *refs))
        else:
            rotate(height, *refs)

    def rotate(count: int, x: Any, cosines: Any, sines: Any, out: Any) -> None:
        place = pl.ds(lax.axis_index("tokens") * height, count)
        some = pl.ds(lax.axis_index("heads") * together, together)
        shape = (count, together, pairs)
        cosine, sine = (lax.broadcast_in_dim(ref[place], shape, (0, 2)) for ref in (cosines, sines))

        def turn(first: Any, second: Any) -> tuple[Any, Any]:
            first, second = first.astype(jnp.float32), second.astype(jnp.float32)
            return first * cosine - second * sine, second * cosine + first * sine

        if interleaved:
            both = x[place, some, pl.ds(0, 2 * pairs)].reshape(*shape, 2)
            values = turn(both[..., 0], both[..., 1])
            turned = jnp.stack(values, axis=3).reshape(count, together, 2 * pairs)
            out[place, some, pl.ds(0, 2 * pairs)] = turned.astype(dtype)
        else:
            halves = pl.ds(0, pairs), pl.ds(pairs, pairs)
            values = turn(*(x[place, some, half] for half in halves))
            for half, value in zip(halves, values, strict=True):
                out[place, some, half] = value.astype(dtype)
        if 2 * pairs < head_dim:
            rest = pl.ds(2 * pairs, head_dim - 2 * pairs)
            out[place, some, rest] = x[place, some, rest]

    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, heads, head_dim), dtype),
        grid=(heads // together, -(-tokens // height)),
        grid_names=("heads", "tokens"),
        kernel_name="rotary_embedding",
    )
    return kernel
