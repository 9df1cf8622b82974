"""Element-wise functions over MLIR values: math functions, conversions and integer arithmetic.

There is no device library, so that every function is expanded here into ``arith``, ``math`` and a
few instructions of the hardware. Start at ``table.py``, which names them all.
"""
