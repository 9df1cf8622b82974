"""Devices of other hosts, which NVLink does not connect: NVSHMEM's functions in kernels."""
