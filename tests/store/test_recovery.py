"""Putting right: what is due, what was lost, who died, and who may do it."""

from __future__ import annotations

import threading

import pytest

from dramatiq_durable.store import jobs, outcomes, reading, recovery
from dramatiq_durable.store.database import Database
from dramatiq_durable.store.types import Outcome, Reaped, Waiting, WorkerInfo
from tests.store.rows import LEASE, change, claimed, expire, new, row, started


def due_in(db: Database, id: str, ahead: int) -> None:
    change(db, "UPDATE {jobs} SET publish_at = {now} + CAST(? AS BIGINT) WHERE id = ?", ahead, id)


def published_ago(db: Database, id: str, ago: int) -> None:
    change(db, "UPDATE {jobs} SET published_at = {now} - CAST(? AS BIGINT) WHERE id = ?", ago, id)


def reap(db: Database, *ids: str, max_lost: int = 3) -> Reaped:
    watched = [(found.id, found.claim, found.beat) for found in recovery.watch(db) if found.id in ids]
    return recovery.reap(db, watched, max_lost)


# What is due


def test_what_is_due_is_taken_once_oldest_first(db: Database) -> None:
    # Given jobs that are due, one that is not, and one that was published
    for id, ahead in (("b", -10_000), ("a", -20_000), ("c", 0), ("later", 60_000)):
        jobs.record(db, new(id, delay=90_000, payload=id.encode()))
        due_in(db, id, ahead)
    jobs.record(db, new("published"))
    change(db, "UPDATE {jobs} SET created_at = publish_at WHERE publish_at IS NOT NULL")

    # When they are taken, two at a time
    first, second, third = recovery.take_due(db, 2), recovery.take_due(db, 2), recovery.take_due(db, 2)

    # Then each comes once, the oldest first, with what its message needs
    assert [[found.id for found in taken] for taken in (first, second, third)] == [["a", "b"], ["c"], []]
    assert (bytes(first[0].payload), first[0].queue, first[0].revision, first[0].retries) == (b"a", "default", 1, 0)
    job = row(db, "a")
    assert (job.state, job.publish_at, job.publishes, job.broker_ref) == ("queued", None, 1, first[0].broker_ref)
    assert row(db, "later").state == "scheduled"


def test_every_publication_has_a_reference_of_its_own(db: Database) -> None:
    jobs.record(db, new("a", broker_ref=None))
    refs = set()
    for _ in range(3):
        (taken,) = recovery.take_due(db, 10)
        refs.add(taken.broker_ref)
        assert recovery.put_back(db, [("a", taken.broker_ref)]) == {"a"}

    assert (len(refs), row(db, "a").publishes, row(db, "a").put_back) == (3, 3, 3)


def test_the_next_due_time_is_known(db: Database) -> None:
    assert recovery.next_due(db) is None
    jobs.record(db, new("published"))
    assert recovery.next_due(db) is None

    jobs.record(db, new("a", delay=3_600_000))
    ahead = recovery.next_due(db)
    assert ahead is not None and 3_590_000 < ahead <= 3_600_000

    jobs.record(db, new("b", broker_ref=None))
    ahead = recovery.next_due(db)
    assert ahead is not None and ahead <= 0


def test_a_delay_may_be_a_hundred_years(db: Database) -> None:
    jobs.record(db, new("a", delay=3_153_600_000_000))

    assert (row(db, "a").publish_at or 0) - row(db, "a").created_at == 3_153_600_000_000
    assert recovery.take_due(db, 10) == []


def test_what_the_broker_did_not_take_is_due_again(db: Database) -> None:
    jobs.record(db, new("a", broker_ref=None))
    (taken,) = recovery.take_due(db, 10)

    assert recovery.unpublish(db, [("a", "another"), ("b", taken.broker_ref)], 0) == 0
    assert recovery.unpublish(db, [("a", taken.broker_ref)], 60_000) == 1
    assert recovery.unpublish(db, [("a", taken.broker_ref)], 0) == 0

    assert recovery.take_due(db, 10) == []
    assert row(db, "a").published_at is None
    due_in(db, "a", -1)
    assert [found.id for found in recovery.take_due(db, 10)] == ["a"]


