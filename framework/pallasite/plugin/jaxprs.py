"""Primitives that carry jaxprs: what to say of one, and the visitor that walks kernels with it."""

from __future__ import annotations

from pallasite.jaxpr_table import JaxprPrimitive as JaxprPrimitive
from pallasite.jaxpr_table import JaxprTable as JaxprTable
from pallasite.jaxpr_table import Region as Region
from pallasite.jaxpr_table import RegionKind as RegionKind
from pallasite.jaxpr_table import branches as branches
from pallasite.jaxpr_table import call as call
from pallasite.jaxpr_table import groups as groups
from pallasite.jaxpr_table import inputs_of as inputs_of
from pallasite.jaxpr_table import loop_body as loop_body
from pallasite.jaxpr_visitor import LoopPolicy as LoopPolicy
from pallasite.jaxpr_visitor import Visitor as Visitor
from pallasite.jaxpr_visitor import effects_outside as effects_outside
from pallasite.jaxpr_visitor import with_insertions as with_insertions
from pallasite.jaxpr_visitor import with_jaxprs as with_jaxprs
