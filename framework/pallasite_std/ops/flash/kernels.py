"""What kernels of attention of other plugins are made of."""

from pallasite_std.ops.flash.problem import Problem as AttentionProblem
from pallasite_std.ops.flash.problem import View as AttentionView
from pallasite_std.ops.flash.steps import over_keys as over_keys
from pallasite_std.ops.flash.steps import over_queries as over_queries

__all__ = ["AttentionProblem", "AttentionView", "over_keys", "over_queries"]
