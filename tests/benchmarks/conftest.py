"""The benchmarks import one another as scripts of one folder do."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))
