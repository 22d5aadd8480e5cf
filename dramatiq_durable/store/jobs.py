"""The life of a job up to its outcome: recorded, claimed, started, renewed, released.

Every transition is one guarded UPDATE; the rows that it returns are the proof.  Statements over many rows lock them in
the order of their ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .database import Database
from .dialects import Statement
from .types import Beat, Claimed, NewJob, Payload, Standing, Token

__all__ = ["claim", "load", "locate", "record", "record_many", "release", "renew", "start"]

#: How many rows are sent to the database at a time.
CHUNK = 500

_COLUMNS = """id, state, queue, actor, agent, payload, parent_id, origin, created_at, publish_at, published_at,
broker_ref,
 publishes, reason"""

# The parameters: id, queue, actor, agent, payload, parent_id, origin, parked, due_at, delay, broker_ref.
_NEW = """
 SELECT CAST(? AS TEXT) AS id, CAST(? AS TEXT) AS queue, CAST(? AS TEXT) AS actor, CAST(? AS TEXT) AS agent,
  CAST(? AS {blob}) AS payload, CAST(? AS TEXT) AS parent_id, CAST(? AS TEXT) AS origin, CAST(? AS TEXT) AS parked,
  COALESCE(CAST(? AS BIGINT), at + CAST(? AS BIGINT)) AS due, CAST(? AS TEXT) AS broker_ref, at
 FROM (SELECT {now} AS at) AS clock
"""

_INSERT = f"""
INSERT INTO {{jobs}} ({_COLUMNS})
SELECT id,
 CASE WHEN parked IS NOT NULL THEN 'parked' WHEN due > at THEN 'scheduled' ELSE 'queued' END,
 queue, actor, agent, payload, parent_id, origin, at,
 CASE WHEN parked IS NOT NULL THEN NULL WHEN due > at THEN due WHEN broker_ref IS NULL THEN at END,
 CASE WHEN parked IS NULL AND (due IS NULL OR due <= at) AND broker_ref IS NOT NULL THEN at END,
 CASE WHEN parked IS NULL AND (due IS NULL OR due <= at) THEN broker_ref END,
 CASE WHEN parked IS NULL AND (due IS NULL OR due <= at) AND broker_ref IS NOT NULL THEN 1 ELSE 0 END,
 parked
FROM ({_NEW}) AS fresh
"""

_RECORD = Statement("record a job", f"{_INSERT} WHERE 1 = 1 ON CONFLICT (id) DO NOTHING RETURNING id")

_RECORD_UNDER = Statement(
    "record a job of a running job",
    f"""
WITH fence AS (
 SELECT id FROM {{jobs}} WHERE id = ? AND owner = ? AND claim = ? AND state = 'active' {{share}}
)
{_INSERT} WHERE EXISTS (SELECT 1 FROM fence) ON CONFLICT (id) DO NOTHING RETURNING id
""",
)

_RUNS = Statement(
    "look up a running job", "SELECT id FROM {jobs} WHERE id = ? AND owner = ? AND claim = ? AND state = 'active'"
)

_GRANTED = "id, claim, revision, attempt, retries, lost_claims, lost"

_CLAIM = Statement(
    "claim jobs",
    f"""
WITH {{held:job text}}
UPDATE {{jobs}} SET state = 'active', owner = ?, claim = claim + 1, claimed_at = {{now}}, lease_until = {{now}} + ?,
 started_at = NULL, on_lost = NULL, alone = 0, publish_at = NULL, reason = NULL
FROM held WHERE id = held.job AND {{if:state = 'queued'}}
RETURNING {_GRANTED}
""",
)

_CLAIM_AGAIN = Statement(
    "claim jobs again",
    f"""
WITH {{held:job text}}
UPDATE {{jobs}} SET lease_until = {{now}} + ?, beat = beat + 1
FROM held WHERE id = held.job AND {{if:state = 'active' AND owner = ? AND started_at IS NULL}}
RETURNING {_GRANTED}
""",
)

_LOCATE = Statement("look up jobs", "SELECT id, state, owner, claim FROM {jobs} WHERE id IN ({rows:id text})")

_LOAD = Statement(
    "load payloads", "SELECT id, payload, options, revision, retries FROM {jobs} WHERE id IN ({rows:id text})"
)

# A start whose reply was lost may be repeated: the attempt has grown already and is returned once more.
_START = Statement(
    "start jobs",
    """
