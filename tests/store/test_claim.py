"""Claims, starts, renewals and releases: every write names its token."""

from __future__ import annotations

import pytest

from dramatiq_durable.store import jobs, reading, recovery
from dramatiq_durable.store.database import Database
from tests.store.rows import LEASE, change, claimed, expire, new, row, started


def test_a_claim_takes_queued_jobs_and_grows_their_counter(db: Database) -> None:
    jobs.record_many(db, [new("a"), new("b"), new("c", delay=60_000), new("d", parked="no_row")])

    granted = jobs.claim(db, "w1", ["d", "b", "a", "c", "missing", "a"], LEASE)

    assert sorted(claim.id for claim in granted) == ["a", "b"]
    assert {(claim.claim, claim.attempt, claim.revision, claim.lost_claims) for claim in granted} == {(1, 0, 1, 0)}
    job = row(db, "a")
    assert (job.state, job.owner, job.claim, job.started_at, job.publish_at) == ("active", "w1", 1, None, None)
    assert job.claimed_at is not None and job.lease_until is not None
    assert LEASE <= job.lease_until - job.claimed_at <= LEASE + 100


def test_a_job_that_waits_to_be_published_may_be_claimed_by_an_older_message(db: Database) -> None:
    jobs.record(db, new("a", broker_ref=None))

    assert len(jobs.claim(db, "w1", ["a"], LEASE)) == 1
    assert (row(db, "a").publish_at, recovery.take_due(db, 10)) == (None, [])


def test_what_is_claimed_is_claimed_by_nobody_else(db: Database, other: Database) -> None:
    claimed(db, "a")

    assert jobs.claim(other, "w2", ["a"], LEASE) == []
    assert jobs.claim(other, "w2", ["a"], LEASE, again=True) == []
    assert jobs.claim(db, "w1", ["a"], LEASE) == []
    assert jobs.locate(other, ["a", "b"]) == {"a": ("a", "active", "w1", 1)}


def test_claiming_nothing_is_nothing(db: Database) -> None:
    assert jobs.claim(db, "w1", [], LEASE) == []
    assert jobs.claim(db, "w1", [], LEASE, again=True) == []
    assert jobs.locate(db, []) == {} and jobs.load(db, []) == {}
    assert jobs.start(db, "w1", [], LEASE) == {} and jobs.release(db, "w1", [], "x") == set()


def test_a_claim_whose_reply_was_lost_is_granted_again_under_the_same_token(db: Database) -> None:
    # Given a claim, of whose reply nothing is known
    claim = claimed(db, "a")
    jobs.record(db, new("b"))

    # When it is repeated, together with another job
    granted = {found.id: found for found in jobs.claim(db, "w1", ["a", "b"], LEASE, again=True)}

    # Then the first has its old token, and the second a first one
    assert granted["a"] == claim
    assert granted["b"].claim == 1


def test_a_claim_that_has_started_is_not_granted_again(db: Database) -> None:
    started(db, "a")

    assert jobs.claim(db, "w1", ["a"], LEASE, again=True) == []


def test_a_strict_start_counts_the_attempt_once_however_often_it_is_repeated(db: Database) -> None:
    claim = claimed(db, "a")

    for _ in range(3):
        assert jobs.start(db, "w1", [("a", claim.claim, "hold", 1)], LEASE) == {"a": 1}

    job = row(db, "a")
    assert (job.attempt, job.on_lost, job.alone) == (1, "hold", 1) and job.started_at is not None


def test_a_start_is_refused_without_the_token(db: Database) -> None:
    claim = claimed(db, "a")
    jobs.record(db, new("b"))

    assert jobs.start(db, "w2", [("a", claim.claim, "rerun", 0)], LEASE) == {}
    assert jobs.start(db, "w1", [("a", claim.claim + 1, "rerun", 0), ("b", 0, "rerun", 0)], LEASE) == {}
    assert row(db, "a").started_at is None


def test_an_expired_lease_that_nobody_has_taken_is_renewed_by_a_start(db: Database) -> None:
    claim = claimed(db, "a")
    expire(db, "a")

    assert jobs.start(db, "w1", [("a", claim.claim, "rerun", 0)], LEASE) == {"a": 1}
    assert not any(active.expired for active in recovery.watch(db)) or db.dialect.name == "sqlite"
    assert (row(db, "a").lease_until or 0) > reading.now(db)


