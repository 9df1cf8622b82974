"""Small kernels, each explained in its module; ``python examples/demo.py`` compiles and runs them."""
