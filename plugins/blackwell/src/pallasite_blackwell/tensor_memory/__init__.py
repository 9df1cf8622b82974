"""Tensor memory: its layouts, allocation, references, loads and stores."""
