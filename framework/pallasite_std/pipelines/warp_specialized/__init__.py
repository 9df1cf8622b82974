"""The warp-specialised pipeline: one thread of the block copies, the others compute."""
