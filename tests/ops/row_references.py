"""Operations on rows in ``jax.numpy``, to be computed in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def norm(x, weight=None, bias=None, residual=None, *, centered, epsilon, weight_offset=0.0):
    """RMSNorm or layer norm, and the sum with the residual if there is one."""
    total = x if residual is None else x + residual
    values = total - total.mean(-1, keepdims=True) if centered else total
    values = values / jnp.sqrt((values * values).mean(-1, keepdims=True) + epsilon)
    if weight is not None:
        values = values * (weight + weight_offset)
    if bias is not None:
        values = values + bias
    return values if residual is None else (values, total)


def cross_entropy(
    logits, labels, *, label_smoothing=0.0, z_loss=0.0, soft_cap=None, ignored_label=None
):
    """The loss of each row."""
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logarithm = jax.nn.logsumexp(logits, axis=-1)
    there = jnp.clip(labels, 0, logits.shape[-1] - 1)
    chosen = jnp.take_along_axis(logits, there[..., None], -1)[..., 0]
    # Relative to the largest logit, of which the loss has few digits where that is far from zero.
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    target = chosen - largest
    if label_smoothing:  # Logits of minus infinity have no mean.
        rest = (logits - largest[..., None]).mean(-1)
        target = (1 - label_smoothing) * target + label_smoothing * rest
    above = jax.nn.logsumexp(logits - largest[..., None], axis=-1)
    losses = above - target + z_loss * logarithm**2
    return losses if ignored_label is None else jnp.where(labels == ignored_label, 0.0, losses)


def rotary(x, positions, *, base=10000.0, rotary_dim=None, interleaved=False):
    """Pairs of elements as complex numbers, turned."""
    size = rotary_dim or x.shape[-1]
    angles = positions[..., None, None] * base ** (-np.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    part, rest = x[..., :size], x[..., size:]
    if interleaved:
        one, other = part[..., 0::2], part[..., 1::2]
    else:
        one, other = part[..., : size // 2], part[..., size // 2 :]
    one, other = one * cos - other * sin, other * cos + one * sin
    if interleaved:
        turned = jnp.stack([one, other], -1).reshape(part.shape)
    else:
        turned = jnp.concatenate([one, other], -1)
    return jnp.concatenate([turned, rest], -1)
