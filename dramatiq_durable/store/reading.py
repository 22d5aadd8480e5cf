"""What people ask: how many, how old, which, and what happened to one."""

from __future__ import annotations

from typing import NamedTuple

from ..states import FINAL
from .database import Database
from .dialects import Statement
from .types import Attempt

__all__ = [
    "JobRow",
    "Pass",
    "WorkerRow",
    "attempts",
    "counts",
    "get_job",
    "last_pass",
    "list_jobs",
    "now",
    "oldest_waiting",
    "undecodable",
    "unfinished",
    "workers",
]


class JobRow(NamedTuple):
    """A job as it stands; all but its payload.  Times in epoch milliseconds by the database's clock."""

    id: str
    state: str
    queue: str
    actor: str
    agent: str
    revision: int
    parent_id: str | None
    origin: str
    created_at: int
    publish_at: int | None
    published_at: int | None
    broker_ref: str | None
    publishes: int
    put_back: int
    owner: str | None
    claim: int
    claimed_at: int | None
    lease_until: int | None
    beat: int
    started_at: int | None
    attempt: int
    retries: int
    lost_claims: int
    lost: int
    interruptions: int
    on_lost: str | None
    alone: int
    finished_at: int | None
    reason: str | None


class WorkerRow(NamedTuple):
    """A worker process that was seen lately."""

    owner: str
    host: str
    pid: int
    threads: int
    queues: str
    started_at: int
    seen_ago: int


class Pass(NamedTuple):
    """The last reconciliation of one kind, and the totals of all."""

    name: str
    owner: str
    finished_ago: int
    looked: int
    put_back: int
    requeued: int
    failed: int
    put_back_total: int
    requeued_total: int
    failed_total: int


_FIELDS = ", ".join(JobRow._fields)

_NOW = Statement("read the clock", "SELECT {now}")

_UNDECODABLE = Statement("count undecodable messages", "SELECT COUNT(*) FROM {undecodable}")

_COUNTS = Statement("count jobs", "SELECT state, COUNT(*) FROM {jobs} GROUP BY state")

_OLDEST = Statement(
    "look for the oldest queued jobs",
    """
SELECT queue, COUNT(*), {now} - MIN(created_at) FROM {jobs} WHERE state = 'queued' AND finished_at IS NULL
GROUP BY queue ORDER BY queue
""",
)

_UNFINISHED = Statement(
    "count unfinished jobs",
    """
SELECT COUNT(*) FROM {jobs} WHERE state IN ('scheduled', 'queued', 'active') AND finished_at IS NULL AND queue = ?
""",
)

_PAGE = f"""
SELECT {_FIELDS} FROM {{jobs}}
WHERE %s AND (CAST(? AS TEXT) IS NULL OR queue = ?) AND (CAST(? AS TEXT) IS NULL OR actor = ?)
 AND (CAST(? AS TEXT) IS NULL OR (created_at, id) < (SELECT created_at, id FROM {{jobs}} WHERE id = ?))
ORDER BY created_at DESC, id DESC LIMIT ?
"""

_LIST = Statement("list jobs", _PAGE % "(CAST(? AS TEXT) IS NULL OR state = ?)")

# Those that are not finished are found without a look at the history.
_LIST_OPEN = Statement("list jobs that are not finished", _PAGE % "state = ? AND finished_at IS NULL")

_GET = Statement("look up a job", f"SELECT {_FIELDS} FROM {{jobs}} WHERE id = ?")

_ATTEMPTS = Statement(
    "look up attempts",
    """
SELECT attempt, claim, owner, host, started_at, ended_at, ended, error_type, error_message, traceback
FROM {attempts} WHERE job_id = ? ORDER BY claim
""",
)

_WORKERS = Statement(
    "list workers",
    """
SELECT owner, host, pid, threads, queues, started_at, {now} - seen_at FROM {workers}
WHERE seen_at >= {now} - CAST(? AS BIGINT) ORDER BY host, pid
""",
)

_PASS = Statement(
    "look up the last reconciliation",
    """
SELECT name, owner, {now} - finished_at, looked, put_back, requeued, failed, put_back_total, requeued_total,
failed_total FROM {passes} WHERE name = ?
""",
)


def now(db: Database) -> int:
    """Return the time by the database's clock, in epoch milliseconds: what ages are counted from.

    Raises:
      StoreError: If the database does not answer; so does everything in this module.
    """
    return int(db.fetch(_NOW)[0][0])


def counts(db: Database) -> dict[str, int]:
    """Return how many jobs there are in each state; states without jobs are missing."""
    return {state: int(count) for state, count in db.fetch(_COUNTS)}


def oldest_waiting(db: Database) -> list[tuple[str, int, int]]:
    """Return, for each queue with queued jobs, its name, their number, and the age of the oldest in milliseconds."""
    return [(queue, int(count), int(age)) for queue, count, age in db.fetch(_OLDEST)]


def unfinished(db: Database, queue: str) -> int:
    """Return how many jobs of *queue* are neither finished nor held."""
    return int(db.fetch(_UNFINISHED, (queue,))[0][0])


def undecodable(db: Database) -> int:
    """Return how many different messages were kept because nobody could read them."""
    return int(db.fetch(_UNDECODABLE)[0][0])


def list_jobs(
    db: Database,
    *,
    state: str | None = None,
    queue: str | None = None,
    actor: str | None = None,
    limit: int = 50,
    after: str | None = None,
) -> list[JobRow]:
    """Return jobs, newest first.

    Parameters:
      db(Database)
      state(str), queue(str), actor(str): Only such jobs.
      limit(int): At most so many.
      after(str): Only jobs that come after this one in that order: the last one of the page before.
    """
    rest = (queue, queue, actor, actor, after, after, limit)
    if state is None or state in FINAL:
        rows = db.fetch(_LIST, (state, state, *rest))
    else:
        rows = db.fetch(_LIST_OPEN, (state, *rest))
    return [JobRow(*row) for row in rows]


def get_job(db: Database, id: str) -> JobRow | None:
    """Return one job, or ``None``."""
    rows = db.fetch(_GET, (id,))
    return JobRow(*rows[0]) if rows else None


def attempts(db: Database, id: str) -> list[Attempt]:
    """Return the attempts of a job that did not succeed, in their order."""
    return [Attempt(*row) for row in db.fetch(_ATTEMPTS, (id,))]


def workers(db: Database, seen_within: int) -> list[WorkerRow]:
    """Return the worker processes that were seen in the last *seen_within* milliseconds."""
    return [WorkerRow(*row) for row in db.fetch(_WORKERS, (seen_within,))]


def last_pass(db: Database, name: str) -> Pass | None:
    """Return what the last reconciliation of a kind (``reconcile`` or ``reaper``) did, or ``None``."""
    rows = db.fetch(_PASS, (name,))
    return Pass(*rows[0]) if rows else None
