"""A job is a row before it is anything else."""

from __future__ import annotations

import threading

import pytest

from dramatiq_durable.errors import StoreError
from dramatiq_durable.store import jobs, outcomes, reading
from dramatiq_durable.store.database import Database
from dramatiq_durable.store.types import Outcome, Token
from tests.store.rows import LEASE, claimed, new, row


def test_a_job_whose_caller_publishes_it_is_queued_and_not_due(db: Database) -> None:
    before = reading.now(db)
    assert jobs.record(db, new("a", broker_ref="ref-1", parent_id="p", origin="child")) == "recorded"

    job = row(db, "a")
    assert (job.state, job.broker_ref, job.publishes, job.publish_at) == ("queued", "ref-1", 1, None)
    assert (job.parent_id, job.origin, job.revision, job.claim, job.attempt) == ("p", "child", 1, 0, 0)
    assert job.published_at is not None and before <= job.created_at <= job.published_at <= reading.now(db)


def test_a_job_that_nobody_publishes_is_due_at_once(db: Database) -> None:
    jobs.record(db, new("a", broker_ref=None))

    job = row(db, "a")
    assert (job.state, job.broker_ref, job.publishes, job.published_at) == ("queued", None, 0, None)
    assert job.publish_at == job.created_at


@pytest.mark.parametrize("when", [{"delay": 60_000}, {"due_at": 4_000_000_000_000}])
def test_a_delay_that_lies_ahead_makes_a_scheduled_job_even_if_its_caller_publishes(
    db: Database, when: dict[str, int]
) -> None:
    jobs.record(db, new("a", **when))

    job = row(db, "a")
    assert (job.state, job.broker_ref, job.published_at, job.publishes) == ("scheduled", None, None, 0)
    assert job.publish_at == when.get("due_at", job.created_at + 60_000)


@pytest.mark.parametrize("when", [{"delay": 0}, {"due_at": 1_000}, {"delay": 60_000, "due_at": 1_000}])
def test_a_due_time_that_has_passed_delays_nothing(db: Database, when: dict[str, int]) -> None:
    jobs.record(db, new("a", **when))

    assert (row(db, "a").state, row(db, "a").publish_at) == ("queued", None)


def test_a_parked_job_is_never_published(db: Database) -> None:
    jobs.record(db, new("a", parked="no_row", delay=5))

    job = row(db, "a")
    assert (job.state, job.reason, job.publish_at, job.published_at, job.publishes) == (
        "parked",
        "no_row",
        None,
        None,
        0,
    )


def test_an_id_is_recorded_once_and_the_first_row_stands(db: Database, other: Database) -> None:
    assert jobs.record(db, new("a", payload=b"first")) == "recorded"
    assert jobs.record(other, new("a", payload=b"second")) == "exists"

    assert jobs.load(db, ["a"])["a"].payload == b"first"


def test_of_many_that_record_the_same_id_at_once_one_does(db: Database) -> None:
    answers: list[str] = []
    ready = threading.Barrier(8)

    def send() -> None:
        ready.wait()
        answers.extend(jobs.record(db, new(f"job-{i}")) for i in range(10))
        db.close_thread()

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(answers) == ["exists"] * 70 + ["recorded"] * 10


def test_payloads_come_back_byte_for_byte(db: Database) -> None:
    payload = bytes(range(256)) * 4
    jobs.record(db, new("a", payload=payload))

    (loaded,) = jobs.load(db, ["a", "missing"]).values()
    assert (bytes(loaded.payload), loaded.options, loaded.revision, loaded.retries) == (payload, None, 1, 0)


def test_strange_names_come_back_as_they_went_in(db: Database) -> None:
    id = "ünï-%s-?-'\"-{now}-\n"
    jobs.record(db, new(id, actor="a%sb?", queue="{jobs}"))

    assert (row(db, id).actor, row(db, id).queue) == ("a%sb?", "{jobs}")
    assert [claim.id for claim in jobs.claim(db, "w%1", [id], LEASE)] == [id]
    assert jobs.locate(db, [id])[id] == (id, "active", "w%1", 1)


def test_recording_many_returns_those_that_are_new(db: Database) -> None:
    jobs.record(db, new("b"))
    many = [new(f"job-{i}") for i in range(1_201)]

    assert jobs.record_many(db, [new("a"), new("b"), new("a", delay=5), *many]) == {"a", *(job.id for job in many)}
    assert jobs.record_many(db, []) == set()
    assert reading.counts(db) == {"queued": 1_203}


def test_of_many_that_are_recorded_all_are_or_none(db: Database) -> None:
    # Given one row that no database takes
    broken = new("b", delay=2**80)

    with pytest.raises(StoreError, match="record"):
        jobs.record_many(db, [new("a"), broken, new("c")])

    assert reading.counts(db) == {}


# Sent by a running job


def test_a_running_job_records_children(db: Database) -> None:
    claim = claimed(db, "parent")

    assert jobs.record(db, new("child"), under=Token("parent", "w1", claim.claim)) == "recorded"
    assert jobs.record(db, new("child"), under=Token("parent", "w1", claim.claim)) == "exists"


@pytest.mark.parametrize("token", [Token("parent", "w2", 1), Token("parent", "w1", 2), Token("nobody", "w1", 1)])
def test_a_run_without_the_claim_records_nothing(db: Database, token: Token) -> None:
    claimed(db, "parent")

    assert jobs.record(db, new("child"), under=token) == "stale"
    assert reading.get_job(db, "child") is None


def test_a_run_that_has_ended_records_nothing_not_even_what_exists(db: Database) -> None:
    claim = claimed(db, "parent")
    jobs.record(db, new("child"))
    outcomes.settle(db, "w1", [Outcome("parent", claim.claim, "completed")])

    assert jobs.record(db, new("child"), under=Token("parent", "w1", claim.claim)) == "stale"
    assert jobs.record(db, new("another"), under=Token("parent", "w1", claim.claim)) == "stale"
    assert reading.counts(db) == {"completed": 1, "queued": 1}
