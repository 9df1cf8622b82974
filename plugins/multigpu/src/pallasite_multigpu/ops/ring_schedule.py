"""Which queries see which keys of a sequence whose parts lie on several devices.

In the placement ``"contiguous"``, a device has one piece of the sequence. In ``"zigzag"`` it has
two chunks, one from the first half of the sequence, one from the second: with n devices, device r
has the chunks r and 2n - 1 - r, so that a causal mask leaves all of them the same work. Of the s
tokens of a device, ``(s + 1) // 2`` are in the first chunk.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
from jax import lax

from pallasite.plugin import InvalidValueError

type Placement = Literal["contiguous", "zigzag"]


def chunks(tokens: int) -> tuple[int, int]:
    """Tokens of a device's first chunk and of its second one."""
    return (tokens + 1) // 2, tokens // 2


def zigzag_order(length: int, devices: int) -> np.ndarray:
    """The order that places a sequence in a zigzag: ``x.take(order, axis)`` is what to shard.

    ``numpy.argsort`` of it is the way back.

    Args:
      length: of the whole sequence, a multiple of ``devices``.
      devices: that share it.

    Returns:
      (length,), int64: for each place the number of its token.

    Raises:
      InvalidValueError: a length that the devices cannot share.
    """
    if devices < 1 or length < 0 or length % devices:
        raise InvalidValueError(
            "zigzag_order: the sequence cannot be divided among the devices",
            got=f"{length} tokens, {devices} devices",
            expected="a multiple of the number of devices",
            hint="pad the sequence",
        )
    first, second = chunks(length // devices)
    found = []
    for device in range(devices):
        found += [
            np.arange(device * first, (device + 1) * first),
            devices * first
            + np.arange((devices - 1 - device) * second, (devices - device) * second),
        ]
    return np.concatenate(found)


@dataclasses.dataclass(frozen=True)
class Step:
    """What the queries of a device see of the keys that are there in one step of the ring.

    Attributes:
      causal: whether a causal mask applies, of the device's own tokens.
      queries, keys: how many of them take part, from the first on; None for all.
    """

    causal: bool = False
    queries: Any = None
    keys: Any = None


def step_of(number: int, own: Any, tokens: int, causal: bool, placement: Placement) -> Step:
    """A step of the ring, in which a device has the keys of the device ``number`` before it.

    With the placement ``"zigzag"`` and a causal mask, the queries of all steps but the first have
    to be rotated, see :func:`rotation`.

    Args:
      number: of the step, from 0.
      own: the index of this device.
      tokens: of a device.
      causal: whether queries see no later keys.
      placement: of the sequence.
    """
    if not causal or number == 0:
        return Step(causal=causal)
    earlier = own >= number  # The keys are of a device before this one.
    if placement == "contiguous":
        return Step(keys=lax.select(earlier, np.int32(tokens), np.int32(0)))
    first, second = chunks(tokens)
    return Step(
        queries=lax.select(earlier, np.int32(tokens), np.int32(second)),
        keys=lax.select(earlier, np.int32(first), np.int32(tokens)),
    )


def rotation(tokens: int, causal: bool, placement: Placement) -> int:
    """By how many tokens queries are rotated after the first step: their second chunk comes first.

    A device that has keys of a later one uses these queries only.
    """
    return chunks(tokens)[0] if causal and placement == "zigzag" else 0
