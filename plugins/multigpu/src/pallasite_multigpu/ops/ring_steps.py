"""One step of ring attention: attention with the keys that are here, which then go to the next."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallasite import ops
from pallasite.plugin import select_target
from pallasite_multigpu.ops.choice import has_hopper
from pallasite_multigpu.ops.ring_schedule import Step
from pallasite_multigpu.ops.shift import shift


def arguments(step: Step, batch: int) -> dict[str, Any]:
    """What attention takes for a step."""
    given: dict[str, Any] = {"causal": step.causal}
    for name, length in (("q_lengths", step.queries), ("kv_lengths", step.keys)):
        if length is not None:
            given[name] = jnp.full((batch,), length, jnp.int32)
    return given


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    step: Step,
    axis: Hashable,
    count: int,
    options: Mapping[str, Any],
    *,
    sends: bool,
    sent: tuple[jax.Array, jax.Array] | None = None,
    pairs: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """Attention with the keys that are here, and the keys and values of the device before.

    On Hopper, one kernel does both; elsewhere they are sent before.

    Args:
      q, k, v: as of ``pallasite.ops.attention``.
      step: which of them take part.
      axis: of the mesh.
      count: devices along it.
      options: scale and soft cap.
      sends: whether keys and values are wanted; otherwise those given are returned.
      sent: what is sent instead of ``k`` and ``v``.
      pairs: (results, 2), int32: which batch of the queries and which one of the keys and values
        each batch of the result is made of; by default one after another.

    Returns:
      The result, log-sum-exp, keys and values.
    """
    given = {**arguments(step, q.shape[0]), **options}
    sent = (k, v) if sent is None else sent
    if (sends or pairs is not None) and has_hopper():
        from pallasite_multigpu.ops import ring_kernel

        if ring_kernel.fits(q, k):
            lengths = given.pop("q_lengths", None), given.pop("kv_lengths", None)
            blocks = select_target().multiprocessors or 132
            out, lse, come = ring_kernel.attend_and_send(
                *(q, k, v, *lengths, sent if sends else None, axis, count, blocks),
                pairs=pairs,
                **given,
            )
            return out, lse, come or sent
    following = sent
    if sends:
        k_next, v_next = shift([*sent], axis, count)
        following = (k_next, v_next)
    if pairs is not None:
        q, k, v = q[pairs[:, 0]], k[pairs[:, 1]], v[pairs[:, 1]]
    out, lse = ops.attention_forward(q, k, v, **given)
    return out, lse, following