def test_a_job_that_was_claimed_meanwhile_is_not_published_again(db: Database) -> None:
    claimed(db, "a")

    assert recovery.unpublish(db, [("a", "a-ref")], 0) == 0
    assert recovery.put_back(db, [("a", "a-ref")]) == set()
    assert row(db, "a").publish_at is None


def test_many_that_take_at_once_take_each_job_once(db: Database) -> None:
    # Given 300 due jobs and six takers
    jobs.record_many(db, [new(f"job-{i}", broker_ref=None) for i in range(300)])
    taken: list[str] = []
    ready = threading.Barrier(6)

    def take() -> None:
        ready.wait()
        idle = 0
        while idle < 3:
            found = recovery.take_due(db, 7)
            idle = 0 if found else idle + 1
            taken.extend(due.id for due in found)
        db.close_thread()

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    # Then each was taken by one of them
    assert sorted(taken) == sorted(f"job-{i}" for i in range(300))


# What the broker lost


def test_waiting_jobs_are_paged_in_the_order_of_their_ids(db: Database) -> None:
    # Given seven that wait, and others that do not: due, scheduled, active, just published
    ids = [f"job-{i}" for i in range(7)]
    jobs.record_many(
        db, [new(id) for id in ids] + [new("due", broker_ref=None), new("later", delay=5_000), new("fresh")]
    )
    claimed(db, "active")
    for id in [*ids, "active"]:
        published_ago(db, id, 10_000)

    pages, after = [], ""
    while page := recovery.waiting_page(db, after, 3, 5_000):
        pages.append(page)
        after = page[-1].id

    assert [[found.id for found in page] for page in pages] == [ids[:3], ids[3:6], ids[6:]]
    assert pages[0][0] == Waiting("job-0", "default", "job-0-ref")


def test_those_that_are_put_back_are_published_again(db: Database) -> None:
    jobs.record_many(db, [new("a"), new("b"), new("c")])

    # The second has been published again since it was looked for; the fourth never was
    assert recovery.put_back(db, [("c", "c-ref"), ("b", "older"), ("a", "a-ref"), ("d", None)]) == {"a", "c"}
    assert recovery.put_back(db, [("a", "a-ref")]) == set()
    assert recovery.put_back(db, []) == set()

    assert (row(db, "a").put_back, row(db, "b").put_back) == (1, 0)
    assert sorted(found.id for found in recovery.take_due(db, 10)) == ["a", "c"]


def test_a_job_without_a_reference_can_be_put_back(db: Database) -> None:
    jobs.record(db, new("a"))
    change(db, "UPDATE {jobs} SET broker_ref = NULL")

    assert recovery.put_back(db, [("a", "other")]) == set()
    assert recovery.put_back(db, [("a", None)]) == {"a"}


# Who died


def test_the_watch_sees_active_jobs_alone(db: Database) -> None:
    claimed(db, "b")
    claimed(db, "a", "w2")
    jobs.record(db, new("c"))
    jobs.renew(db, "w1", [("b", 1, True)], LEASE)

    seen = recovery.watch(db)

    assert [found[:3] for found in seen] == [("a", 1, 0), ("b", 1, 1)]
    if db.dialect.name == "postgresql":
        assert [found.expired for found in seen] == [False, False]
        expire(db, "a")
        assert [found.expired for found in recovery.watch(db)] == [True, False]


def test_a_lost_claim_is_charged_nothing(db: Database) -> None:
    claimed(db, "a")
    expire(db, "a")

    assert reap(db, "a") == Reaped(1, 0, 0)

    job = row(db, "a")
    assert (job.state, job.owner, job.claim, job.reason) == ("queued", None, 2, "lease_expired")
    assert (job.attempt, job.retries, job.lost, job.lost_claims, job.put_back) == (0, 0, 0, 1, 1)
    assert job.publish_at is not None and reading.attempts(db, "a") == []
    assert jobs.claim(db, "w2", ["a"], LEASE)[0].lost_claims == 1


def test_a_lost_run_that_may_run_again_is_queued_and_counted(db: Database) -> None:
    started(db, "a")
    expire(db, "a")

    assert reap(db, "a") == Reaped(1, 0, 0)

    job = row(db, "a")
    assert (job.state, job.owner, job.claim, job.reason, job.started_at) == ("queued", None, 2, "worker_lost", None)
    assert (job.attempt, job.retries, job.lost, job.lost_claims) == (1, 1, 1, 0)
    (attempt,) = reading.attempts(db, "a")
    assert (attempt.ended, attempt.attempt, attempt.owner, attempt.error_type) == ("lost", 1, "w1", "WorkerLost")


