"""Unit tests as users write them: a StubBroker, a Worker, ``join``, and a database in a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.errors import QueueJoinTimeout
from dramatiq.middleware import CurrentMessage
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend

import dramatiq_durable
from dramatiq_durable.store import migrate, reading
from dramatiq_durable.store.database import Database, connect


class Bench:
    """What a user's fixtures give to a user's test."""

    def __init__(self, url: str) -> None:
        self.url = url
        db = connect(url)
        migrate.upgrade(db)
        db.close_all()
        self.broker = StubBroker()
        self.results = StubBackend()
        self.broker.add_middleware(Results(backend=self.results))
        self.broker.add_middleware(CurrentMessage())
        self.broker.emit_after("process_boot")
        self.durable = dramatiq_durable.install(self.broker, database_url=url)
        self.worker = dramatiq.Worker(self.broker, worker_timeout=100, worker_threads=4)

    @property
    def db(self) -> Database:
        return self.durable.db

    def actor(self, fn: Any = None, **options: Any) -> Any:
        return dramatiq.actor(fn, broker=self.broker, **options)

    def state(self, message: dramatiq.Message[Any]) -> str:
        row = reading.get_job(self.db, message.message_id)
        assert row is not None
        return row.state


@pytest.fixture
def bench(database_url: str) -> Iterator[Bench]:
    bench = Bench(database_url)
    yield bench
    bench.worker.stop()
    bench.durable.uninstall()
    bench.broker.close()


def test_join_waits_for_jobs(bench: Bench) -> None:
    seen: list[int] = []

    @bench.actor
    def note(i: int) -> None:
        seen.append(i)

    bench.worker.start()
    messages = [note.send(i) for i in range(20)]
    bench.broker.join(note.queue_name, timeout=30_000)
    bench.worker.join()
    assert sorted(seen) == list(range(20))
    assert {bench.state(message) for message in messages} == {"completed"}


def test_join_waits_for_retries_that_the_database_keeps(bench: Bench) -> None:
    attempts: list[float] = []

    @bench.actor(max_retries=3, min_backoff=100, max_backoff=200)
    def flaky() -> None:
        attempts.append(time.monotonic())
        if len(attempts) < 3:
            raise RuntimeError("not yet")

    bench.worker.start()
    message = flaky.send()
    bench.broker.join(flaky.queue_name, timeout=30_000)
    assert len(attempts) == 3
    assert bench.state(message) == "completed"


def test_join_waits_for_delays(bench: Bench) -> None:
    done = threading.Event()

    @bench.actor
    def later() -> None:
        done.set()

    bench.worker.start()
    later.send_with_options(delay=500)
    bench.broker.join(later.queue_name, timeout=30_000)
    assert done.is_set()


def test_join_raises_the_error_of_a_failed_job(bench: Bench) -> None:
    @bench.actor(max_retries=0)
    def breaks() -> None:
        raise ValueError("for the test")

    bench.worker.start()
    message = breaks.send()
    with pytest.raises(ValueError, match="for the test"):
        bench.broker.join(breaks.queue_name, timeout=30_000, fail_fast=True)
    assert bench.state(message) == "failed"


def test_join_raises_after_the_last_retry(bench: Bench) -> None:
    @bench.actor(max_retries=1, min_backoff=50, max_backoff=100)
    def breaks() -> None:
        raise ValueError("again and again")

    bench.worker.start()
    message = breaks.send()
    with pytest.raises(ValueError, match="again and again"):
        bench.broker.join(breaks.queue_name, timeout=30_000, fail_fast=True)
    assert bench.state(message) == "failed"
    assert len(reading.attempts(bench.db, message.message_id)) == 2


def test_join_times_out(bench: Bench) -> None:
    go = threading.Event()

    @bench.actor
    def held() -> None:
        go.wait(30)

    bench.worker.start()
    message = held.send()
    with pytest.raises(QueueJoinTimeout):
        bench.broker.join(held.queue_name, timeout=300)
    go.set()
    bench.broker.join(held.queue_name, timeout=30_000)
    assert bench.state(message) == "completed"


def test_join_times_out_for_a_far_delay(bench: Bench) -> None:
    @bench.actor
    def later() -> None:
        raise AssertionError("too early")

    bench.worker.start()
    message = later.send_with_options(delay=3_600_000)
    with pytest.raises(QueueJoinTimeout):
        bench.broker.join(later.queue_name, timeout=300)
    assert bench.state(message) == "scheduled"


def test_results_are_there_after_join(bench: Bench) -> None:
    @bench.actor(store_results=True)
    def double(x: int) -> int:
        return 2 * x

    bench.worker.start()
    message = double.send(21)
    assert message.get_result(backend=bench.results, block=True, timeout=30_000) == 42
    bench.broker.join(double.queue_name, timeout=30_000)
    assert message.get_result(backend=bench.results) == 42


def test_jobs_that_were_sent_before_the_worker_started_run(bench: Bench) -> None:
    seen: list[int] = []

    @bench.actor
    def note(i: int) -> None:
        seen.append(i)

    for i in range(3):
        note.send(i)
    assert seen == []
    bench.worker.start()
    bench.broker.join(note.queue_name, timeout=30_000)
    assert sorted(seen) == [0, 1, 2]


def test_a_pipeline_runs_through(bench: Bench) -> None:
    @bench.actor(store_results=True)
    def add(x: int, y: int) -> int:
        return x + y

    bench.worker.start()
    pipe = dramatiq.pipeline([add.message(1, 2), add.message(3)], broker=bench.broker).run()
    bench.broker.join(add.queue_name, timeout=30_000)
    assert pipe.messages[-1].get_result(backend=bench.results, block=True, timeout=30_000) == 6


def test_jobs_that_the_broker_lost_run_again(bench: Bench) -> None:
    """``flush_all`` between the tests of a suite: what is in the database is put back, as with any broker."""
    seen: list[int] = []

    @bench.actor
    def note(i: int) -> None:
        seen.append(i)

    bench.durable.uninstall()
    bench.durable = dramatiq_durable.install(
        bench.broker, database_url=bench.url, reconcile_interval=300, publish_grace=100
    )
    message = note.send(1)
    bench.broker.flush_all()
    bench.worker.start()
    bench.broker.join(note.queue_name, timeout=30_000)
    assert seen == [1]
    assert bench.state(message) == "completed"


def test_calling_an_actor_directly_records_nothing(bench: Bench) -> None:
    """H15: that is a function call."""

    @bench.actor
    def double(x: int) -> int:
        return 2 * x

    assert double(21) == 42
    assert reading.counts(bench.db) == {}


def test_a_job_can_be_processed_by_hand(bench: Bench) -> None:
    """Test suites without threads call the function of the message that was sent."""

    @bench.actor
    def note(i: int) -> int:
        return i

    message = note.send(7)
    assert note.fn(*message.args, **message.kwargs) == 7
    assert bench.state(message) == "queued"


def test_after_uninstall_the_broker_is_as_it_was(bench: Bench) -> None:
    """DESIGN 6: the wrapping is reversible."""
    seen: list[int] = []

    @bench.actor
    def note(i: int) -> None:
        seen.append(i)

    before = {"enqueue", "consume", "join"} & set(bench.broker.__dict__)
    assert before == {"enqueue", "consume", "join"}
    bench.durable.uninstall()
    assert not {"enqueue", "consume", "join", "durable"} & set(bench.broker.__dict__)
    assert not [m for m in bench.broker.middleware if type(m).__module__.startswith("dramatiq_durable")]
    bench.worker.start()
    note.send(1)
    bench.broker.join(note.queue_name, timeout=30_000)
    bench.worker.join()
    assert seen == [1]
    assert reading.counts(bench.db) == {}
