"""Where a pipeline stands in a sequence of pipelines that share their memory."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import checks


class PipelinePipeline(enum.IntEnum):
    """Position of one pipeline in a sequence that runs without draining in between."""

    #: The first: all stages are free.
    START = 0
    #: In the middle: it fills stages as soon as the pipeline before it has used them.
    STEADY = 1
    #: The last: it waits until all stages are free again.
    STOP = 2
    #: First and last at once, for a sequence of one.
    SINGLE = 3


@dataclasses.dataclass(frozen=True)
class Place:
    """What a state says: booleans, or boolean scalars that the kernel computes.

    Attributes:
      first: whether all stages are free at the beginning.
      last: whether all stages have to be free at the end.
      in_sequence: whether other pipelines may come before or after, so that each one has to begin
        and end at the first stage.
    """

    first: Any
    last: Any
    in_sequence: bool


def place_of(state: Any) -> Place:
    """What ``pipeline_state`` says: a PipelinePipeline, an integer scalar, or None.

    Raises:
      InvalidTypeError: anything else.
    """
    if state is None:
        return Place(True, True, False)
    single = PipelinePipeline.SINGLE
    if checks.is_integer(state):
        if state not in list(PipelinePipeline):
            raise checks.value_error(
                "pipeline_state is unknown", got=state, expected="a PipelinePipeline"
            )
        return Place(
            state in (PipelinePipeline.START, single),
            state in (PipelinePipeline.STOP, single),
            True,
        )
    aval = getattr(state, "aval", None) or _jax.typeof(state)
    if getattr(aval, "shape", None) != () or aval.dtype.kind not in "iu":
        raise checks.type_error(
            "pipeline_state is not an integer scalar",
            got=aval,
            expected="None, a PipelinePipeline, or an integer scalar with its value",
        )
    number = lax.convert_element_type(state, jnp.int32)

    def is_one_of(*states: PipelinePipeline) -> Any:
        first, second = (number == jnp.int32(int(s)) for s in states)
        return lax.bitwise_or(first, second)

    return Place(
        is_one_of(PipelinePipeline.START, single), is_one_of(PipelinePipeline.STOP, single), True
    )
