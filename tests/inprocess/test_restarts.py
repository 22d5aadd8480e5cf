"""Workers that start and stop, in an orderly way or not, in a process that goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.worker import ConsumerThread, _WorkerMiddleware

from dramatiq_durable.store import reading
from dramatiq_durable.store.urls import POOL_WAIT
from tests.inprocess.conftest import Bench
from tests.servers import wait_until

postgresql_only = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


def own_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("durable-") and t.name != "durable-look")


def test_one_broker_serves_several_workers_one_after_the_other(bench: Callable[..., Bench]) -> None:
    """Starts and stops in one process: nothing accumulates, and every worker works."""
    b = bench()
    runs: list[int] = []

    @dramatiq.actor(broker=b.broker)
    def note(value: int) -> None:
        runs.append(value)

    for i in range(3):
        # When a worker is started, works, and is stopped; a job is sent while there is none
        worker = b.work()
        assert len(own_threads()) == len(set(own_threads()))
        note.send(10 * i)
        note.send_with_options(args=(10 * i + 1,), delay=50)
        b.join()
        worker.stop(5_000)
        # Then none of its threads is left, nor anything in the broker
        assert own_threads() == []
        assert not [m for m in b.broker.middleware if isinstance(m, _WorkerMiddleware)]
        note.send(10 * i + 2)
    b.work()
    b.join()
    assert sorted(runs) == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert reading.counts(b.db) == {"completed": 9}


def test_a_queue_that_is_declared_after_a_restart_is_consumed_by_the_worker_that_lives(
    bench: Callable[..., Bench],
) -> None:
    """A stopped worker that got a consumer for it would hold its jobs for ever."""
    b = bench()
    b.work().stop(5_000)
    runs: list[str] = []

    @dramatiq.actor(broker=b.broker, queue_name="between")
    def between() -> None:
        runs.append("between")

    between.send()
    b.work()

    @dramatiq.actor(broker=b.broker, queue_name="late")
    def late() -> None:
        runs.append("late")

    late.send()
    for queue in ("between", "late"):
        b.broker.join(queue, timeout=20_000)
    assert sorted(runs) == ["between", "late"]


class Blocked:
    """A worker with one thread that is busy, and a job that waits behind it in the worker's memory."""

    def __init__(self, b: Bench) -> None:
        self.go = threading.Event()
        self.runs: list[str] = []
        self.bench = b

        @dramatiq.actor(broker=b.broker)
        def busy() -> None:
            self.runs.append("busy")
            self.go.wait(30)

        @dramatiq.actor(broker=b.broker)
        def waiting() -> None:
            self.runs.append("waiting")

        self.worker = b.work(threads=1)
        self.busy = busy.send()
        wait_until(lambda: self.runs, what="the thread is busy")
        self.waiting = waiting.send()
        wait_until(lambda: b.job(self.waiting).state == "active", what="the other is claimed")

    def stop(self) -> None:
        threading.Timer(0.2, self.go.set).start()
        self.worker.stop(5_000)


def raise_on_requeue(monkeypatch: pytest.MonkeyPatch) -> None:
    """H41: what redis-py raises is none of Dramatiq's errors: ``Worker.stop`` breaks off, its last hook is not run."""

    def requeue_messages(self: ConsumerThread, messages: Any) -> None:
        raise redis.exceptions.TimeoutError("Timeout reading from socket")

    monkeypatch.setattr(ConsumerThread, "requeue_messages", requeue_messages)


def test_after_a_stop_that_raised_a_second_worker_finishes_the_jobs(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H41: nothing relies on ``after_worker_shutdown``; no thread is there twice, and nobody is told to hurry."""
    blocked = Blocked(b := bench())
    # Given a stop that breaks off, while a job waits in memory
    with monkeypatch.context() as patch:
        raise_on_requeue(patch)
        with pytest.raises(redis.exceptions.TimeoutError):
            blocked.stop()
    # When another worker is started in the same process
    b.work()
    # Then there is one thread of each kind, and both jobs end, each after one run
    assert own_threads() == ["durable-courier", "durable-heartbeat", "durable-reconciler", "durable-scheduler"] + [
        "durable-writer"
    ]
    wait_until(lambda: reading.counts(b.db) == {"completed": 2}, 30, "both are completed")
    assert blocked.runs == ["busy", "waiting"]


def test_after_a_stop_that_raised_the_leases_of_waiting_jobs_run_out(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H41: the process lives on, and would renew for ever what nobody in it works on."""
    blocked = Blocked(b := bench())
    with monkeypatch.context() as patch:
        raise_on_requeue(patch)
        with pytest.raises(redis.exceptions.TimeoutError):
            blocked.stop()
    # Then another process takes the job over
    bench().work()
    wait_until(lambda: b.job(blocked.waiting).lost_claims == 1, 20, "the waiting job is free")
    row = b.job(blocked.waiting)
    assert (row.attempt, row.lost) == (0, 0)


def test_a_job_that_outlives_the_stop_of_its_worker_is_interrupted_and_writes_nothing(
    bench: Callable[..., Bench],
) -> None:
    """H42: a worker that is stopped with a timeout abandons what still runs.  Its lease ends, so it must end too."""
    b = bench()
    events: list[str] = []
    begun = threading.Event()

    @dramatiq.actor(broker=b.broker, max_retries=0)
    def stubborn() -> None:
        events.append("began")
        begun.set()
        try:
            for _ in range(1_000):
                threading.Event().wait(0.02)
        except BaseException as e:
            events.append(type(e).__name__)
            raise
        events.append("ended")

    message = stubborn.send()
    worker = b.work()
    assert begun.wait(10)
    worker.stop(200)
    wait_until(lambda: len(events) == 2, 10, "the job is interrupted")
    assert events == ["began", "LeaseLost"]
    assert b.job(message).state == "active"


@postgresql_only
def test_claims_wait_for_a_connection_instead_of_letting_work_through(bench: Callable[..., Bench]) -> None:
    """B46: with the pool exhausted for longer than it waits, no job starts; when it is free, each runs once."""
    b = bench(pool_size=2, lease=30_000, heartbeat_interval=10_000)
    runs: list[int] = []

    @dramatiq.actor(broker=b.broker)
    def note(value: int) -> None:
        runs.append(value)

    release, taken = threading.Event(), threading.Barrier(3)

    def hold() -> None:
        with b.db.transaction():
            taken.wait()
            release.wait(30)

    # Given a worker that is up, and a pool whose connections are all busy
    b.work()
    wait_until(lambda: reading.workers(b.db, 60_000), what="the worker is up")
    holders = [threading.Thread(target=hold) for _ in range(2)]
    for holder in holders:
        holder.start()
    taken.wait()
    # When messages arrive, and the pool stays busy for longer than a claim waits
    for i in range(3):
        b.broker.queues["default"].put(note.message(i).encode())
    release.wait(POOL_WAIT + 1)
    # Then nothing has run
    assert runs == []
    # And when it is free, each runs once
    release.set()
    for holder in holders:
        holder.join()
    wait_until(lambda: reading.counts(b.db) == {"completed": 3}, 20, "all are completed")
    assert sorted(runs) == [0, 1, 2]
