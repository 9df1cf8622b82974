"""How operations of MLIR that the portable rules emit are written as LLVM IR."""