def test_a_heartbeat_renews_what_is_listed_and_reports_what_is_not(db: Database) -> None:
    # Given four jobs: held and running, held, mine but not listed, and someone else's
    running, waiting, stray = claimed(db, "a"), claimed(db, "b"), claimed(db, "c")
    claimed(db, "d", "w2")
    before = {id: row(db, id) for id in "abcd"}
    change(db, "UPDATE {jobs} SET lease_until = lease_until - 1000")

    # When the process names those that it holds, one under an old token
    held = [("a", running.claim, True), ("b", waiting.claim, False), ("d", 1, True), ("x", 1, False)]
    beat = jobs.renew(db, "w1", held, LEASE)

    # Then these are renewed, the third is a stray, and the others are left alone
    assert beat.renewed == {("a", 1), ("b", 1)}
    assert beat.strays == (("c", stray.claim, False),)
    after = {id: row(db, id) for id in "abcd"}
    assert [after[id].beat - before[id].beat for id in "abcd"] == [1, 1, 0, 0]
    assert [(after[id].lease_until or 0) >= (before[id].lease_until or 0) for id in "abcd"] == [
        True,
        True,
        False,
        False,
    ]

    # And the one that has begun is known to have
    assert (after["a"].attempt, after["a"].on_lost) == (1, "rerun") and after["a"].started_at is not None
    assert (after["b"].attempt, after["b"].started_at) == (0, None)


def test_a_heartbeat_counts_an_attempt_once(db: Database) -> None:
    claim = claimed(db, "a")

    for _ in range(3):
        jobs.renew(db, "w1", [("a", claim.claim, True)], LEASE)

    assert (row(db, "a").attempt, row(db, "a").beat) == (1, 3)


def test_a_heartbeat_leaves_the_policy_of_a_strict_start_alone(db: Database) -> None:
    claim = started(db, "a", on_lost="hold")

    jobs.renew(db, "w1", [("a", claim.claim, True)], LEASE)

    assert (row(db, "a").attempt, row(db, "a").on_lost) == (1, "hold")


def test_a_row_under_another_token_is_a_stray(db: Database) -> None:
    # Given a job that this process lost and has claimed anew since
    first = claimed(db, "a")
    jobs.release(db, "w1", [("a", first.claim)], "x")
    (second,) = jobs.claim(db, "w1", ["a"], LEASE)

    # When the old claim is named
    beat = jobs.renew(db, "w1", [("a", first.claim, True)], LEASE)

    # Then it is not renewed, and the new one is reported
    assert beat == (frozenset(), (("a", second.claim, False),))


def test_an_expired_lease_that_nobody_has_taken_is_renewed_by_its_owner(db: Database) -> None:
    claim = claimed(db, "a")
    expire(db, "a")

    assert jobs.renew(db, "w1", [("a", claim.claim, False)], LEASE).renewed == {("a", claim.claim)}
    assert (row(db, "a").lease_until or 0) > reading.now(db)


def test_a_heartbeat_of_a_thousand_jobs_is_one_statement(db: Database) -> None:
    ids = [f"job-{i:04}" for i in range(1_000)]
    jobs.record_many(db, [new(id) for id in ids])
    granted = jobs.claim(db, "w1", ids, LEASE)

    statements: list[str] = []
    plain = db.fetch
    db.fetch = lambda statement, params=(): (statements.append(statement.name), plain(statement, params))[1]  # type: ignore[method-assign]
    beat = jobs.renew(db, "w1", [(claim.id, claim.claim, True) for claim in granted], LEASE)

    assert (len(beat.renewed), beat.strays, statements) == (1_000, (), ["renew leases"])


def test_a_release_gives_back_what_has_not_started(db: Database) -> None:
    unstarted, running = claimed(db, "a"), started(db, "b")

    pairs = [("a", unstarted.claim), ("b", running.claim), ("missing", 1)]
    assert jobs.release(db, "w2", pairs, "x") == set()
    assert jobs.release(db, "w1", pairs, "worker_stopped") == {"a"}

    job = row(db, "a")
    assert (job.state, job.owner, job.claim, job.reason) == ("queued", None, 2, "worker_stopped")
    assert (job.attempt, job.lost_claims, job.put_back, job.lease_until) == (0, 0, 0, None)
    assert job.publish_at is not None
    assert row(db, "b").state == "active"


def test_a_stale_token_is_refused_by_every_verb(db: Database) -> None:
    # Given a claim that was given back and taken by another process
    old = claimed(db, "a")
    jobs.release(db, "w1", [("a", old.claim)], "x")
    (new_claim,) = jobs.claim(db, "w2", ["a"], LEASE)

    # Then no verb accepts the first
    assert new_claim.claim == old.claim + 2
    assert jobs.start(db, "w1", [("a", old.claim, "rerun", 0)], LEASE) == {}
    assert jobs.renew(db, "w1", [("a", old.claim, True)], LEASE) == (frozenset(), ())
    assert jobs.release(db, "w1", [("a", old.claim)], "x") == set()
    assert row(db, "a").owner == "w2"


@pytest.mark.parametrize("state", ["scheduled", "parked"])
def test_only_queued_jobs_are_claimed(db: Database, state: str) -> None:
    jobs.record(db, new("a", delay=60_000 if state == "scheduled" else None, parked="x" if state == "parked" else None))

    assert jobs.claim(db, "w1", ["a"], LEASE, again=True) == []
    assert row(db, "a").state == state
