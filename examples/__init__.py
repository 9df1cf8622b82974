"""Small kernels, each explained in its module; ``python examples/demo.py`` runs them all."""
