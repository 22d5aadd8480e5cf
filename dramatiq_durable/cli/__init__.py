"""The command ``dramatiq-durable``.

Its libraries come with the extra ``cli``; this module needs none of them, so that it can say so.
"""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]

#: What is printed when the extra is missing.
HINT = 'The command line needs two more libraries. Install them with: pip install "dramatiq-durable[cli]"'


def main() -> None:
    """Run the command and exit: 0 when all is well, 1 when it is not, 2 when the question could not be answered."""
    if any(importlib.util.find_spec(name) is None for name in ("typer", "rich")):
        print(HINT, file=sys.stderr)
        sys.exit(2)
    from .app import run

    sys.exit(run())
