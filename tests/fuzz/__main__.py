"""Random tests: ``python -m tests.fuzz SUBJECT --seed N --count N``; subjects are the modules."""

from __future__ import annotations

import importlib
import os
import pathlib
import sys

# References are small, and run for less time than their optimization takes; programs are mapped
# over two devices. XLA reads it later.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=2"
)

from tests.checkout_plugins import install_plugins

if __name__ == "__main__":
    folder = pathlib.Path(__file__).parent
    subjects = sorted(p.stem for p in folder.glob("[!_]*.py") if not p.stem.startswith("test_"))
    if len(sys.argv) < 2 or sys.argv[1] not in subjects:
        sys.exit(f"usage: python -m tests.fuzz {{{','.join(subjects)}}} --seed N --count N")
    install_plugins()
    sys.exit(importlib.import_module(f"tests.fuzz.{sys.argv[1]}").main(sys.argv[2:]))
