"""How runs end: outcome, follow-ups and results in one transaction, under the fence."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from . import jobs
from .database import Database
from .dialects import Statement, storable
from .types import Outcome

__all__ = ["mark_stored", "pending_results", "settle"]

# The parameters of a fence: id, claim, owner.
_FENCE = "id = ? AND claim = ? AND owner = ? AND state = 'active'"

# A run that was not started strictly counts its attempt with its outcome.
_COUNT = "attempt = attempt + CASE WHEN started_at IS NULL THEN 1 ELSE 0 END"

# Jobs of one transaction are locked together, in the order of their ids, before the first is written.
_LOCK = Statement("lock jobs", "WITH {held:job text} SELECT COUNT(*) FROM held")

_COMPLETE = Statement(
    "complete jobs",
    f"""
WITH {{held:job text, token bigint, ran_for bigint}}
UPDATE {{jobs}} SET state = 'completed', finished_at = {{now}}, lease_until = NULL, reason = NULL, {_COUNT},
 started_at = COALESCE(started_at, {{now}} - held.ran_for)
FROM held WHERE id = held.job AND {{if:claim = held.token AND owner = ? AND state = 'active'}}
RETURNING id
""",
)

_FAIL = Statement(
    "fail a job",
    f"""
UPDATE {{jobs}} SET state = 'failed', finished_at = {{now}}, lease_until = NULL, reason = ?, {_COUNT},
 started_at = COALESCE(started_at, {{now}} - CAST(? AS BIGINT))
WHERE {_FENCE} RETURNING attempt
""",
)

_FAIL_UNSTARTED = Statement(
    "fail a job that was not started",
    f"""
UPDATE {{jobs}} SET state = 'failed', finished_at = {{now}}, lease_until = NULL, reason = ?
WHERE {_FENCE} AND started_at IS NULL RETURNING attempt
""",
)

_CANCEL_UNSTARTED = Statement(
    "cancel a job that was not started",
    f"""
UPDATE {{jobs}} SET state = 'cancelled', finished_at = {{now}}, lease_until = NULL, reason = ?
WHERE {_FENCE} AND started_at IS NULL RETURNING attempt
""",
)

_RETRY = Statement(
    "put a job back for another attempt",
    f"""
UPDATE {{jobs}} SET state = CASE WHEN CAST(? AS BIGINT) > 0 THEN 'scheduled' ELSE 'queued' END,
 publish_at = {{now}} + CAST(? AS BIGINT), owner = NULL, claim = claim + 1, claimed_at = NULL, lease_until = NULL,
 attempt = attempt + CASE WHEN started_at IS NULL THEN CAST(? AS INTEGER) ELSE 0 END,
 started_at = NULL, on_lost = NULL, retries = retries + CAST(? AS INTEGER), reason = ?,
 options = COALESCE(CAST(? AS {{blob}}), options), payload = COALESCE(CAST(? AS {{blob}}), payload),
 revision = revision + CAST(? AS INTEGER)
WHERE {_FENCE} RETURNING attempt
""",
)

_INTERRUPT = Statement(
    "put an interrupted job back",
    f"""
UPDATE {{jobs}} SET
 state = CASE WHEN interruptions + 1 > ? THEN 'failed' ELSE 'queued' END,
 reason = CASE WHEN interruptions + 1 > ? THEN 'interrupted_too_often' ELSE ? END,
 finished_at = CASE WHEN interruptions + 1 > ? THEN {{now}} END,
 publish_at = CASE WHEN interruptions + 1 > ? THEN NULL ELSE {{now}} + ? END,
 owner = CASE WHEN interruptions + 1 > ? THEN owner END,
 interruptions = interruptions + 1, claim = claim + 1, claimed_at = NULL, lease_until = NULL,
 attempt = attempt - CASE WHEN started_at IS NULL THEN 0 ELSE 1 END, started_at = NULL, on_lost = NULL
WHERE {_FENCE} RETURNING attempt + 1
""",
)

_GIVE_BACK = Statement(
    "release a claim",
    f"""
UPDATE {{jobs}} SET state = 'queued', owner = NULL, claim = claim + 1, claimed_at = NULL, lease_until = NULL,
 publish_at = {{now}}, reason = ?
