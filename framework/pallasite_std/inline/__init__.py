"""Conversion of values from and to ``jax.experimental.mosaic.gpu``, for inlined code.

That module is imported when such code is lowered, and not before.
"""
