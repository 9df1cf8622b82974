"""Lowering: from a traced kernel to MLIR.

``entry.lower_kernel`` is the entry point, ``walker`` goes through jaxprs, ``resources`` estimates,
``launch`` collects what the launch needs, ``arrays`` and ``references`` are the values that rules
work on, and ``rules/`` holds the built-in rules by subject.
"""