WHERE {_FENCE} AND started_at IS NULL RETURNING attempt
""",
)

_PARK = Statement(
    "park a job",
    f"""
UPDATE {{jobs}} SET state = 'parked', owner = NULL, claim = claim + 1, claimed_at = NULL, lease_until = NULL, reason = ?
WHERE {_FENCE} AND started_at IS NULL RETURNING attempt
""",
)

_ATTEMPT = Statement(
    "keep the evidence of an attempt",
    """
INSERT INTO {attempts} (job_id, claim, attempt, owner, host, started_at, ended_at, ended, error_type, error_message,
 traceback)
VALUES (?, ?, ?, ?, ?, {now} - CAST(? AS BIGINT), {now}, ?, ?, ?, ?)
ON CONFLICT (job_id, claim) DO NOTHING
""",
)

_RESULT = Statement(
    "keep a result",
    """
INSERT INTO {results} (job_id, key, value, ttl, created_at) VALUES (?, ?, ?, ?, {now})
ON CONFLICT (job_id, key) DO UPDATE SET value = excluded.value, ttl = excluded.ttl, created_at = excluded.created_at,
 stored_at = NULL
""",
)

# What an earlier call, whose reply was lost, has written.  A final row keeps owner and claim, and any other end of a
# started run keeps its attempt.  A claim that was given back or parked leaves no trace but the row: if that has moved
# on, it makes no difference who did it.
_SETTLED = Statement(
    "recognise outcomes that are written",
    """
SELECT given.job FROM ({rows:job text, token bigint, kind text}) given
WHERE EXISTS (
  SELECT 1 FROM {jobs} j WHERE j.id = given.job AND (
   j.claim = given.token AND j.owner = ?
    AND j.state = CASE given.kind WHEN 'skipped' THEN 'cancelled' WHEN 'failed' THEN 'failed' ELSE 'completed' END
    AND given.kind IN ('completed', 'failed', 'skipped')
   OR j.claim = given.token + 1 AND j.owner IS NULL
    AND (given.kind = 'parked' AND j.state = 'parked' OR given.kind = 'released' AND j.state = 'queued')
  )
 ) OR EXISTS (
  SELECT 1 FROM {attempts} a
  WHERE a.job_id = given.job AND a.claim = given.token AND a.owner = ? AND a.ended = given.kind
 )
""",
)

#: For how long after its time (milliseconds) a result may still be of use to somebody.
LATE = 3_600_000

_PENDING = Statement(
    "look for results that are not stored yet",
    f"""
