"""Matrix products of 16-bit activations with narrow weights."""
