"""Half a minute of torture on each database; ``DURABLE_TORTURE_SEED`` chooses which.  ``python -m tests.torture`` does
more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.torture.torture import torture

SEED = int(os.environ.get("DURABLE_TORTURE_SEED", "1"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("database", ["sqlite", "postgresql"], ids=lambda kind: f"{kind}-seed-{SEED}")
def test_a_tortured_fleet_loses_nothing_and_runs_nothing_twice(database: str, tmp_path: Path) -> None:
    verdict = torture(SEED, 30, database, tmp_path)
    print(verdict.text())
    assert verdict.good, verdict.text()
