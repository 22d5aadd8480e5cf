from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import dramatiq_durable

HOME = Path(dramatiq_durable.__file__).parents[1]


class Answer(NamedTuple):
    """What a command said."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


Command = Callable[..., Answer]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """The real command, in a process of its own and a directory of its own, 80 columns wide."""

    def run(*args: str, env: dict[str, str] | None = None, **options: Any) -> Answer:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DRAMATIQ_DURABLE_")}
        path = os.pathsep.join([str(HOME), *filter(None, [kept.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-m", "dramatiq_durable", *args],
            cwd=tmp_path,
            env={**kept, "PYTHONPATH": path, "COLUMNS": "80", "TZ": "Asia/Kolkata", **(env or {})},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
            **options,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/jobs.sqlite3"
