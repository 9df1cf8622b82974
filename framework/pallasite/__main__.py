"""``python -m pallasite`` is the command ``pallasite``."""

from __future__ import annotations

import sys

from pallasite.cli import main

if __name__ == "__main__":
    sys.exit(main())
