"""Rows for tests: made, brought into a state through the verbs alone, looked at, and aged."""

from __future__ import annotations

from typing import Any

from dramatiq_durable.store import jobs, reading
from dramatiq_durable.store.database import Database
from dramatiq_durable.store.dialects import Statement
from dramatiq_durable.store.types import Claimed, NewJob

__all__ = ["LEASE", "change", "claimed", "expire", "new", "row", "started"]

#: Long enough that no lease runs out by itself in a test.
LEASE = 60_000


def new(id: str, **fields: Any) -> NewJob:
    """A job that was just published, unless *fields* say otherwise."""
    given = {"queue": "default", "actor": "work", "agent": "work", "payload": b"{}", "broker_ref": f"{id}-ref"}
    return NewJob(id, **{**given, **fields})


def row(db: Database, id: str) -> reading.JobRow:
    found = reading.get_job(db, id)
    assert found is not None, f"job {id} has no row"
    return found


def claimed(db: Database, id: str, owner: str = "w1", **fields: Any) -> Claimed:
    """Record a job and claim it."""
    jobs.record(db, new(id, **fields))
    (claim,) = jobs.claim(db, owner, [id], LEASE)
    return claim


def started(db: Database, id: str, owner: str = "w1", on_lost: str = "rerun", alone: int = 0) -> Claimed:
    """Record a job, claim it and start it strictly."""
    claim = claimed(db, id, owner)
    assert jobs.start(db, owner, [(id, claim.claim, on_lost, alone)], LEASE) == {id: claim.attempt + 1}
    return claim


def change(db: Database, text: str, *params: Any) -> None:
    """Change rows behind the verbs' back: time that passes, for the most part."""
    db.execute(Statement("change rows in a test", text), params)


def expire(db: Database, *ids: str) -> None:
    """Let the leases of active jobs run out by the database's clock."""
    for id in ids:
        change(db, "UPDATE {jobs} SET lease_until = claimed_at - 1 WHERE id = ? AND state = 'active'", id)
