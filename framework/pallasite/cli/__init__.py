"""The command line: ``pallasite compile | inspect | run | targets | plugins | passes | doctor |
cache``.

Each subcommand is one module with ``add_arguments(parser)`` and ``run(arguments)``, which returns
the exit status. Nothing here imports JAX before a subcommand needs it.
"""

from __future__ import annotations

from pallasite.cli.entry import main as main
