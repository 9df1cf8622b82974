"""The sources of the kernels that name their layouts: see ``sources.py``."""

from __future__ import annotations

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import harness

from explicit_layouts import sources

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=sources.__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", type=pathlib.Path, help="writes the sources to this folder")
    group.add_argument("--compare", type=pathlib.Path, help="makes the differences to these")
    arguments = parser.parse_args()
    harness.use_checkout()
    if arguments.write is not None:
        sources.write(arguments.write)
    else:
        sources.compare(arguments.compare)
