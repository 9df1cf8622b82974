"""Register and memory layouts as plain data, with the algebra that lowering rules need."""

from pallasite.layouts.construct import Replicated as Replicated
from pallasite.layouts.construct import Tiling as Tiling
from pallasite.layouts.construct import default_strided as default_strided
from pallasite.layouts.construct import default_vector_length as default_vector_length
from pallasite.layouts.construct import strided as strided
from pallasite.layouts.construct import tiled as tiled
from pallasite.layouts.conversion import ConversionKind as ConversionKind
from pallasite.layouts.conversion import conversion as conversion
from pallasite.layouts.description import describe as describe
from pallasite.layouts.digits import Digit as Digit
from pallasite.layouts.digits import Owner as Owner
from pallasite.layouts.memory import Extent as Extent
from pallasite.layouts.memory import MemoryLayout as MemoryLayout
from pallasite.layouts.memory import row_major as row_major
from pallasite.layouts.memory import swizzle_bytes as swizzle_bytes
from pallasite.layouts.named import resolve as resolve
from pallasite.layouts.registers import Layout as Layout
from pallasite.layouts.registers import Rearrangement as Rearrangement
from pallasite.layouts.registers import RegisterLayout as RegisterLayout
from pallasite.layouts.registers import SplatLayout as SplatLayout
