"""Hazards of Dramatiq that show in one process; each test names the one that it is about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Middleware, TimeLimit

import dramatiq_durable as durable
from dramatiq_durable import crashpoints
from dramatiq_durable.middleware.capture import CaptureOutcome
from dramatiq_durable.runtime.messages import MARK
from dramatiq_durable.store import jobs, reading
from dramatiq_durable.store.dialects import Statement
from tests.inprocess.conftest import Bench
from tests.servers import wait_until


def test_a_start_that_is_refused_is_no_failure_of_the_actor(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H3: an error in a before-hook would count as a failed attempt; ours costs none."""
    # Given a job whose start the database refuses twice
    monkeypatch.setattr(jobs, "start", jobs.start)
    crashpoints.arm("start", "before", "refuse", times=2)
    b = bench()
    runs: list[int] = []

    @dramatiq.actor(broker=b.broker, on_lost="hold", max_retries=0)
    def careful() -> None:
        runs.append(1)

    message = careful.send()
    # When it runs in the end
    b.work()
    b.join()
    # Then nothing was charged
    row = b.job(message)
    assert (row.state, row.attempt, row.retries) == ("completed", 1, 0)
    assert runs == [1]


def test_the_two_ends_of_the_record_are_the_first_and_the_last_middleware(bench: Callable[..., Bench]) -> None:
    """H5, H12: after-hooks run in reverse, and one middleware cannot be both the first and the last to act."""
    b = bench()
    assert isinstance(b.broker.middleware[0], durable.DurableRecord)
    assert isinstance(b.broker.middleware[-1], CaptureOutcome)


def test_actors_that_were_declared_before_the_installation_are_recorded_too(database_url: str) -> None:
    """H14: only their options had to be known when they were declared."""
    broker = StubBroker()

    @dramatiq.actor(broker=broker)
    def early() -> None: ...

    with pytest.raises(ValueError, match="on_lost"):
        dramatiq.actor(broker=broker, on_lost="hold", actor_name="refused")(lambda: None)
    b = Bench(database_url, broker=broker)
    try:
        message = early.send()
        b.work()
        b.join()
        assert b.job(message).state == "completed"
    finally:
        b.close()


def test_a_job_keeps_its_id_through_all_its_copies(bench: Callable[..., Bench]) -> None:
    """H16, H19, H38: one row whatever is published for it, and nothing ever waits in a delay queue."""
    seen: list[tuple[str, str]] = []

    class Watches(Middleware):
        def before_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
            seen.append((message.message_id, message.queue_name))

    b = bench(Watches())

    @dramatiq.actor(broker=b.broker, max_retries=2, min_backoff=20, max_backoff=40)
    def third_time() -> None:
        if dramatiq.middleware.CurrentMessage.get_current_message().options.get("retries", 0) < 2:
            raise ValueError("not yet")

    message = third_time.send_with_options(delay=100)
    b.work()
    b.join()
    row = b.job(message)
    assert (row.state, row.attempt, row.publishes, row.queue) == ("completed", 3, 3, "default")
    assert reading.counts(b.db) == {"completed": 1}
    assert {id for id, _ in seen} == {message.message_id}
    assert {queue for _, queue in seen} == {"default"}
    assert b.broker.queues["default.DQ"].empty()


def test_a_producer_that_is_slow_after_publishing_does_not_move_a_job_backwards(bench: Callable[..., Bench]) -> None:
    """B23, H22: the job may be finished before the sender's after-hook runs; the row stays completed."""
    states: list[str] = []

    class Slow(Middleware):
        bench: Bench

        def after_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
            wait_until(lambda: self.bench.job(message).state == "completed", what="the worker is faster")
            states.append(self.bench.job(message).state)

    slow = Slow()
    b = slow.bench = bench(slow)

    @dramatiq.actor(broker=b.broker)
    def quick() -> None: ...

    b.work()
    message = quick.send()
    assert states == ["completed"]
    assert b.job(message).state == "completed"


