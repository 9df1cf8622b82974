"""The parts of the translation from MLIR to LLVM IR, by dialect and subject."""
