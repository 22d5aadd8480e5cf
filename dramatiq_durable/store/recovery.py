"""Putting right: jobs that are due, messages that were lost, owners that died, and who may do it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from .database import Database
from .dialects import Statement, storable
from .types import ActiveRow, Due, Reaped, Waiting, WorkerInfo

__all__ = [
    "enlist",
    "keep_undecodable",
    "lead",
    "next_due",
    "note_pass",
    "put_back",
    "reap",
    "resign",
    "take_due",
    "unlocked",
    "unpark",
    "unpublish",
    "waiting_page",
    "watch",
]

_NEXT_DUE = Statement("look for due jobs", "SELECT MIN(publish_at) - {now} FROM {jobs} WHERE publish_at IS NOT NULL")

_TAKE_DUE = Statement(
    "take due jobs",
    """
WITH due AS (
 SELECT id AS job FROM {jobs} WHERE publish_at <= (SELECT {now}) ORDER BY publish_at, id LIMIT ? {skip}
)
UPDATE {jobs} SET state = 'queued', publish_at = NULL, published_at = {now}, publishes = publishes + 1,
 broker_ref = id || '.' || (publishes + 1)
FROM due WHERE id = due.job AND {if:state IN ('scheduled', 'queued') AND publish_at IS NOT NULL}
RETURNING id, queue, payload, options, revision, retries, broker_ref, created_at
""",
)

_UNPUBLISH = Statement(
    "note that the broker did not take jobs",
    """
WITH {held:job text, ref text}
UPDATE {jobs} SET publish_at = {now} + CAST(? AS BIGINT), published_at = NULL
FROM held WHERE id = held.job AND {if:broker_ref = held.ref AND state = 'queued' AND publish_at IS NULL}
RETURNING id
""",
)

_WAITING = Statement(
    "look through queued jobs",
    """
SELECT id, queue, broker_ref FROM {jobs}
WHERE state = 'queued' AND finished_at IS NULL AND id > ? AND publish_at IS NULL
 AND published_at <= (SELECT {now} - CAST(? AS BIGINT))
ORDER BY id LIMIT ?
""",
)

_PUT_BACK = Statement(
    "put lost jobs back",
    """
WITH {held:job text, ref text}
UPDATE {jobs} SET publish_at = {now}, put_back = put_back + 1
FROM held WHERE id = held.job
 AND {if:COALESCE(broker_ref, '') = COALESCE(held.ref, '') AND state = 'queued' AND publish_at IS NULL}
RETURNING id
""",
)

_WATCH = Statement(
    "watch leases",
    """
SELECT id, claim, beat, CASE WHEN {expired} THEN 1 ELSE 0 END FROM {jobs}
WHERE state = 'active' AND finished_at IS NULL ORDER BY id
""",
)

_UNLOCKED = Statement("look for locked jobs", "SELECT id FROM {jobs} WHERE id IN ({rows:name text}) ORDER BY id {skip}")

# The lease of each given row has stood still since it was watched, and has run out.  A row that somebody has locked is
# left alone: its owner may be finishing it, or be frozen in the middle of that, and nobody else's jobs shall wait for
# it.
_WATCHED = "{free:job text, token bigint, seen bigint}"
_STILL = "id = held.job AND {if:claim = held.token AND beat = held.seen AND state = 'active'} AND {expired}"

_REAP_CLAIMED = Statement(
    "queue jobs again whose worker was lost before it began",
    f"""
WITH {_WATCHED}
UPDATE {{jobs}} SET state = 'queued', owner = NULL, claim = claim + 1, claimed_at = NULL, lease_until = NULL,
 lost_claims = lost_claims + 1, put_back = put_back + 1, publish_at = {{now}}, reason = 'lease_expired'
FROM held WHERE {_STILL} AND {{if:started_at IS NULL}}
RETURNING id
""",
)

_NOTE_LOST = Statement(
    "keep the evidence of lost runs",
    f"""
WITH {_WATCHED}
INSERT INTO {{attempts}} (job_id, claim, attempt, owner, started_at, ended_at, ended, error_type, error_message,
 traceback)
SELECT id, claim, attempt, owner, started_at, {{now}}, 'lost', 'WorkerLost',
 'The worker process stopped renewing its lease while the actor ran: it was killed, or cut off from the database.', ''
FROM held JOIN {{jobs}} ON {_STILL} WHERE {{if:started_at IS NOT NULL}}
ON CONFLICT (job_id, claim) DO NOTHING RETURNING job_id
""",
)

# A loss counts against a job for good when nothing else ran in the process that died: then the job is the culprit and
# not a neighbour.  One that is never alone is given up all the same, later.
_FATE = """CASE WHEN on_lost = 'fail' OR alone = 1 AND lost + 1 >= (SELECT most FROM cap)
  OR lost + 1 >= 3 * (SELECT most FROM cap) THEN 'failed'
  WHEN on_lost = 'hold' THEN 'in_doubt' ELSE 'queued' END"""

_REAP_STARTED = Statement(
    "decide about jobs whose worker was lost while it ran",
    f"""
