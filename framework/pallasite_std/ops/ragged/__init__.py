"""Products of groups of rows, each with its own matrix."""