SELECT job_id, key, value, ttl FROM {{results}}
WHERE stored_at IS NULL AND created_at <= {{now}} - CAST(? AS BIGINT) AND created_at > {{now}} - ttl - {LATE}
ORDER BY created_at LIMIT ?
""",
)

_STORED = Statement(
    "mark a result as stored",
    "UPDATE {results} SET stored_at = {now} WHERE job_id = ? AND key = ? AND stored_at IS NULL",
)

_HOST = socket.gethostname()


def settle(db: Database, owner: str, outcomes: Sequence[Outcome], *, max_interruptions: int = 20) -> set[str]:
    """Write how runs ended, all in one transaction, each under its own fence.

    Whatever belongs to an outcome that the fence refuses (follow-ups, results, evidence) is not written.  The call may
    be repeated when its reply was lost: what it has written is recognised and counts as accepted.

    Parameters:
      db(Database)
      owner(str)
      outcomes(Sequence[Outcome])
      max_interruptions(int): How often a job may be interrupted before it fails.

    Raises:
      StoreError: If nothing was written.

    Returns:
      set[str]: The ids of the jobs whose outcome is written.
    """
    ordered = sorted(outcomes, key=lambda outcome: outcome.id)
    if all(o.kind == "completed" and not o.follow_ups and not o.results for o in ordered):
        # One statement is a transaction of its own.
        accepted = _complete(db, owner, [(o.id, o.claim, o.ran_for) for o in ordered])
        return accepted | _recognised(db, owner, [o for o in ordered if o.id not in accepted])
    return db.run(lambda: _settle(db, owner, ordered, max_interruptions))


def _settle(db: Database, owner: str, outcomes: list[Outcome], max_interruptions: int) -> set[str]:
    completed = [(o.id, o.claim, o.ran_for) for o in outcomes if o.kind == "completed"]
    others = [o for o in outcomes if o.kind != "completed"]
    if others and len(outcomes) > 1:
        db.fetch(_LOCK, db.dialect.rows([(o.id,) for o in outcomes], 1))
    accepted = _complete(db, owner, completed)
    for outcome in others:
        rows = _end(db, owner, outcome, max_interruptions)
        if rows:
            accepted.add(outcome.id)
            _keep_attempt(db, owner, outcome, rows[0][0])
    written = [o for o in outcomes if o.id in accepted]
    jobs.insert(db, [follow_up for o in written for follow_up in o.follow_ups])
    results = [(o.id, *result) for o in written for result in o.results]
    if results:
        db.execute_many(_RESULT, results)
    return accepted | _recognised(db, owner, [o for o in outcomes if o.id not in accepted])


def _complete(db: Database, owner: str, completed: list[tuple[str, int, int]]) -> set[str]:
    if not completed:
        return set()
    return {row[0] for row in db.fetch(_COMPLETE, (*db.dialect.rows(completed, 3), owner))}


def _recognised(db: Database, owner: str, refused: list[Outcome]) -> set[str]:
    if not refused:
        return set()
    given = db.dialect.rows([(o.id, o.claim, o.kind) for o in refused], 3)
    return {row[0] for row in db.fetch(_SETTLED, (*given, owner, owner))}


def _end(db: Database, owner: str, outcome: Outcome, max_interruptions: int) -> list[tuple[Any, ...]]:
    fence = (outcome.id, outcome.claim, owner)
    if outcome.kind == "failed":
        if not outcome.started:
            return db.fetch(_FAIL_UNSTARTED, (outcome.reason, *fence))
        return db.fetch(_FAIL, (outcome.reason, outcome.ran_for, *fence))
    if outcome.kind == "retry":
        changed = outcome.options is not None or outcome.payload is not None
        values = (
            outcome.delay,
            outcome.delay,
            int(outcome.started),
            int(outcome.counted),
            outcome.reason,
            outcome.options,
            outcome.payload,
            int(changed),
        )
        return db.fetch(_RETRY, (*values, *fence))
    if outcome.kind == "interrupted":
        cap = max_interruptions
        return db.fetch(_INTERRUPT, (cap, cap, outcome.reason, cap, cap, outcome.delay, cap, *fence))
    statement = {"released": _GIVE_BACK, "parked": _PARK, "skipped": _CANCEL_UNSTARTED}[outcome.kind]
    return db.fetch(statement, (outcome.reason, *fence))


def _keep_attempt(db: Database, owner: str, outcome: Outcome, attempt: int) -> None:
    """Keep a row of every run that did not succeed, and of claims that ended with evidence."""
    if not outcome.started and outcome.evidence is None:
        return
    evidence = (None, None, None) if outcome.evidence is None else map(storable, outcome.evidence)
    db.execute(
        _ATTEMPT,
        (outcome.id, outcome.claim, attempt, owner, _HOST, outcome.ran_for, outcome.kind, *evidence),
    )


def pending_results(db: Database, older_than: int, limit: int) -> list[tuple[str, str, bytes, int]]:
    """Return results that are not in the results backend although their outcome was written a while ago, except those
    that it would have forgotten long ago: one that it refuses must not stand in the way of the others for ever.

    Parameters:
      db(Database)
      older_than(int): Milliseconds since the outcome.
      limit(int): At most so many.

    Raises:
      StoreError: If the database does not answer.

    Returns:
      list: Job, message key, encoded value, and how long the backend is to keep it (milliseconds).
    """
    return [(row[0], row[1], bytes(row[2]), row[3]) for row in db.fetch(_PENDING, (older_than, limit))]


def mark_stored(db: Database, pairs: Sequence[tuple[str, str]]) -> None:
    """Note that results are in the results backend.

    Parameters:
      db(Database)
      pairs(Sequence): Pairs of job and message key.

    Raises:
      StoreError: If the database does not answer.
    """
    if pairs:
        db.execute_many(_STORED, sorted(pairs))
