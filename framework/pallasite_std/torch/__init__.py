"""Calling kernels from PyTorch."""
