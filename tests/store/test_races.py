"""Two that want the same row at the same moment: exactly one has it, and the other is told so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dramatiq_durable.store import jobs, outcomes, reading, recovery
from dramatiq_durable.store.database import Database
from dramatiq_durable.store.dialects import Statement
from dramatiq_durable.store.types import Outcome, Token
from tests.servers import wait_until
from tests.store.rows import LEASE, claimed, expire, new, row, started

_BLOCKED = Statement(
    "count statements that wait",
    "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
)
_FORGET = Statement("look anew", "SELECT pg_stat_clear_snapshot()")


class Race:
    """Has one call come in the middle of another's transaction, each over a connection of its own.

    Parameters:
      reverse(bool): Whether the second call is the one that is there first.
    """

    def __init__(self, db: Database, other: Database, reverse: bool) -> None:
        self.db, self.other, self.reverse = db, other, reverse

    def run(self, first: Callable[[Database], Any], second: Callable[[Database], Any]) -> tuple[Any, Any]:
        """Return what the two calls return."""
        early, late = (second, first) if self.reverse else (first, second)
        found: list[Any] = []
        thread = threading.Thread(target=self._call, args=(late, found))
        with self.other.transaction():
            # What it would do in a transaction of its own, it does in this one, which stays open for a while
            self.other.run = lambda work: work()  # type: ignore[method-assign]
            there = early(self.other)
            thread.start()
            self._wait_for(thread)
        del self.other.run
        thread.join(30)
        (came,) = found
        if isinstance(came, BaseException):
            raise came
        return (came, there) if self.reverse else (there, came)

    def _call(self, late: Callable[[Database], Any], found: list[Any]) -> None:
        try:
            found.append(late(self.db))
        except BaseException as e:
            found.append(e)
        finally:
            self.db.close_thread()

    def _wait_for(self, thread: threading.Thread) -> None:
        """Until it waits for the other, or has passed it by."""
        if self.db.dialect.name == "sqlite":
            time.sleep(0.05)
            assert thread.is_alive()
            return

        def waits() -> bool:
            # What a transaction has seen of the activity it sees to its end, unless it is told to forget
            self.other.fetch(_FORGET)
            return self.other.fetch(_BLOCKED) == [(1,)]

        wait_until(lambda: waits() or not thread.is_alive(), 10, "it waits")


@pytest.fixture(params=["first before second", "second before first"])
def race(request: pytest.FixtureRequest, db: Database, other: Database) -> Iterator[Race]:
    yield Race(db, other, request.param == "second before first")


def reap(db: Database, id: str) -> Callable[[Database], int]:
    """Watch a job now, and take it away later."""
    watched = [(found.id, found.claim, found.beat) for found in recovery.watch(db) if found.id == id]
    return lambda db: sum(recovery.reap(db, watched, 3))


def test_an_outcome_and_a_taking_over_exclude_each_other(race: Race) -> None:
    # Given a run that ends at the very moment at which it is presumed dead
    claim = started(race.db, "a")
    expire(race.db, "a")
    ending = Outcome("a", claim.claim, "completed", follow_ups=(new("next"),))

    accepted, reaped = race.run(lambda db: outcomes.settle(db, "w1", [ending]), reap(race.db, "a"))

    # Then the one that was there first has won, and the row tells of nothing else
    assert (accepted, reaped) == ((set(), 1) if race.reverse else ({"a"}, 0))
    job = row(race.db, "a")
    assert (job.state, job.lost) == (("completed", 0) if accepted else ("queued", 1))
    assert (reading.get_job(race.db, "next") is not None) == bool(accepted)
    assert [found.ended for found in reading.attempts(race.db, "a")] == ([] if accepted else ["lost"])


@pytest.mark.parametrize("kind", ["completed", "retry", "failed", "interrupted"])
def test_every_end_and_a_taking_over_exclude_each_other(race: Race, kind: str) -> None:
    claim = started(race.db, "a")
    expire(race.db, "a")
    batch = [Outcome("a", claim.claim, kind), Outcome("b", 1, "completed")]

    accepted, reaped = race.run(lambda db: outcomes.settle(db, "w1", batch), reap(race.db, "a"))

    assert (accepted, reaped) == ((set(), 1) if race.reverse else ({"a"}, 0))
    ended = [found.ended for found in reading.attempts(race.db, "a")]
    assert ended == (["lost"] if race.reverse else [] if kind == "completed" else [kind])


def test_a_heartbeat_and_a_taking_over_exclude_each_other(race: Race) -> None:
    claim = claimed(race.db, "a")
    expire(race.db, "a")

    beat, reaped = race.run(lambda db: jobs.renew(db, "w1", [("a", claim.claim, True)], LEASE), reap(race.db, "a"))

    assert (beat.renewed, reaped) == ((frozenset(), 1) if race.reverse else ({("a", claim.claim)}, 0))
    assert beat.strays == ()
    assert row(race.db, "a").state == ("queued" if race.reverse else "active")


def test_a_start_and_a_taking_over_exclude_each_other(race: Race) -> None:
    claim = claimed(race.db, "a")
    expire(race.db, "a")

    attempts, reaped = race.run(
        lambda db: jobs.start(db, "w1", [("a", claim.claim, "rerun", 0)], LEASE), reap(race.db, "a")
    )

    assert (attempts, reaped) == (({}, 1) if race.reverse else ({"a": 1}, 0))
    assert (row(race.db, "a").attempt, row(race.db, "a").lost_claims) == ((0, 1) if race.reverse else (1, 0))


def test_two_claims_exclude_each_other(race: Race) -> None:
    jobs.record_many(race.db, [new("a"), new("b")])

    first, second = race.run(
        lambda db: jobs.claim(db, "w1", ["b", "a"], LEASE), lambda db: jobs.claim(db, "w2", ["a", "b"], LEASE)
    )

    assert (len(first), len(second)) == ((0, 2) if race.reverse else (2, 0))


def test_two_takings_over_exclude_each_other(race: Race) -> None:
    started(race.db, "a")
    expire(race.db, "a")

    first, second = race.run(reap(race.db, "a"), reap(race.db, "a"))

    assert (first, second) == ((0, 1) if race.reverse else (1, 0))
    assert (row(race.db, "a").lost, len(reading.attempts(race.db, "a"))) == (1, 1)


def test_two_takers_of_what_is_due_exclude_each_other(race: Race) -> None:
    jobs.record_many(race.db, [new("a", broker_ref=None), new("b", broker_ref=None)])

    first, second = race.run(lambda db: recovery.take_due(db, 10), lambda db: recovery.take_due(db, 10))

    assert (len(first), len(second)) == ((0, 2) if race.reverse else (2, 0))
    assert (row(race.db, "a").publishes, row(race.db, "b").publishes) == (1, 1)


def test_a_claim_and_a_putting_back_leave_a_job_that_runs_once(race: Race) -> None:
    jobs.record(race.db, new("a"))

    granted, back = race.run(
        lambda db: jobs.claim(db, "w1", ["a"], LEASE), lambda db: recovery.put_back(db, [("a", "a-ref")])
    )

    # The claim wins in the end, whichever was there first: a job that runs is not published
    assert (len(granted), back) == (1, {"a"} if race.reverse else set())
    assert (row(race.db, "a").state, row(race.db, "a").publish_at) == ("active", None)


def test_a_child_and_the_taking_over_of_its_parent_exclude_each_other(race: Race) -> None:
    claim = started(race.db, "a")
    expire(race.db, "a")

    answer, reaped = race.run(
        lambda db: jobs.record(db, new("child"), under=Token("a", "w1", claim.claim)), reap(race.db, "a")
    )

    # Either the child is recorded while its parent holds the claim, or not at all
    assert answer == ("stale" if race.reverse else "recorded")
    assert reaped or not race.reverse
    assert (reading.get_job(race.db, "child") is not None) == (answer == "recorded")


def test_two_that_record_the_same_job_agree_who_did(race: Race) -> None:
    first, second = race.run(
        lambda db: jobs.record(db, new("a", payload=b"1")), lambda db: jobs.record(db, new("a", payload=b"2"))
    )

    assert (first, second) == (("exists", "recorded") if race.reverse else ("recorded", "exists"))
    assert bytes(jobs.load(race.db, ["a"])["a"].payload) == (b"2" if race.reverse else b"1")


def test_outcomes_and_takings_over_at_the_same_instant_exclude_each_other(db: Database, other: Database) -> None:
    together = threading.Barrier(2)
    won: list[set[str]] = [set(), set()]
    number = 60
    claims = [started(db, f"job-{i:02}") for i in range(number)]
    expire(db, *[claim.id for claim in claims])
    watched = [(found.id, found.claim, found.beat) for found in recovery.watch(db)]

    def end() -> None:
        for claim in claims:
            together.wait(30)
            won[0] |= outcomes.settle(
                db, "w1", [Outcome(claim.id, claim.claim, "failed", follow_ups=(new(f"{claim.id}-n"),))]
            )
        db.close_thread()

    def take() -> None:
        for entry in watched:
            together.wait(30)
            if sum(recovery.reap(other, [entry], 3)):
                won[1].add(entry[0])
        other.close_thread()

    threads = [threading.Thread(target=end), threading.Thread(target=take)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert won[0] | won[1] == {claim.id for claim in claims} and not won[0] & won[1]
    for id in won[0] | won[1]:
        assert row(db, id).state == ("failed" if id in won[0] else "queued")
        assert [found.ended for found in reading.attempts(db, id)] == ["failed" if id in won[0] else "lost"]
        assert (reading.get_job(db, f"{id}-n") is not None) == (id in won[0])


def test_a_heartbeat_does_not_make_an_outcome_fail(db: Database, other: Database) -> None:
    # Given a process that renews while its outcomes are written
    ids = [f"job-{i}" for i in range(60)]
    jobs.record_many(db, [new(id) for id in ids])
    granted = jobs.claim(db, "w1", ids, LEASE)
    held = [(claim.id, claim.claim, True) for claim in granted]
    done = threading.Event()

    def beat() -> None:
        while not done.is_set():
            jobs.renew(other, "w1", held, LEASE)
        other.close_thread()

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        accepted = set()
        for claim in granted:
            kind = "retry" if len(accepted) % 2 else "completed"
            accepted |= outcomes.settle(db, "w1", [Outcome(claim.id, claim.claim, kind)])
    finally:
        done.set()
        heart.join()

    # Then every one is accepted
    assert accepted == set(ids)
