"""The compiler parameters of the standard library, which a kernel gives with ``plugin_options``,
and its options of the configuration."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from pallasite.plugin import InvalidTypeError, InvalidValueError, config, option

DEFAULT_LIMIT = 60_000
"""Operations; the assembler takes about a minute for so many."""


def _positive(value: Any) -> int:
    number = int(value)
    if number < 1 or isinstance(value, bool):
        raise ValueError
    return number


config.declare(
    config.Option(
        name="code_limit",
        variable="PALLASITE_CODE_LIMIT",
        default=lambda: DEFAULT_LIMIT,
        parse=_positive,
        accepts="a number of operations, at least 1",
        description="how many operations a kernel may have when it is given to LLVM",
        affects_code=False,
    )
)


class TraceScope(enum.Enum):
    """Who records profiler events."""

    WARP = "warp"
    WARPGROUP = "warpgroup"


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """``CompilerParams(plugin_options={"standard": {...}})``; those of the profiler are keywords of
    ``CompilerParams``, too.

    Attributes:
      partial_outputs: whether the kernel may leave elements of its outputs unwritten, of which
        nothing is promised: executors that look for unwritten outputs do not object.
      profile_space: how many regions of ``jax.named_scope`` one recorder can profile, counting
        each pass through a loop; 0 switches the profiler off. Needs ``profile_dir``.
      profile_dir: folder that a Chrome trace is written to at each launch.
      profile_trace_scope: whether each warp or each warpgroup records.
      profile_bounds_check: drops what is beyond ``profile_space``; otherwise it overwrites memory.
    """

    partial_outputs: bool = option(
        False, "whether elements of outputs may be left unwritten, which else is an error"
    )
    profile_space: int = option(
        0, "how many regions of jax.named_scope one recorder can profile", keyword=True
    )
    profile_dir: str = option("", "folder that traces are written to", keyword=True)
    profile_trace_scope: TraceScope = option(
        TraceScope.WARPGROUP, "whether each warp or each warpgroup records", keyword=True
    )
    profile_bounds_check: bool = option(
        False, "whether what is beyond profile_space is dropped", keyword=True
    )

    def __post_init__(self) -> None:
        if self.profile_space < 0:
            raise InvalidValueError(
                "profile_space is negative", got=str(self.profile_space), expected="0 or more"
            )
        if bool(self.profile_space) != bool(self.profile_dir):
            raise InvalidValueError(
                "profile_space and profile_dir go together",
                got=f"profile_space={self.profile_space}, profile_dir={self.profile_dir!r}",
                expected="both or neither",
            )
        if not isinstance(self.profile_trace_scope, TraceScope):
            raise InvalidTypeError(
                "profile_trace_scope is unknown",
                got=repr(self.profile_trace_scope),
                expected="TraceScope.WARP or TraceScope.WARPGROUP",
            )