@pytest.mark.parametrize(
    ("policy", "state", "reaped"), [("fail", "failed", (0, 1, 0)), ("hold", "in_doubt", (0, 0, 1))]
)
def test_a_lost_run_that_must_not_run_again_does_not(
    db: Database, policy: str, state: str, reaped: tuple[int, int, int]
) -> None:
    started(db, "a", on_lost=policy)
    expire(db, "a")

    assert reap(db, "a") == reaped

    job = row(db, "a")
    assert (job.state, job.reason, job.lost, job.publish_at, job.owner) == (state, "worker_lost", 1, None, "w1")
    assert [found.ended for found in reading.attempts(db, "a")] == ["lost"]
    assert jobs.claim(db, "w2", ["a"], LEASE) == []


@pytest.mark.parametrize(("alone", "losses"), [(1, 2), (0, 6)])
def test_a_job_that_loses_its_workers_again_and_again_fails(db: Database, alone: int, losses: int) -> None:
    # Given a limit of two losses; a job that was never alone in its process is given three times as many
    jobs.record(db, new("a"))
    for i in range(losses):
        (claim,) = jobs.claim(db, f"w{i}", ["a"], LEASE)
        assert claim.lost == i
        jobs.start(db, f"w{i}", [("a", claim.claim, "rerun", alone)], LEASE)
        expire(db, "a")
        assert sum(reap(db, "a", max_lost=2)) == 1
        assert row(db, "a").state == ("queued" if i < losses - 1 else "failed")

    assert (row(db, "a").reason, row(db, "a").lost) == ("worker_lost", losses)
    assert [found.attempt for found in reading.attempts(db, "a")] == list(range(1, losses + 1))


def test_an_owner_that_shows_a_sign_of_life_keeps_its_job(db: Database) -> None:
    # Given three watched jobs, whose owner renews one, starts one, and ends one
    claims = {id: claimed(db, id) for id in "abc"}
    watched = [(found.id, found.claim, found.beat) for found in recovery.watch(db)]
    jobs.renew(db, "w1", [("a", claims["a"].claim, False)], LEASE)
    jobs.start(db, "w1", [("b", claims["b"].claim, "rerun", 0)], LEASE)
    outcomes.settle(db, "w1", [Outcome("c", claims["c"].claim, "completed")])
    expire(db, "a", "b")

    # Then none is taken away
    assert recovery.reap(db, watched, 3) == Reaped(0, 0, 0)
    assert [row(db, id).state for id in "abc"] == ["active", "active", "completed"]
    assert reading.attempts(db, "b") == []


def test_a_lease_that_holds_by_the_databases_clock_is_not_taken(db: Database) -> None:
    claimed(db, "a")

    # SQLite has no clock of its own: there the caller has waited for a lease
    assert reap(db, "a") == (Reaped(0, 0, 0) if db.dialect.name == "postgresql" else Reaped(1, 0, 0))


def test_a_job_that_was_claimed_anew_is_not_taken_for_the_old_claim(db: Database) -> None:
    old = claimed(db, "a")
    watched = [(found.id, found.claim, found.beat) for found in recovery.watch(db)]
    jobs.release(db, "w1", [("a", old.claim)], "x")
    jobs.claim(db, "w2", ["a"], LEASE)
    expire(db, "a")

    assert recovery.reap(db, watched, 3) == Reaped(0, 0, 0)


def test_many_lost_jobs_are_sorted_by_what_they_were_doing(db: Database) -> None:
    claimed(db, "a"), started(db, "b"), started(db, "c", on_lost="fail"), started(db, "d", on_lost="hold")
    expire(db, *"abcd")

    watched = [(found.id, found.claim, found.beat) for found in recovery.watch(db)]
    assert recovery.reap(db, [*watched[::-1], ("missing", 1, 0), watched[0]], 3) == Reaped(2, 1, 1)
    assert recovery.reap(db, watched, 3) == recovery.reap(db, [], 3) == Reaped(0, 0, 0)


def test_the_outcome_of_a_lost_run_counts_for_nothing(db: Database) -> None:
    claim = started(db, "a")
    expire(db, "a")
    reap(db, "a")

    assert outcomes.settle(db, "w1", [Outcome("a", claim.claim, "completed", follow_ups=(new("b"),))]) == set()
    assert reading.get_job(db, "b") is None