WITH {held:job text, token bigint, policy text, solitary integer}
UPDATE {jobs} SET attempt = attempt + CASE WHEN started_at IS NULL THEN 1 ELSE 0 END,
 started_at = COALESCE(started_at, {now}), on_lost = held.policy, alone = held.solitary, lease_until = {now} + ?,
 beat = beat + 1
FROM held WHERE id = held.job AND {if:claim = held.token AND owner = ? AND state = 'active'}
RETURNING id, attempt
""",
)

_RENEW = Statement(
    "renew leases",
    """
WITH given AS ({rows:job text, token bigint, began boolean}),
mine AS (
 SELECT id, claim FROM {jobs} WHERE state = 'active' AND finished_at IS NULL AND owner = ? ORDER BY id {skip}
),
held AS (
 SELECT m.id AS job, g.job AS given, g.began AS began FROM mine m
 LEFT JOIN given g ON g.job = m.id AND g.token = m.claim
)
UPDATE {jobs} SET
 lease_until = CASE WHEN held.given IS NULL THEN lease_until ELSE {now} + ? END,
 beat = beat + CASE WHEN held.given IS NULL THEN 0 ELSE 1 END,
 attempt = attempt + CASE WHEN started_at IS NULL AND held.began THEN 1 ELSE 0 END,
 on_lost = CASE WHEN started_at IS NULL AND held.began THEN 'rerun' ELSE on_lost END,
 started_at = CASE WHEN started_at IS NULL AND held.began THEN {now} ELSE started_at END
FROM held WHERE id = held.job AND {if:owner = ? AND state = 'active'}
RETURNING id, claim, started_at
""",
)

_RELEASE = Statement(
    "release claims",
    """
WITH {held:job text, token bigint}
UPDATE {jobs} SET state = 'queued', owner = NULL, claim = claim + 1, claimed_at = NULL, lease_until = NULL,
 publish_at = {now}, reason = ?
FROM held WHERE id = held.job AND {if:claim = held.token AND owner = ? AND state = 'active' AND started_at IS NULL}
RETURNING id
""",
)


def _fields(job: NewJob) -> tuple[Any, ...]:
    delay = job.delay if job.due_at is None else None
    return (
        job.id,
        job.queue,
        job.actor,
        job.agent,
        job.payload,
        job.parent_id,
        job.origin,
        job.parked,
        job.due_at,
        delay,
        job.broker_ref,
    )


def record(db: Database, job: NewJob, *, under: Token | None = None) -> str:
    """Write the row of a job, unless a job of this id exists.

    Parameters:
      db(Database)
      job(NewJob)
      under(Token): The run that sends it: the row is written only while that run still holds its claim.

    Raises:
      StoreError: If the row could not be written.

    Returns:
      str: ``"recorded"``, ``"exists"``, or ``"stale"`` when the sending run has lost its claim.
    """
    if under is None:
        return "recorded" if db.fetch(_RECORD, _fields(job)) else "exists"
    if db.fetch(_RECORD_UNDER, (*under, *_fields(job))):
        return "recorded"
    # A claim that is lost does not come back: what holds now, held then too.
    return "exists" if db.fetch(_RUNS, under) else "stale"


def record_many(db: Database, jobs: Sequence[NewJob]) -> set[str]:
    """Write the rows of many jobs; return the ids of those that did not exist.

    Raises:
      StoreError: If the rows could not be written; then none is.
    """
    if not jobs:
        return set()
    return db.run(lambda: insert(db, jobs))


def insert(db: Database, jobs: Sequence[NewJob]) -> set[str]:
    """Like :func:`record_many`, inside the caller's transaction."""
    ordered = sorted(jobs, key=lambda job: job.id)
    return {
        row[0]
        for start in range(0, len(ordered), CHUNK)
        for row in db.fetch_many(_RECORD, [_fields(job) for job in ordered[start : start + CHUNK]])
    }


