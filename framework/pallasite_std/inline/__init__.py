"""Where our values meet those of ``jax.experimental.mosaic.gpu``, in inlined code.

That module is imported when such code is lowered, and not before.
"""
