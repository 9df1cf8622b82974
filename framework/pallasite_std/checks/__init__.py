"""Checks of kernels before code is generated: indices, the grid, copies, barriers."""
