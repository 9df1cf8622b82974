"""Matrix products of groups of rows, whose sizes only the GPU knows."""