WITH {_WATCHED}, cap AS (SELECT CAST(? AS INTEGER) AS most)
UPDATE {{jobs}} SET state = {_FATE},
 finished_at = CASE {_FATE} WHEN 'failed' THEN {{now}} END,
 publish_at = CASE {_FATE} WHEN 'queued' THEN {{now}} END,
 owner = CASE {_FATE} WHEN 'queued' THEN NULL ELSE owner END,
 started_at = CASE {_FATE} WHEN 'queued' THEN NULL ELSE started_at END,
 claimed_at = CASE {_FATE} WHEN 'queued' THEN NULL ELSE claimed_at END,
 retries = retries + CASE {_FATE} WHEN 'queued' THEN 1 ELSE 0 END,
 put_back = put_back + CASE {_FATE} WHEN 'queued' THEN 1 ELSE 0 END,
 lost = lost + 1, claim = claim + 1, lease_until = NULL, reason = 'worker_lost'
FROM held WHERE {_STILL} AND {{if:started_at IS NOT NULL}}
RETURNING state
""",
)

_UNPARK = Statement(
    "queue parked jobs that can run now",
    """
WITH known AS (
 SELECT id AS job FROM {jobs} WHERE state = 'parked' AND finished_at IS NULL AND reason = 'unknown_actor'
  AND actor IN ({rows:name text}) ORDER BY id LIMIT ? {skip}
)
UPDATE {jobs} SET state = 'queued', publish_at = {now}, reason = NULL
FROM known WHERE id = known.job AND {if:state = 'parked'}
RETURNING id
""",
)

_LEAD = Statement(
    "take the lead",
    """
INSERT INTO {leaders} (name, owner, taken_at, expires_at)
SELECT CAST(? AS TEXT), CAST(? AS TEXT), {now}, {now} + CAST(? AS BIGINT) WHERE 1 = 1
ON CONFLICT (name) DO UPDATE SET
 taken_at = CASE WHEN {leaders}.owner = excluded.owner THEN {leaders}.taken_at ELSE excluded.taken_at END,
 owner = excluded.owner, expires_at = excluded.expires_at
WHERE {leaders}.owner = excluded.owner OR {leaders}.expires_at < excluded.taken_at
RETURNING owner
""",
)

_RESIGN = Statement("give up the lead", "DELETE FROM {leaders} WHERE name = ? AND owner = ?")

_UNDECODABLE = Statement(
    "keep a payload that cannot be read",
    """
INSERT INTO {undecodable} (digest, queue, payload, broker_ref, error, seen_at) VALUES (?, ?, ?, ?, ?, {now})
ON CONFLICT (digest) DO UPDATE SET seen_at = excluded.seen_at, times = {undecodable}.times + 1
""",
)

_ENLIST = Statement(
    "enlist a worker",
    """
INSERT INTO {workers} (owner, host, pid, threads, queues, started_at, seen_at) VALUES (?, ?, ?, ?, ?, {now}, {now})
ON CONFLICT (owner) DO UPDATE SET seen_at = excluded.seen_at, queues = excluded.queues, threads = excluded.threads
""",
)

#: Workers that were not seen for so long (milliseconds) are forgotten: nothing depends on them.
_FORGET_AFTER = 86_400_000

_FORGET_WORKERS = Statement("forget old workers", "DELETE FROM {workers} WHERE seen_at < {now} - CAST(? AS BIGINT)")

_NOTE_PASS = Statement(
    "note a reconciliation",
    """
INSERT INTO {passes} (name, owner, finished_at, looked, put_back, requeued, failed, put_back_total, requeued_total,
 failed_total)
SELECT name, owner, {now}, looked, put_back, requeued, failed, put_back, requeued, failed FROM (
 SELECT CAST(? AS TEXT) AS name, CAST(? AS TEXT) AS owner, CAST(? AS BIGINT) AS looked, CAST(? AS BIGINT) AS put_back,
  CAST(? AS BIGINT) AS requeued, CAST(? AS BIGINT) AS failed
) AS fresh WHERE 1 = 1
ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, finished_at = excluded.finished_at, looked = excluded.looked,
 put_back = excluded.put_back, requeued = excluded.requeued, failed = excluded.failed,
 put_back_total = {passes}.put_back_total + excluded.put_back,
 requeued_total = {passes}.requeued_total + excluded.requeued,
 failed_total = {passes}.failed_total + excluded.failed
