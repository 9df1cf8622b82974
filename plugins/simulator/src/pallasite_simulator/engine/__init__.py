"""The machine: blocks, warps and lanes, their registers and memory, and the order they run in."""
