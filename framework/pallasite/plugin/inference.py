"""Layout inference: what a rule is given, and what it can say."""

from __future__ import annotations

from pallasite.lowering.inference.allocations import open_layout as open_layout
from pallasite.lowering.inference.context import InferenceContext as InferenceContext
from pallasite.lowering.inference.costs import IMPOSSIBLE as IMPOSSIBLE
from pallasite.lowering.inference.costs import UNCERTAIN as UNCERTAIN
from pallasite.lowering.inference.costs import is_impossible as is_impossible
from pallasite.lowering.inference.entry import Inference as Inference
from pallasite.lowering.inference.fences import ACCESSES as ACCESSES
from pallasite.lowering.inference.fences import Branches as Branches
from pallasite.lowering.inference.fences import Event as Event
from pallasite.lowering.inference.fences import Fences as Fences
from pallasite.lowering.inference.fences import Fork as Fork
from pallasite.lowering.inference.fences import Key as Key
from pallasite.lowering.inference.fences import Loop as Loop
from pallasite.lowering.inference.pairs import Pair as Pair
from pallasite.lowering.inference.pairs import broadcast as broadcast
from pallasite.lowering.inference.pairs import remembered as remembered
from pallasite.lowering.inference.pairs import tried as tried
from pallasite.lowering.inference.plan import Path as Path
from pallasite.lowering.inference.problem import Access as Access
from pallasite.lowering.inference.problem import AccessCheck as AccessCheck
from pallasite.lowering.inference.problem import Factor as Factor
from pallasite.lowering.inference.problem import Fixed as Fixed
from pallasite.lowering.inference.problem import MemoryChoice as MemoryChoice
from pallasite.lowering.inference.problem import MemoryUse as MemoryUse
from pallasite.lowering.inference.problem import Pairs as Pairs
from pallasite.lowering.inference.problem import Problem as Problem
from pallasite.lowering.inference.problem import Relation as Relation
from pallasite.lowering.inference.problem import Variable as Variable
from pallasite.lowering.inference.solver import Solver as Solver
from pallasite.lowering.inference.values import ANY as ANY
from pallasite.lowering.inference.values import AbstractValue as AbstractValue
from pallasite.lowering.inference.values import ArrayValue as ArrayValue
from pallasite.lowering.inference.values import MemoryValue as MemoryValue
from pallasite.lowering.inference.values import OtherValue as OtherValue
from pallasite.lowering.inference.values import ScalarValue as ScalarValue
from pallasite.lowering.inference.views import View as View
from pallasite.lowering.inference.views import start_of as start_of
from pallasite.lowering.inference.views import view_of as view_of