# Parked jobs


def test_jobs_that_were_parked_for_their_actor_go_on_where_it_is_known(db: Database) -> None:
    for id, actor, reason in (
        ("a", "known", "unknown_actor"),
        ("b", "other", "unknown_actor"),
        ("c", "known", "no_row"),
    ):
        jobs.record(db, new(id, actor=actor, parked=reason))
    for i in range(5):
        jobs.record(db, new(f"many-{i}", actor="known", parked="unknown_actor"))

    assert recovery.unpark(db, [], 10) == 0
    assert recovery.unpark(db, ["known", "unheard of"], 4) == 4
    assert recovery.unpark(db, ["known"], 10) == 2
    assert recovery.unpark(db, ["known"], 10) == 0

    assert (row(db, "a").state, row(db, "a").reason) == ("queued", None)
    assert (row(db, "b").state, row(db, "c").state) == ("parked", "parked")
    assert len(recovery.take_due(db, 10)) == 6


# Who may do it


def test_one_leads_at_a_time_until_it_resigns_or_its_time_runs_out(db: Database, other: Database) -> None:
    assert recovery.lead(db, "r", "w1", 60_000) and recovery.lead(db, "r", "w1", 60_000)
    assert not recovery.lead(other, "r", "w2", 60_000)
    assert recovery.lead(other, "another", "w2", 60_000)

    recovery.resign(other, "r", "w2")
    assert not recovery.lead(other, "r", "w2", 60_000)

    recovery.resign(db, "r", "w1")
    assert recovery.lead(other, "r", "w2", 60_000)

    change(db, "UPDATE {leaders} SET expires_at = {now} - 1 WHERE name = 'r'")
    assert recovery.lead(db, "r", "w1", 60_000)
    assert not recovery.lead(other, "r", "w2", 60_000)


def test_of_many_that_want_to_lead_one_does(db: Database) -> None:
    leading: list[str] = []
    ready = threading.Barrier(8)

    def try_it(owner: str) -> None:
        ready.wait()
        if recovery.lead(db, "r", owner, 60_000):
            leading.append(owner)
        db.close_thread()

    threads = [threading.Thread(target=try_it, args=(f"w{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(leading) == 1


# For people to look at


def test_what_cannot_be_read_is_kept_once_and_counted(db: Database) -> None:
    for payload in (b"\xff\x00", b"\xff\x00", b"other"):
        recovery.keep_undecodable(db, "default", payload, "not\x00 JSON \udcff", "ref")

    assert reading.undecodable(db) == 2


def test_workers_are_listed_while_they_are_seen(db: Database) -> None:
    recovery.enlist(db, WorkerInfo("w1", "host-b", 7, 8, "default"))
    recovery.enlist(db, WorkerInfo("w2", "host-a", 9, 8, "default,slow"))
    recovery.enlist(db, WorkerInfo("w1", "host-b", 7, 4, "default"))

    listed = reading.workers(db, 60_000)
    assert [(found.owner, found.threads) for found in listed] == [("w2", 8), ("w1", 4)]

    change(db, "UPDATE {workers} SET seen_at = seen_at - 120000 WHERE owner = 'w2'")
    assert [found.owner for found in reading.workers(db, 60_000)] == ["w1"]
    change(db, "UPDATE {workers} SET seen_at = seen_at - 100000000 WHERE owner = 'w2'")
    recovery.enlist(db, WorkerInfo("w1", "host-b", 7, 4, "default"))
    assert [found.owner for found in reading.workers(db, 10**12)] == ["w1"]


def test_what_reconciliation_did_adds_up(db: Database) -> None:
    assert reading.last_pass(db, "reconcile") is None
    recovery.note_pass(db, "reconcile", "w1", looked=10, put_back=2)
    recovery.note_pass(db, "reconcile", "w2", looked=5, put_back=1, requeued=3, failed=1)

    last = reading.last_pass(db, "reconcile")
    assert last is not None and 0 <= last.finished_ago < 60_000
    assert (last.owner, last.looked, last.put_back, last.requeued, last.failed) == ("w2", 5, 1, 3, 1)
    assert (last.put_back_total, last.requeued_total, last.failed_total) == (3, 3, 1)
