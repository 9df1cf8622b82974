"""Several devices at once: kernels that reach each other's memory, in one joint simulation."""
