"""Code generation: MLIR to LLVM IR to PTX, and on to machine code where there is an assembler."""
