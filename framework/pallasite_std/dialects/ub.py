"""The dialect ``ub``: values that are not defined, such as elements that nobody has inserted."""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects._ods_common import _cext


@_cext.register_dialect
class _Dialect(ir.Dialect):  # type: ignore[misc]
    DIALECT_NAMESPACE = "ub"


@_cext.register_operation(_Dialect)
class PoisonOp(ir.OpView):  # type: ignore[misc]
    """``ub.poison``."""

    OPERATION_NAME = "ub.poison"
    _ODS_REGIONS = (0, True)
