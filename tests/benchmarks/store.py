"""How fast the verbs of the store are, each alone.

    python -m tests.benchmarks.store [--jobs 100000] [--database sqlite|postgresql]

Prints figures; nothing depends on them.  Both databases wait for the disk, as they must in production.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dramatiq_durable.store import jobs, migrate, outcomes, recovery
from dramatiq_durable.store.database import Database, connect
from dramatiq_durable.store.types import Claimed, NewJob, Outcome
from tests.servers import Postgres

T = TypeVar("T")

#: What one fetch of a worker with eight threads claims and settles; and how many jobs are run through one by one.
BATCH, RUNS = 8, 2_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="postgresql")
    arguments = parser.parse_args()
    postgres = Postgres(durable=True) if arguments.database == "postgresql" else None
    with tempfile.TemporaryDirectory() as room:
        try:
            if postgres is not None:
                postgres.start()
            url = postgres.create() if postgres is not None else f"sqlite:///{Path(room)}/record.sqlite3"
            db = connect(url)
            migrate.upgrade(db)
            _run_through(db)
            _reconcile(db, arguments.jobs)
            db.close_all()
        finally:
            if postgres is not None:
                postgres.close()


def _run_through(db: Database) -> None:
    ids = [str(uuid.uuid4()) for _ in range(RUNS)]
    _timed("record, one by one", RUNS, lambda: [jobs.record(db, _new(id)) for id in ids])
    claims = _timed(f"claim, {BATCH} at a time", RUNS, lambda: _claim(db, ids))
    _timed(f"retry, {BATCH} at a time", RUNS, lambda: _settle(db, claims, "retry"))
    claims = _claim(db, ids)
    _timed(f"complete, {BATCH} at a time", RUNS, lambda: _settle(db, claims, "completed"))


def _reconcile(db: Database, number: int) -> None:
    ids = [str(uuid.uuid4()) for _ in range(number)]
    _timed("record, 1,000 at a time", number, lambda: [jobs.record_many(db, _all_new(c)) for c in _chunks(ids, 1_000)])
    pairs = _timed("look through waiting", number, lambda: list(_waiting(db)))
    back = _timed("put back", number, lambda: [recovery.put_back(db, chunk) for chunk in _chunks(pairs, 2_000)])
    assert sum(map(len, back)) == number
    _timed("take due", number, lambda: _take_all(db))
    claims = jobs.claim(db, "w1", ids[:1_000], 60_000)
    held = [(claim.id, claim.claim, True) for claim in claims]
    _timed("renew 1,000, ten times", 10, lambda: [jobs.renew(db, "w1", held, 60_000) for _ in range(10)])


def _new(id: str) -> NewJob:
    return NewJob(id, "default", "work", "work", b"x" * 300, broker_ref=id)


def _all_new(ids: Sequence[str]) -> list[NewJob]:
    return [_new(id) for id in ids]


def _claim(db: Database, ids: list[str]) -> list[Claimed]:
    return [claim for chunk in _chunks(ids, BATCH) for claim in jobs.claim(db, "w1", chunk, 60_000)]


def _settle(db: Database, claims: list[Claimed], kind: str) -> None:
    for chunk in _chunks(claims, BATCH):
        outcomes.settle(db, "w1", [Outcome(claim.id, claim.claim, kind) for claim in chunk])


def _waiting(db: Database) -> Iterator[tuple[str, str | None]]:
    after = ""
    while page := recovery.waiting_page(db, after, 2_000, -1_000):
        after = page[-1].id
        yield from ((row.id, row.broker_ref) for row in page)


def _take_all(db: Database) -> None:
    while recovery.take_due(db, 1_000):
        pass


def _chunks(items: Sequence[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


def _timed(what: str, number: int, work: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = work()
    took = time.perf_counter() - began
    print(f"{what:26} {took:8.2f} s {number / took:12,.0f} /s", flush=True)
    return result


if __name__ == "__main__":
    main()
