"""Where a pipeline stands in a sequence of pipelines that share their memory."""

from __future__ import annotations

import enum


class PipelinePipeline(enum.IntEnum):
    """Position of one pipeline in a sequence that runs without draining in between."""

    #: The first: all slots are free.
    START = 0
    #: In the middle: it fills slots as soon as the pipeline before it has used them.
    STEADY = 1
    #: The last: it waits until all slots are free again.
    STOP = 2
