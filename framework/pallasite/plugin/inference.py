"""Layout inference: what a rule is given, and what it can say."""

from __future__ import annotations

from pallasite.lowering.inference.allocations import open_layout as open_layout
from pallasite.lowering.inference.context import InferenceContext as InferenceContext
from pallasite.lowering.inference.costs import UNCERTAIN as UNCERTAIN
from pallasite.lowering.inference.costs import reduction_cost as reduction_cost
from pallasite.lowering.inference.pairs import Pair as Pair
from pallasite.lowering.inference.pairs import broadcast as broadcast
from pallasite.lowering.inference.pairs import remembered as remembered
from pallasite.lowering.inference.pairs import tried as tried
from pallasite.lowering.inference.plan import Path as Path
from pallasite.lowering.inference.problem import AccessCheck as AccessCheck
from pallasite.lowering.inference.problem import Pairs as Pairs
from pallasite.lowering.inference.values import AbstractValue as AbstractValue
from pallasite.lowering.inference.values import ArrayValue as ArrayValue
from pallasite.lowering.inference.values import MemoryValue as MemoryValue
from pallasite.lowering.inference.values import OtherValue as OtherValue
from pallasite.lowering.inference.values import ScalarValue as ScalarValue
from pallasite.lowering.inference.views import View as View
from pallasite.lowering.inference.views import start_of as start_of
from pallasite.lowering.inference.views import view_of as view_of
