"""The command: ``python -m tests.torture --seed N --seconds 60 --database sqlite|postgresql``."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.torture.torture import torture


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="by default a new one, which is printed")
    parser.add_argument("--seconds", type=float, default=60, help="for how long faults are made")
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--keep", action="store_true", help="keep the journal and the logs of a good run too")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.randrange(1_000_000)
    print(f"Torture: seed {seed}, {given.seconds:.0f} s, {given.database}", flush=True)
    room = Path(tempfile.mkdtemp(prefix=f"torture-{seed}-{given.database}-"))
    began = time.monotonic()
    verdict = torture(seed, given.seconds, given.database, room)
    print(verdict.text())
    if verdict.good and not given.keep:
        shutil.rmtree(room, ignore_errors=True)
    passed = sum(not found for found in verdict.violations.values())
    failed = len(verdict.violations) - passed
    print(f"{passed} passed, {failed} failed in {time.monotonic() - began:.0f}s")
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())
