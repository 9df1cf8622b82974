"""The record of one check of ``pallasite doctor``."""

from __future__ import annotations

import dataclasses

OK = "ok"
WARNING = "warning"
PROBLEM = "problem"


@dataclasses.dataclass(frozen=True)
class Check:
    """What was found.

    Attributes:
      name: what was looked at.
      text: what was found.
      state: :data:`OK`; :data:`WARNING` if something optional is missing; :data:`PROBLEM` if
        kernels cannot be compiled.
      remedy: what to do, in one line.
    """

    name: str
    text: str
    state: str = OK
    remedy: str = ""
