"""What kernel authors touch: memory, references, primitives, kernels and pipelines."""