def test_options_that_a_hook_writes_ride_along_and_carry_no_token(bench: Callable[..., Bench]) -> None:
    """H56: what belongs to the claim is on the row; a retry carries what a hook wrote, as it does without us."""
    carried: list[dict[str, Any]] = []

    class Writes(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            carried.append(dict(message.options))
            message.options["written"] = message.options.get("written", 0) + 1

    b = bench(Writes())

    @dramatiq.actor(broker=b.broker, max_retries=1, min_backoff=10, max_backoff=20)
    def fails_once() -> None:
        if dramatiq.middleware.CurrentMessage.get_current_message().options["written"] == 1:
            raise ValueError("once")

    fails_once.send()
    b.work()
    b.join()
    assert [options.get("written") for options in carried] == [None, 1]
    assert [options[MARK] for options in carried] == [1, 2]
    for options in carried:
        assert not {"owner", "claim", "lease", "traceback"} & options.keys()


def test_no_piece_lives_in_a_fork() -> None:
    """H58, H59: a fork may not be started, and nobody watches it; everything runs on threads of the worker."""
    assert durable.DurableRecord().forks == durable.Reconciler().forks == CaptureOutcome().forks == []


def test_every_process_start_is_another_owner(bench: Callable[..., Bench]) -> None:
    """B37: a restarted process is not taken for the one that died, whatever its host is called."""
    first, second = bench(), bench()
    assert first.engine.owner != second.engine.owner


def test_a_batch_of_the_same_priority_and_another_all_run(bench: Callable[..., Bench]) -> None:
    """B6: nothing here relies on the order in which messages are taken."""
    b = bench()
    runs: list[str] = []

    @dramatiq.actor(broker=b.broker, priority=0)
    def urgent(n: int) -> None:
        runs.append("urgent")

    @dramatiq.actor(broker=b.broker, priority=100)
    def patient(n: int) -> None:
        runs.append("patient")

    for n in range(20):
        patient.send(n)
        urgent.send(n)
    b.work()
    b.join()
    assert (runs.count("urgent"), runs.count("patient")) == (20, 20)


def test_interrupts_that_land_anywhere_leave_no_half_open_transaction(database_url: str) -> None:
    """H48: a time limit fires while jobs send; connection and thread are sane after, and no child is half there."""
    broker = StubBroker(middleware=[TimeLimit(time_limit=30, interval=5), dramatiq.middleware.Retries()])
    b = Bench(database_url, broker=broker)
    try:
        broker.emit_after("process_boot")

        @dramatiq.actor(broker=broker, max_retries=0)
        def child(n: int) -> None: ...

        @dramatiq.actor(broker=broker, max_retries=0)
        def sends_until_interrupted() -> None:
            for n in range(100_000):
                child.send(n)

        parents = [sends_until_interrupted.send() for _ in range(12)]
        b.work(threads=3)
        b.join(60_000)
        # Every parent was interrupted, and failed as what it is
        assert {b.job(parent).state for parent in parents} == {"failed"}
        kinds = {a.error_type for parent in parents for a in reading.attempts(b.db, parent.message_id)}
        assert kinds == {"dramatiq.middleware.time_limit.TimeLimitExceeded"}
        # And every child that has a row has run: nothing is left in a transaction that nobody ended
        counts = reading.counts(b.db)
        assert set(counts) == {"completed", "failed"} and counts["failed"] == 12
        after = child.send(-1)
        b.join()
        assert b.job(after).state == "completed"
    finally:
        b.close()


def test_a_heartbeat_is_one_statement_whatever_a_process_holds(bench: Callable[..., Bench]) -> None:
    """Speed of step 1: the number of jobs costs no statement."""
    b = bench(heartbeat_interval=1_000, lease=30_000)
    release: list[bool] = []

    @dramatiq.actor(broker=b.broker)
    def held() -> None:
        while not release:
            time.sleep(0.01)

    for _ in range(8):
        held.send()
    b.work(threads=8)
    wait_until(lambda: len(b.engine.registry.runs()) == 8, what="eight jobs are held")
    statements: list[str] = []
    fetch = b.db.fetch

    def counting(statement: Statement, params: Any = ()) -> Any:
        statements.append(statement.name)
        return fetch(statement, params)

    b.engine.heartbeat._db = _Counting(b.db, counting)
    b.engine.heartbeat.beat()
    b.engine.heartbeat._db = b.db
    assert statements == ["renew leases"]
    release.append(True)
    b.join()


class _Counting:
    """A database whose statements are counted; everything else is the real one's."""

    def __init__(self, db: Any, fetch: Callable[..., Any]) -> None:
        self._db = db
        self.fetch = fetch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)
