"""Running compiled kernels from JAX: compilation with caches, launching, platform rules."""
