"""Register and memory layouts as plain data, and what is planned with them."""

from __future__ import annotations

from pallasite.layouts import digits as digits
from pallasite.layouts import named as named
from pallasite.layouts import transforms as transforms
from pallasite.layouts.construct import Replicated as Replicated
from pallasite.layouts.construct import default_strided as default_strided
from pallasite.layouts.construct import even as even
from pallasite.layouts.construct import padded as padded
from pallasite.layouts.construct import strided as strided
from pallasite.layouts.conversion import ConversionKind as ConversionKind
from pallasite.layouts.conversion import conversion as conversion
from pallasite.layouts.description import describe as describe
from pallasite.layouts.digits import LANES as LANES
from pallasite.layouts.digits import THREADS as THREADS
from pallasite.layouts.digits import WARPS as WARPS
from pallasite.layouts.digits import Digit as Digit
from pallasite.layouts.digits import Owner as Owner
from pallasite.layouts.digits import unravel as unravel
from pallasite.layouts.memory import BANK_BYTES as BANK_BYTES
from pallasite.layouts.memory import BANKS as BANKS
from pallasite.layouts.memory import Extent as Extent
from pallasite.layouts.memory import Extents as Extents
from pallasite.layouts.memory import MemoryLayout as MemoryLayout
from pallasite.layouts.memory import OffsetTerm as OffsetTerm
from pallasite.layouts.memory import row_major as row_major
from pallasite.layouts.memory import swizzle_bytes as swizzle_bytes
from pallasite.layouts.proposals import LayoutProposals as LayoutProposals
from pallasite.layouts.proposals import proposals_for as proposals_for
from pallasite.layouts.reduction import ReductionPlan as ReductionPlan
from pallasite.layouts.reduction import reduction_plan as reduction_plan
from pallasite.layouts.registers import Layout as Layout
from pallasite.layouts.registers import Rearrangement as Rearrangement
from pallasite.layouts.registers import RegisterLayout as RegisterLayout
from pallasite.layouts.registers import Source as Source
from pallasite.layouts.registers import SplatLayout as SplatLayout
from pallasite.layouts.tiled_layout import TiledSpecification as TiledSpecification
from pallasite.layouts.tiled_layout import fragment_tiles as fragment_tiles
from pallasite.layouts.tiled_layout import tiled_specification as tiled_specification
