"""Products of activations with narrow weights."""
