"""``python -m pallasite`` is the command ``pallasite``."""

from __future__ import annotations

import sys

from pallasite.cli import main  # noqa: TID251

if __name__ == "__main__":
    sys.exit(main())
