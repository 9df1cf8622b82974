"""Grouped (ragged) GEMM, whose group sizes only the GPU knows."""
