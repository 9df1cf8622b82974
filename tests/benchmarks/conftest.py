"""The benchmarks import one another as scripts of one folder do, and published kernels."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]

sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests" / "upstream")]
