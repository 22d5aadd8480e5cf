"""Two that want the same row at the same moment: exactly one has it, and the other is told so."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dramatiq_durable.store import jobs, outcomes, reading, recovery
from dramatiq_durable.store.database import Database, connect
from dramatiq_durable.store.dialects import Statement
from dramatiq_durable.store.types import Outcome, Token
from tests.servers import wait_until
from tests.store.rows import LEASE, claimed, expire, new, row, started

_BLOCKED = Statement(
    "count statements that wait",
    "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
)
_LOCK = Statement("lock a row", "UPDATE {jobs} SET agent = agent WHERE id = ?")


@pytest.fixture(params=["first before second", "second before first"])
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Race:
    """Has two calls wait for one row, in an order that is known on PostgreSQL, and lets them go."""

    def __init__(self, db: Database, other: Database, url: str, order: str) -> None:
        self.db, self.other, self.url = db, other, url
        self.reverse = order == "second before first"

    def run(self, id: str, first: Callable[[Database], Any], second: Callable[[Database], Any]) -> tuple[Any, Any]:
        answers: list[Any] = [None, None]

        def call(place: int, work: Callable[[Database], Any], db: Database) -> None:
            try:
                answers[place] = work(db)
            except BaseException as e:
                answers[place] = e
            finally:
                db.close_thread()

        threads = [
            threading.Thread(target=call, args=(0, first, self.db)),
            threading.Thread(target=call, args=(1, second, self.other)),
        ]
        with locked(self.url, id):
            for number, thread in enumerate(reversed(threads) if self.reverse else threads, 1):
                thread.start()
                if self.db.dialect.name == "postgresql":
                    wait_until(
                        lambda number=number: self.db.fetch(_BLOCKED)[0][0] == number, 10, "it waits for the row"
                    )  # type: ignore[misc]
        for thread in threads:
            thread.join(30)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers[0], answers[1]


@contextlib.contextmanager
def locked(url: str, id: str) -> Iterator[None]:
    """Keep everybody from *id*, by a connection of its own."""
    third = connect(url)
    with third.transaction():
        third.execute(_LOCK, (id,))
        yield
    third.close_all()


@pytest.fixture
def race(db: Database, other: Database, order: str, record_url: str) -> Race:
    return Race(db, other, record_url, order)


def reap(db: Database, id: str) -> Callable[[Database], int]:
    """Watch a job now, and take it away later."""
    watched = [(found.id, found.claim, found.beat) for found in recovery.watch(db) if found.id == id]
    return lambda db: sum(recovery.reap(db, watched, 3))


def test_an_outcome_and_a_taking_over_exclude_each_other(race: Race) -> None:
    db = race.db
    for turn in range(3):
        # Given a run that ends at the very moment at which it is presumed dead
        id = f"job-{turn}"
        claim = started(db, id)
        expire(db, id)
        ending = Outcome(id, claim.claim, "completed", follow_ups=(new(f"{id}-next"),))

        accepted, reaped = race.run(id, lambda db, o=ending: outcomes.settle(db, "w1", [o]), reap(db, id))  # type: ignore[misc]

        # Then one of the two has won, and the row tells of nothing but that
        assert len(accepted) + reaped == 1
        job = row(db, id)
        assert (job.state, job.lost) == (("completed", 0) if accepted else ("queued", 1))
        assert (reading.get_job(db, f"{id}-next") is not None) == bool(accepted)
        assert [found.ended for found in reading.attempts(db, id)] == ([] if accepted else ["lost"])


@pytest.mark.parametrize("kind", ["retry", "failed", "interrupted"])
def test_any_other_end_and_a_taking_over_exclude_each_other(race: Race, kind: str) -> None:
    claim = started(race.db, "a")
    expire(race.db, "a")

    accepted, reaped = race.run(
        "a",
        lambda db: outcomes.settle(db, "w1", [Outcome("a", claim.claim, kind), Outcome("b", 1, "completed")]),
        reap(race.db, "a"),
    )

    assert len(accepted) + reaped == 1
    assert [found.ended for found in reading.attempts(race.db, "a")] == [kind if accepted else "lost"]


def test_a_heartbeat_and_a_taking_over_exclude_each_other(race: Race) -> None:
    claim = claimed(race.db, "a")
    expire(race.db, "a")

    def renew(db: Database) -> bool:
        return bool(jobs.renew(db, "w1", [("a", claim.claim, True)], LEASE).renewed)

    if race.db.dialect.name == "postgresql":
        # It does not wait for a row that is locked: it passes it over
        with locked(race.url, "a"):
            assert jobs.renew(race.db, "w1", [("a", claim.claim, True)], LEASE) == (frozenset(), ())
        assert renew(race.db) != bool(reap(race.db, "a")(race.other))
        return
    renewed, reaped = race.run("a", renew, reap(race.db, "a"))
    assert renewed != bool(reaped)
    assert row(race.db, "a").state == ("active" if renewed else "queued")


def test_a_start_and_a_taking_over_exclude_each_other(race: Race) -> None:
    claim = claimed(race.db, "a")
    expire(race.db, "a")

    attempts, reaped = race.run(
        "a", lambda db: jobs.start(db, "w1", [("a", claim.claim, "rerun", 0)], LEASE), reap(race.db, "a")
    )

    assert (attempts == {"a": 1}) != bool(reaped)
    assert (row(race.db, "a").attempt, row(race.db, "a").lost_claims) == ((1, 0) if attempts else (0, 1))


def test_two_claims_exclude_each_other(race: Race) -> None:
    jobs.record_many(race.db, [new("a"), new("b")])

    first, second = race.run(
        "a", lambda db: jobs.claim(db, "w1", ["b", "a"], LEASE), lambda db: jobs.claim(db, "w2", ["a", "b"], LEASE)
    )

    assert sorted([len(first), len(second)]) == [0, 2]


def test_two_takings_over_exclude_each_other(race: Race) -> None:
    started(race.db, "a")
    expire(race.db, "a")

    first, second = race.run("a", reap(race.db, "a"), reap(race.db, "a"))

    assert first + second == 1
    assert (row(race.db, "a").lost, len(reading.attempts(race.db, "a"))) == (1, 1)


def test_a_claim_and_a_putting_back_leave_a_job_that_runs_once(race: Race) -> None:
    jobs.record(race.db, new("a"))

    granted, back = race.run(
        "a", lambda db: jobs.claim(db, "w1", ["a"], LEASE), lambda db: recovery.put_back(db, [("a", "a-ref")])
    )

    # The claim always wins in the end: a job that runs is not published
    assert len(granted) == 1
    assert (row(race.db, "a").state, row(race.db, "a").publish_at) == ("active", None)
    assert row(race.db, "a").put_back == len(back)


def test_a_child_and_the_taking_over_of_its_parent_exclude_each_other(race: Race) -> None:
    claim = started(race.db, "a")
    expire(race.db, "a")

    answer, reaped = race.run(
        "a", lambda db: jobs.record(db, new("child"), under=Token("a", "w1", claim.claim)), reap(race.db, "a")
    )

    # Either the child was recorded while its parent held the claim, or not at all
    assert reaped == 1
    assert (reading.get_job(race.db, "child") is not None) == (answer == "recorded")
    assert answer in ("recorded", "stale")
    if race.db.dialect.name == "postgresql":
        assert answer == ("stale" if race.reverse else "recorded")


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
