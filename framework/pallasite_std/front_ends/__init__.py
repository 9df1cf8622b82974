"""Kernels that programs write as calls of Pallas: ``pl.pallas_call``, ``pl.kernel`` and others."""
