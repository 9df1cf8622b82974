"""GEMM."""