""",
)


def next_due(db: Database) -> int | None:
    """Return in how many milliseconds the next job is due (0 or less: now), or ``None`` when none waits.

    Raises:
      StoreError: If the database does not answer; so does everything in this module.
    """
    ahead = db.fetch(_NEXT_DUE)[0][0]
    return None if ahead is None else int(ahead)


def take_due(db: Database, limit: int) -> list[Due]:
    """Take up to *limit* due jobs in order to publish them; no other process gets the same ones.

    Returns:
      list[Due]: What to publish, oldest first, each with the reference that its row expects in the broker.
    """
    rows = db.fetch(_TAKE_DUE, (limit,))
    rows.sort(key=lambda row: row[7])
    return [Due(*row[:7]) for row in rows]


def unpublish(db: Database, pairs: Sequence[tuple[str, str]], after: int) -> int:
    """The broker did not take these (id, reference) pairs: publish them again in *after* milliseconds.

    Returns:
      int: How many still waited.
    """
    return len(db.fetch(_UNPUBLISH, (*db.dialect.rows(sorted(pairs), 2), after)))


def waiting_page(db: Database, after: str, limit: int, published_before: int) -> list[Waiting]:
    """Return queued jobs that were published more than *published_before* milliseconds ago, in the order of their ids.

    Parameters:
      db(Database)
      after(str): The last id of the page before, or ``""``.
      limit(int): The size of a page.
      published_before(int): Milliseconds.
    """
    return [Waiting(*row) for row in db.fetch(_WAITING, (after, published_before, limit))]


def put_back(db: Database, pairs: Sequence[tuple[str, str | None]]) -> set[str]:
    """Have jobs published again whose message is gone, unless they have moved since.

    Parameters:
      db(Database)
      pairs(Sequence): Pairs of id and the reference that was looked for.

    Returns:
      set[str]: The jobs that will be published again.
    """
    if not pairs:
        return set()
    return {row[0] for row in db.fetch(_PUT_BACK, db.dialect.rows(sorted(pairs, key=lambda pair: pair[0]), 2))}


def watch(db: Database) -> list[ActiveRow]:
    """Return all active jobs with the state of their leases."""
    return [ActiveRow(id, claim, beat, bool(expired)) for id, claim, beat, expired in db.fetch(_WATCH)]


def unlocked(db: Database, ids: Sequence[str]) -> set[str]:
    """Return those of *ids* that nobody has locked at this moment."""
    return {row[0] for row in db.fetch(_UNLOCKED, db.dialect.rows([(id,) for id in ids], 1))}


def reap(db: Database, rows: Sequence[tuple[str, int, int]], max_lost: int) -> Reaped:
    """Take jobs away from owners that are presumed dead.

    Only if the claim and the renewal counter are still those that were watched: an owner that renews, or finishes, at
    this very moment keeps its job.

    Parameters:
      db(Database)
      rows(Sequence): Triples of id, claim and beat.
      max_lost(int): With how many lost runs a job fails, if it ran alone in its process when that died; with three
        times as many, if it did not.

    Returns:
      Reaped: What became of them.
    """
    given = db.dialect.rows(sorted(rows), 3)

    def work() -> Reaped:
        claimed = len(db.fetch(_REAP_CLAIMED, given))
        noted = {row[0] for row in db.fetch(_NOTE_LOST, given)}
        lost = db.dialect.rows(sorted(row for row in rows if row[0] in noted), 3)
        fates = [row[0] for row in db.fetch(_REAP_STARTED, (*lost, max_lost))]
        return Reaped(claimed + fates.count("queued"), fates.count("failed"), fates.count("in_doubt"))

    return db.run(work)


def unpark(db: Database, actors: Sequence[str], limit: int) -> int:
    """Queue up to *limit* jobs that were parked because their actor was unknown; return how many."""
    return len(db.fetch(_UNPARK, (*db.dialect.rows([(actor,) for actor in actors], 1), limit)))


def lead(db: Database, name: str, owner: str, ttl: int) -> bool:
    """Take or keep the lead for *ttl* milliseconds; return whether *owner* has it."""
    return bool(db.fetch(_LEAD, (name, owner, ttl)))


def resign(db: Database, name: str, owner: str) -> None:
    """Give up the lead, if *owner* has it."""
    db.execute(_RESIGN, (name, owner))


def keep_undecodable(db: Database, queue: str, payload: bytes, error: str, broker_ref: str | None) -> None:
    """Keep the bytes of a message that cannot be decoded; the same bytes are kept once and counted."""
    digest = hashlib.sha256(queue.encode() + b"\0" + payload).hexdigest()
    db.execute(_UNDECODABLE, (digest, queue, payload, broker_ref, storable(error)))


def enlist(db: Database, worker: WorkerInfo) -> None:
    """Note that a worker process is there, for people to look at."""
    db.execute(_ENLIST, worker)
    db.execute(_FORGET_WORKERS, (_FORGET_AFTER,))


def note_pass(
    db: Database, name: str, owner: str, *, looked: int = 0, put_back: int = 0, requeued: int = 0, failed: int = 0
) -> None:
    """Note what a reconciliation did, for people to look at, and add it to the totals."""
    db.execute(_NOTE_PASS, (name, owner, looked, put_back, requeued, failed))
