"""Several processes that share the blocks of a grid."""
