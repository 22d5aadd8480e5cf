"""``python -m dramatiq_durable`` is the command ``dramatiq-durable``."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
