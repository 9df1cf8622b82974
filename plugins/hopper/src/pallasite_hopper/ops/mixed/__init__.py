"""Mixed-precision GEMM of 16-bit activations with narrow weights."""
