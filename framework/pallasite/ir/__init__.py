"""MLIR helpers: types, constants, memory operations and structured control flow in few words."""