def claim(db: Database, owner: str, ids: Sequence[str], lease: int, *, again: bool = False) -> list[Claimed]:
    """Claim queued jobs.

    Parameters:
      db(Database)
      owner(str): The process that claims.
      ids(Sequence[str]): The jobs.
      lease(int): Milliseconds for which the claim holds.
      again(bool): The reply of an earlier call may have been lost: jobs that this owner has claimed and not started are
        granted once more, under the same claim.

    Raises:
      StoreError: If the database does not answer.

    Returns:
      list[Claimed]: The claims that were granted; jobs that are missing were not claimable.
    """
    wanted = db.dialect.rows([(id,) for id in sorted(ids)], 1)
    granted = [Claimed(*row) for row in db.fetch(_CLAIM, (*wanted, owner, lease))]
    if again and len(granted) < len(ids):
        known = {claimed.id for claimed in granted}
        rest = db.dialect.rows([(id,) for id in sorted(ids) if id not in known], 1)
        granted += [Claimed(*row) for row in db.fetch(_CLAIM_AGAIN, (*rest, lease, owner))]
    return granted


def locate(db: Database, ids: Sequence[str]) -> dict[str, Standing]:
    """Return where jobs stand; ids without a row are missing."""
    rows = db.fetch(_LOCATE, db.dialect.rows([(id,) for id in ids], 1))
    return {row[0]: Standing(*row) for row in rows}


def load(db: Database, ids: Sequence[str]) -> dict[str, Payload]:
    """Return what jobs run; ids without a row are missing."""
    rows = db.fetch(_LOAD, db.dialect.rows([(id,) for id in ids], 1))
    return {row[0]: Payload(*row) for row in rows}


def start(db: Database, owner: str, starts: Sequence[tuple[str, int, str, int]], lease: int) -> dict[str, int]:
    """Commit that actors are about to run; may be repeated when the reply was lost.

    Parameters:
      db(Database)
      owner(str)
      starts(Sequence): Id, claim, what becomes of the job if this process dies (``on_lost``), and whether nothing else
        runs in the process (1 or 0).
      lease(int): Milliseconds; the lease is renewed with the start, also one that has run out and that nobody has
      taken.

    Raises:
      StoreError: If the database does not answer.

    Returns:
      dict[str, int]: The attempt's number for each job; those that are missing are someone else's.
    """
    given = db.dialect.rows(sorted(starts), 4)
    return {row[0]: row[1] for row in db.fetch(_START, (*given, lease, owner))}


def renew(db: Database, owner: str, held: Sequence[tuple[str, int, bool]], lease: int) -> Beat:
    """Renew the leases of the jobs that a process really holds: one statement, however many.

    A row that somebody has locked at this moment is passed over: it is neither renewed nor a stray.

    Parameters:
      db(Database)
      owner(str)
      held(Sequence): Triples of id, claim, and whether the actor has begun.
      lease(int): Milliseconds.

    Raises:
      StoreError: If the database does not answer.
    """
    given = db.dialect.rows(sorted(held), 3)
    rows = db.fetch(_RENEW, (*given, owner, lease, owner))
    pairs = {(id, claim) for id, claim, _ in held}
    renewed = frozenset((id, claim) for id, claim, _ in rows if (id, claim) in pairs)
    strays = tuple((id, claim, started is not None) for id, claim, started in rows if (id, claim) not in pairs)
    return Beat(renewed, strays)


def release(db: Database, owner: str, pairs: Sequence[tuple[str, int]], reason: str) -> set[str]:
    """Give back claims whose actor has not begun; nothing is charged.

    Parameters:
      db(Database)
      owner(str)
      pairs(Sequence): Pairs of id and claim.
      reason(str): A short word for why, kept on the row.

    Raises:
      StoreError: If the database does not answer.

    Returns:
      set[str]: The jobs that were released.
    """
    given = db.dialect.rows(sorted(pairs), 2)
    return {row[0] for row in db.fetch(_RELEASE, (*given, reason, owner))}
