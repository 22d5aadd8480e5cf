"""How runs end: outcome, follow-ups, results and evidence together, under the fence."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dramatiq_durable.errors import StoreError
from dramatiq_durable.store import jobs, outcomes, reading, recovery
from dramatiq_durable.store.database import Database
from dramatiq_durable.store.dialects import Statement
from dramatiq_durable.store.types import Evidence, FollowUpResult, Outcome, Token
from tests.store.rows import LEASE, change, claimed, expire, new, row, started

_DEADLOCKS = Statement("count", "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")

EVIDENCE = Evidence("ValueError", "no such topic", "Traceback …")


def settle(db: Database, id: str, claim: int, kind: str, owner: str = "w1", **fields: Any) -> bool:
    accepted = outcomes.settle(db, owner, [Outcome(id, claim, kind, **fields)], max_interruptions=2)
    assert accepted <= {id}
    return bool(accepted)


# Each kind of end


@pytest.mark.parametrize("strict", [False, True])
def test_a_completed_job_is_final_and_keeps_who_did_it(db: Database, strict: bool) -> None:
    claim = started(db, "a") if strict else claimed(db, "a")

    assert settle(db, "a", claim.claim, "completed", ran_for=5_000)

    job = row(db, "a")
    assert (job.state, job.owner, job.claim, job.attempt, job.lease_until) == ("completed", "w1", 1, 1, None)
    assert job.finished_at is not None and job.started_at is not None
    assert strict or 5_000 <= job.finished_at - job.started_at <= 5_100
    assert reading.attempts(db, "a") == []


@pytest.mark.parametrize("strict", [False, True])
def test_a_failed_job_keeps_its_evidence(db: Database, strict: bool) -> None:
    claim = started(db, "a") if strict else claimed(db, "a")

    assert settle(db, "a", claim.claim, "failed", ran_for=5_000, reason="retries_exhausted", evidence=EVIDENCE)

    job = row(db, "a")
    assert (job.state, job.reason, job.attempt, job.owner) == ("failed", "retries_exhausted", 1, "w1")
    (attempt,) = reading.attempts(db, "a")
    assert (attempt.attempt, attempt.claim, attempt.owner, attempt.ended) == (1, 1, "w1", "failed")
    assert (attempt.error_type, attempt.error_message, attempt.traceback) == EVIDENCE
    assert attempt.started_at is not None and 5_000 <= attempt.ended_at - attempt.started_at <= 5_100
    assert attempt.host


def test_a_job_that_fails_before_it_starts_is_charged_nothing(db: Database) -> None:
    claim = claimed(db, "a")

    assert settle(db, "a", claim.claim, "failed", started=False, reason="expired")

    assert (row(db, "a").state, row(db, "a").attempt, row(db, "a").started_at) == ("failed", 0, None)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("delay", [0, 60_000])
def test_a_retry_is_a_row_with_a_due_time(db: Database, strict: bool, delay: int) -> None:
    claim = started(db, "a", on_lost="hold") if strict else claimed(db, "a")

    assert settle(db, "a", claim.claim, "retry", delay=delay, reason="ValueError", evidence=EVIDENCE)

    job = row(db, "a")
    assert (job.state, job.owner, job.claim) == ("scheduled" if delay else "queued", None, 2)
    assert (job.attempt, job.retries, job.revision, job.reason) == (1, 1, 1, "ValueError")
    assert (job.started_at, job.lease_until, job.on_lost) == (None, None, None)
    assert job.publish_at is not None and 0 <= job.publish_at - delay - job.created_at < 60_000
    assert [attempt.ended for attempt in reading.attempts(db, "a")] == ["retry"]


def test_a_retry_that_is_not_counted_leaves_the_retries_alone(db: Database) -> None:
    claim = claimed(db, "a")

    assert settle(db, "a", claim.claim, "retry", counted=False)
    assert (row(db, "a").attempt, row(db, "a").retries) == (1, 0)


def test_a_job_put_off_before_it_started_is_charged_nothing(db: Database) -> None:
    claim = claimed(db, "a")

    assert settle(db, "a", claim.claim, "retry", started=False, counted=False, delay=60_000, reason="over a limit")

    job = row(db, "a")
    assert (job.state, job.attempt, job.retries) == ("scheduled", 0, 0)
    assert reading.attempts(db, "a") == []


def test_a_retry_with_another_input_is_another_revision(db: Database) -> None:
    claim = claimed(db, "a", payload=b"one")
    settle(db, "a", claim.claim, "retry", options=b"{}")
    (claim,) = jobs.claim(db, "w1", ["a"], LEASE)
    assert (claim.revision, claim.attempt, claim.retries) == (2, 1, 1)

    settle(db, "a", claim.claim, "retry", payload=b"two")

    loaded = jobs.load(db, ["a"])["a"]
    assert (bytes(loaded.payload), bytes(loaded.options or b""), loaded.revision) == (b"two", b"{}", 3)


@pytest.mark.parametrize("strict", [False, True])
def test_an_interrupted_job_is_charged_nothing_until_it_is_interrupted_too_often(db: Database, strict: bool) -> None:
    for times in (1, 2):
        claim = started(db, "a") if strict and times == 1 else None
        if claim is None:
            jobs.record(db, new("a"))
            (claim,) = jobs.claim(db, "w1", ["a"], LEASE)
            if strict:
                jobs.start(db, "w1", [("a", claim.claim, "rerun", 0)], LEASE)
        assert settle(db, "a", claim.claim, "interrupted", reason="shutdown")
        job = row(db, "a")
        assert (job.state, job.attempt, job.retries, job.interruptions) == ("queued", 0, 0, times)
        assert job.publish_at is not None and job.owner is None and job.claim == 2 * times

    (claim,) = jobs.claim(db, "w1", ["a"], LEASE)
    assert settle(db, "a", claim.claim, "interrupted", reason="shutdown")

    job = row(db, "a")
    assert (job.state, job.reason, job.publish_at) == ("failed", "interrupted_too_often", None)
    assert [(a.ended, a.attempt) for a in reading.attempts(db, "a")] == [("interrupted", 1)] * 3


def test_a_claim_that_is_given_back_parked_or_skipped_was_no_attempt(db: Database) -> None:
    for id, kind, state in (("a", "released", "queued"), ("b", "parked", "parked"), ("c", "skipped", "cancelled")):
        claim = claimed(db, id)
        assert settle(db, id, claim.claim, kind, started=False, reason="because")
        job = row(db, id)
        assert (job.state, job.reason, job.attempt, job.retries, job.started_at) == (state, "because", 0, 0, None)
        assert (job.publish_at is not None, job.finished_at is not None) == (kind == "released", kind == "skipped")
        assert reading.attempts(db, id) == []


@pytest.mark.parametrize("kind", ["released", "parked", "skipped"])
def test_a_started_run_is_neither_given_back_nor_parked_nor_skipped(db: Database, kind: str) -> None:
    claim = started(db, "a")

    assert not settle(db, "a", claim.claim, kind, started=False)
    assert not settle(db, "a", claim.claim, "failed", started=False)
    assert row(db, "a").state == "active"


# What belongs to an outcome


def test_follow_ups_and_results_are_written_with_the_outcome(db: Database) -> None:
    claim = claimed(db, "a")
    jobs.record(db, new("there", payload=b"old"))
    follow_ups = (new("b", origin="follow_up", parent_id="a", broker_ref=None), new("there", payload=b"new"))
    results = (FollowUpResult("key-1", b"\x00\xff", 600_000), FollowUpResult("key-2", b"2", 60_000))

    assert settle(db, "a", claim.claim, "completed", follow_ups=follow_ups, results=results)

    assert (row(db, "b").parent_id, row(db, "b").state) == ("a", "queued")
    assert jobs.load(db, ["there"])["there"].payload == b"old"
    pending = outcomes.pending_results(db, 0, 10)
    assert sorted(pending) == [("a", "key-1", b"\x00\xff", 600_000), ("a", "key-2", b"2", 60_000)]


def test_results_wait_until_they_are_marked(db: Database) -> None:
    claim = claimed(db, "a")
    settle(db, "a", claim.claim, "completed", results=(FollowUpResult("k1", b"1", 5), FollowUpResult("k2", b"2", 5)))
    assert outcomes.pending_results(db, 60_000, 10) == []
    assert len(outcomes.pending_results(db, 0, 1)) == 1

    outcomes.mark_stored(db, [("a", "k1"), ("b", "k1")])
    outcomes.mark_stored(db, [])

    assert [key for _, key, _, _ in outcomes.pending_results(db, 0, 10)] == ["k2"]


def test_a_result_that_changes_is_delivered_again(db: Database) -> None:
    claim = claimed(db, "a")
    settle(db, "a", claim.claim, "retry", results=(FollowUpResult("key", b"1", 5),))
    outcomes.mark_stored(db, [("a", "key")])
    (claim,) = jobs.claim(db, "w1", ["a"], LEASE)

    settle(db, "a", claim.claim, "completed", results=(FollowUpResult("key", b"2", 5),))

    assert outcomes.pending_results(db, 0, 10) == [("a", "key", b"2", 5)]


@pytest.mark.parametrize("kind", ["completed", "failed", "retry", "interrupted"])
def test_nothing_of_a_refused_outcome_is_written(db: Database, kind: str) -> None:
    # Given a run that has lost its job to another process
    old = claimed(db, "a")
    jobs.release(db, "w1", [("a", old.claim)], "x")
    jobs.claim(db, "w2", ["a"], LEASE)
    before = row(db, "a")

    # When it ends
    written = settle(
        db,
        "a",
        old.claim,
        kind,
        evidence=EVIDENCE,
        follow_ups=(new("b"),),
        results=(FollowUpResult("key", b"1", 5),),
    )

    # Then it is as if it never had
    assert not written
    assert row(db, "a") == before and reading.get_job(db, "b") is None
    assert reading.attempts(db, "a") == [] and outcomes.pending_results(db, 0, 10) == []


def test_in_a_batch_each_outcome_has_its_own_fence(db: Database) -> None:
    # Given five runs, the last two of which have lost their jobs
    claims = {id: claimed(db, id) for id in "edcba"}
    jobs.release(db, "w1", [("d", 1), ("e", 1)], "x")
    jobs.claim(db, "w2", ["e"], LEASE)

    # When all of them end together
    kinds = {"a": "completed", "b": "retry", "c": "failed", "d": "completed", "e": "retry"}
    batch = [
        Outcome(id, claims[id].claim, kind, follow_ups=(new(f"{id}-next"),), results=(FollowUpResult(id, b"", 5),))
        for id, kind in kinds.items()
    ]
    accepted = outcomes.settle(db, "w1", batch)

    # Then three outcomes stand, each with what belongs to it
    assert accepted == {"a", "b", "c"}
    assert [row(db, id).state for id in "abcde"] == ["completed", "queued", "failed", "queued", "active"]
    assert {id for id in "abcde" if reading.get_job(db, f"{id}-next")} == {"a", "b", "c"}
    assert {key for _, key, _, _ in outcomes.pending_results(db, 0, 10)} == {"a", "b", "c"}


def test_two_claims_of_one_job_in_one_batch_are_told_apart(db: Database) -> None:
    # Given a run that was lost, and a later one of the same job in the same process
    old = claimed(db, "a")
    jobs.release(db, "w1", [("a", old.claim)], "x")
    (current,) = jobs.claim(db, "w1", ["a"], LEASE)

    # When both end in one batch
    batch = [Outcome("a", old.claim, "completed", ran_for=1), Outcome("a", current.claim, "completed", ran_for=900_000)]
    outcomes.settle(db, "w1", batch)

    # Then the outcome that stands is that of the later one
    job = row(db, "a")
    assert (job.state, job.claim) == ("completed", current.claim)
    assert (job.finished_at or 0) - (job.started_at or 0) >= 900_000


def test_settling_nothing_is_nothing(db: Database) -> None:
    assert outcomes.settle(db, "w1", []) == set()


def test_a_batch_is_written_as_a_whole_or_not_at_all(db: Database) -> None:
    # Given two runs, and a follow-up of the second that no database takes
    a, b = claimed(db, "a"), claimed(db, "b")
    broken = new("c", delay=2**80)

    with pytest.raises(StoreError, match="record a job"):
        outcomes.settle(
            db, "w1", [Outcome("a", a.claim, "completed"), Outcome("b", b.claim, "completed", follow_ups=(broken,))]
        )

    # Then both still run, and can end otherwise
    assert reading.counts(db) == {"active": 2}
    assert outcomes.settle(db, "w1", [Outcome("a", a.claim, "completed"), Outcome("b", b.claim, "failed")]) == {
        "a",
        "b",
    }


def test_evidence_that_databases_refuse_is_kept_all_the_same(db: Database) -> None:
    claim = claimed(db, "a")

    assert settle(db, "a", claim.claim, "failed", evidence=Evidence("E", "a\x00b", "\udcff lone \x00"))

    (attempt,) = reading.attempts(db, "a")
    assert attempt.error_message is not None and attempt.error_message.startswith("a")


# A reply that was lost


@pytest.mark.parametrize(
    ("kind", "strict"),
    [
        ("completed", False),
        ("completed", True),
        ("failed", True),
        ("retry", True),
        ("retry", False),
        ("interrupted", True),
        ("interrupted", False),
    ],
)
def test_an_outcome_whose_reply_was_lost_is_recognised(db: Database, kind: str, strict: bool) -> None:
    claim = started(db, "a") if strict else claimed(db, "a")
    fields: dict[str, Any] = {"follow_ups": (new("b"),), "evidence": None if kind == "completed" else EVIDENCE}
    assert settle(db, "a", claim.claim, kind, **fields)
    before = row(db, "a"), reading.attempts(db, "a"), reading.counts(db)

    assert settle(db, "a", claim.claim, kind, **fields)
    assert settle(db, "a", claim.claim, kind, **fields)

    assert (row(db, "a"), reading.attempts(db, "a"), reading.counts(db)) == before


@pytest.mark.parametrize("kind", ["released", "parked", "skipped", "failed"])
def test_an_end_before_the_start_is_recognised_too(db: Database, kind: str) -> None:
    claim = claimed(db, "a")
    assert settle(db, "a", claim.claim, kind, started=False, reason="x")
    before = row(db, "a")

    assert settle(db, "a", claim.claim, kind, started=False, reason="x")
    assert row(db, "a") == before


def test_a_retry_is_recognised_even_when_the_next_run_has_begun(db: Database) -> None:
    claim = claimed(db, "a")
    settle(db, "a", claim.claim, "retry")
    jobs.claim(db, "w2", ["a"], LEASE)

    assert settle(db, "a", claim.claim, "retry")
    assert row(db, "a").owner == "w2"


def test_another_end_of_the_same_run_is_not_mistaken_for_the_one_that_is_written(db: Database) -> None:
    claim = claimed(db, "a")
    settle(db, "a", claim.claim, "retry")

    assert not settle(db, "a", claim.claim, "completed")
    assert not settle(db, "a", claim.claim, "interrupted")


def test_the_end_of_a_lost_run_is_not_recognised(db: Database) -> None:
    # Given runs whose jobs were taken away: one fails for it, one is queued again
    failed, queued = started(db, "a", on_lost="fail"), started(db, "b")
    expire(db, "a", "b")
    watched = [(active.id, active.claim, active.beat) for active in recovery.watch(db)]
    recovery.reap(db, watched, 5)

    # Then nothing that the old owner says is taken for what is written
    for kind in ("completed", "failed", "retry", "interrupted", "released"):
        assert not settle(db, "a", failed.claim, kind)
        assert not settle(db, "b", queued.claim, kind, started=kind != "released") or kind == "released"


def test_someone_elses_outcome_is_not_recognised(db: Database) -> None:
    claim = claimed(db, "a")
    settle(db, "a", claim.claim, "completed")

    assert not settle(db, "a", claim.claim, "completed", owner="w2")


# Beside others


def test_batches_that_name_the_same_jobs_in_any_order_do_not_deadlock(db: Database) -> None:
    # Given writers and reconcilers that lock the same rows, named in opposite orders
    ids = [f"job-{i}" for i in range(40)]
    jobs.record_many(db, [new(id) for id in ids])
    errors: list[BaseException] = []
    began = threading.Barrier(4)

    def work(owner: str, order: list[str]) -> None:
        try:
            began.wait()
            for turn in range(12):
                granted = jobs.claim(db, owner, order, LEASE)
                batch = [
                    Outcome(c.id, c.claim, "completed" if (turn + i) % 9 == 0 else "retry")
                    for i, c in enumerate(granted)
                ]
                outcomes.settle(db, owner, batch)
                recovery.put_back(db, [(id, f"{id}-ref") for id in order])
        except BaseException as e:
            errors.append(e)
        finally:
            db.close_thread()

    threads = [
        threading.Thread(target=work, args=(f"w{i}", list(order)))
        for i, order in enumerate([ids, ids[::-1], ids[20:] + ids[:20], ids[::-1]])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    if db.dialect.name == "postgresql":
        assert db.fetch(_DEADLOCKS) == [(0,)]


def test_the_size_of_a_batch_does_not_matter(db: Database) -> None:
    ids = [f"job-{i:04}" for i in range(1_000)]
    jobs.record_many(db, [new(id) for id in ids])
    granted = jobs.claim(db, "w1", ids, LEASE)

    batch = [Outcome(c.id, c.claim, "completed", follow_ups=(new(f"{c.id}-next"),)) for c in granted]
    assert outcomes.settle(db, "w1", batch) == set(ids)
    assert reading.counts(db) == {"completed": 1_000, "queued": 1_000}


# After the end


@pytest.mark.parametrize(
    ("kind", "was_started"),
    [("completed", True), ("failed", True), ("failed", False), ("skipped", False), ("interrupted", True)],
)
def test_a_finished_job_is_out_of_reach_even_for_the_token_that_finished_it(
    db: Database, kind: str, was_started: bool
) -> None:
    # Given a job that its owner has finished
    claim = claimed(db, "a")
    if kind == "interrupted":
        change(db, "UPDATE {jobs} SET interruptions = 2")
    assert settle(db, "a", claim.claim, kind, started=was_started)
    before = row(db, "a")
    assert before.finished_at is not None

    # When that owner goes on as if it were not
    token = claim.claim
    assert jobs.start(db, "w1", [("a", token, "rerun", 0)], LEASE) == {}
    assert jobs.renew(db, "w1", [("a", token, True)], LEASE) == (frozenset(), ())
    assert jobs.release(db, "w1", [("a", token)], "x") == set()
    assert jobs.claim(db, "w1", ["a"], LEASE, again=True) == []
    for other in {"completed", "failed", "retry", "interrupted", "released", "parked", "skipped"} - {kind}:
        assert not settle(db, "a", token, other, started=other not in ("released", "parked", "skipped"))
    assert jobs.record(db, new("b"), under=Token("a", "w1", token)) == "stale"
    assert recovery.put_back(db, [("a", "a-ref")]) == set()
    assert recovery.unpublish(db, [("a", "a-ref")], 0) == 0
    assert recovery.reap(db, [("a", before.claim, before.beat)], 3) == (0, 0, 0)

    # Then nothing has changed
    assert row(db, "a") == before
