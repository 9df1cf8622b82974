"""The pass pipeline and the built-in passes."""
