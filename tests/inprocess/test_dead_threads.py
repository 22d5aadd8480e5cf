"""Worker threads that die (H7), and acknowledgements that somebody else's hook prevents."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import Middleware, MiddlewareError, TimeLimitExceeded

from tests.inprocess.conftest import Bench


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_process_without_worker_threads_holds_no_jobs(bench: Callable[..., Bench]) -> None:
    """P2: Dramatiq goes on fetching for threads that are dead; the jobs are left to other processes."""

    class Breaks(Middleware):
        def after_process_message(
            self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
        ) -> None:
            if exception is not None:
                raise TimeLimitExceeded("landed in a hook")

    b = bench(Breaks(), lease=900, heartbeat_interval=200)

    @dramatiq.actor(broker=b.broker, max_retries=0)
    def fatal() -> None:
        time.sleep(0.5)
        raise ValueError

    @dramatiq.actor(broker=b.broker)
    def job() -> None:
        raise AssertionError("nobody is there to run it")

    fatal.send()
    fetched = job.send()
    worker = b.work(threads=1)
    wait(lambda: b.job(fetched).state == "active")
    wait(lambda: not worker.workers[0].is_alive())
    later = job.send()
    wait(lambda: b.job(fetched).state == "queued" and b.job(fetched).lost_claims == 1)
    time.sleep(1)
    assert [b.job(message).state for message in (fetched, later)] == ["queued", "queued"]
    assert b.job(fetched).lost_claims == 1


def test_an_outcome_is_committed_though_its_acknowledgement_is_prevented(bench: Callable[..., Bench]) -> None:
    """P4, P10: ``before_ack`` may stop an acknowledgement; the job has ended all the same."""

    class Prevents(Middleware):
        def before_ack(self, broker: Any, message: Any) -> None:
            raise MiddlewareError("not yet")

    b = bench(Prevents(), heartbeat_interval=200)

    @dramatiq.actor(broker=b.broker)
    def job() -> None: ...

    message = job.send()
    b.work(threads=1)
    wait(lambda: b.job(message).state == "completed")
    wait(lambda: b.engine.registry.runs() == [])
    assert b.broker.queues["default"].unfinished_tasks == 1


def wait(condition: Callable[[], bool], timeout: float = 10) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
