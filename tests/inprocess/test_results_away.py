"""A results backend that hangs holds up neither acknowledgements nor recovery."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import dramatiq
from dramatiq.results.backends import StubBackend

from dramatiq_durable.runtime.capture import catch_results
from dramatiq_durable.store import jobs, outcomes
from dramatiq_durable.store.dialects import Statement
from dramatiq_durable.store.types import NewJob
from tests.inprocess.conftest import Bench

_AGE = Statement("age results", "UPDATE {results} SET created_at = created_at - CAST(? AS BIGINT)")


class Hangs(StubBackend):
    """Does not answer until its time is over, and then fails; works when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.patience = 0.7
        self.works = threading.Event()
        self.asked = 0

    def _store(self, message_key: str, result: Any, ttl: int) -> None:
        self.asked += 1
        if not self.works.wait(self.patience):
            raise ConnectionError("the results backend does not answer")
        super()._store(message_key, result, ttl)


def hanging(b: Bench) -> Hangs:
    backend = Hangs()
    results = next(m for m in b.broker.middleware if type(m).__name__ == "Results")
    results.backend = backend
    catch_results(backend)
    return backend


def test_acknowledgements_do_not_queue_behind_results(bench: Callable[..., Bench]) -> None:
    """Ten results that hang for 0.7 s each do not make the tenth acknowledgement wait for seven seconds."""
    b = bench()
    backend = hanging(b)

    @dramatiq.actor(broker=b.broker, store_results=True)
    def job(number: int) -> int:
        return number

    sent = [job.send(number) for number in range(10)]
    b.work(threads=4)
    began = time.monotonic()
    b.join()
    assert time.monotonic() - began < 4
    # And the results are not lost.
    backend.works.set()
    b.db.execute(_AGE, (10_000,))
    assert [message.get_result(backend=backend, block=True, timeout=15_000) for message in sent] == list(range(10))


def test_lost_jobs_are_taken_up_while_the_results_backend_hangs(bench: Callable[..., Bench]) -> None:
    b = bench(lease=900, heartbeat_interval=200)
    backend = hanging(b)
    runs: list[str] = []

    @dramatiq.actor(broker=b.broker, store_results=True)
    def job() -> int:
        return 1

    @dramatiq.actor(broker=b.broker)
    def lost() -> None:
        runs.append("lost")

    message = job.send()
    b.work()
    b.join()
    # Given a result that the reconciler is trying to store, in vain
    asked, backend.patience = backend.asked, 30.0
    b.db.execute(_AGE, (10_000,))
    deadline = time.monotonic() + 10
    while backend.asked == asked:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # When a worker dies with a job
    orphan = lost.message()
    row = NewJob(orphan.message_id, "default", "lost", "lost", orphan.encode(), broker_ref="gone")
    jobs.record(b.db, row)
    jobs.claim(b.db, "dead", [orphan.message_id], 900)
    # Then it runs here
    deadline = time.monotonic() + 10
    while not runs:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    backend.works.set()
    assert message.get_result(backend=backend, block=True, timeout=10_000) == 1


def test_a_result_that_nobody_may_want_any_more_is_not_tried_for_ever(bench: Callable[..., Bench]) -> None:
    """What the backend would have forgotten by now does not stand in the way of what it should still get."""
    b = bench()

    @dramatiq.actor(broker=b.broker, store_results=True, result_ttl=60_000)
    def job() -> int:
        return 1

    hanging(b).patience = 0
    job.send()
    b.work()
    b.join()
    b.db.execute(_AGE, (10_000,))
    assert len(outcomes.pending_results(b.db, 0, 10)) == 1
    b.db.execute(_AGE, (60_000 + outcomes.LATE,))
    assert outcomes.pending_results(b.db, 0, 10) == []
