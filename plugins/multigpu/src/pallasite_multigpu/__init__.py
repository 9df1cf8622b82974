"""Kernels that read, write and signal the memory of other GPUs."""

from __future__ import annotations

from pallasite_multigpu import options as options  # declares the options of the configuration
