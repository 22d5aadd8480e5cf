"""The examples run as their own text says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import Valkey

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("given", [True, False], ids=["its own server", "a given server"][::-1])
def test_the_minimal_example_survives_a_queue_that_is_lost(valkey: Valkey, tmp_path: Path, given: bool) -> None:
    # Given somebody else's data in a server that is given
    with valkey.client() as client:
        client.set("somebody", "else")

    # When the example is run
    env = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    env |= {"PYTHONPATH": str(ROOT)} | ({"REDIS_URL": valkey.url} if given else {})
    command = [sys.executable, str(ROOT / "examples/minimal/app.py")]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    # Then its job ran once, and nothing of others was touched.
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith(" is queued.") and lines[1:3] == ["Redis has forgotten everything.", "Hello, Ada."]
    assert lines[3].endswith(" is completed, after 1 attempt; put back 1 time.")
    with valkey.client() as client:
        assert client.get("somebody") == b"else"
    assert list(tmp_path.iterdir()) == []
