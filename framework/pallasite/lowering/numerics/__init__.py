"""Element-wise functions of numbers, as pure functions over scalar or vector values."""
