"""Small kernels, each explained in its module; ``python examples/demo.py --all`` runs them all."""
