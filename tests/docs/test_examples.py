"""The examples run as their own text says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.servers import Valkey

ROOT = Path(__file__).parents[2]


def test_the_minimal_example_survives_a_flush(valkey: Valkey) -> None:
    """P2: one file, one command; Redis forgets, the job runs."""
    env = {**os.environ, "REDIS_URL": valkey.url, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples/minimal/app.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Hello, Ada." in done.stdout
    assert "is completed, after 1 attempt; put back 1 time." in done.stdout
