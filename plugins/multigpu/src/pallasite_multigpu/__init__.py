"""Kernels that read, write and signal the memory of other GPUs."""
