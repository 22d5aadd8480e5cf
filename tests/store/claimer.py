"""A process that claims: ``python -m tests.store.claimer URL OWNER THREADS JOBS``; prints what it was granted."""

from __future__ import annotations

import json
import random
import sys
import threading

from dramatiq_durable.store import jobs, migrate
from dramatiq_durable.store.database import Database, connect


def claim_all(db: Database, owner: str, wanted: list[str], granted: list[tuple[str, int]]) -> None:
    while wanted:
        batch, wanted = wanted[:5], wanted[5:]
        granted.extend((claim.id, claim.claim) for claim in jobs.claim(db, owner, batch, 60_000))
    db.close_thread()


def main(url: str, owner: str, threads: int, number: int) -> None:
    db = connect(url)
    granted: list[tuple[str, int]] = []
    ids = [f"job-{i}" for i in range(number)]
    workers = [
        threading.Thread(target=claim_all, args=(db, f"{owner}-{i}", random.sample(ids, number), granted))
        for i in range(threads)
    ]
    print("ready", flush=True)
    sys.stdin.readline()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(json.dumps(granted), flush=True)


def upgrade(url: str) -> None:
    db = connect(url)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(migrate.upgrade(db)), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        upgrade(sys.argv[1])
    else:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
