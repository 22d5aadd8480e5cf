"""What happens while a job waits for its turn or for its start, and to a job that hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import Middleware, TimeLimit, TimeLimitExceeded

from dramatiq_durable.errors import LeaseLost
from dramatiq_durable.runtime.current import RUN
from dramatiq_durable.store.dialects import Statement
from tests.inprocess.conftest import Bench

_SUSPECT = Statement("make a suspect", "UPDATE {jobs} SET lost = 2, lost_claims = 1 WHERE id = ?")


def watch_time_limits(b: Bench) -> None:
    """Under a plain Worker nobody starts Dramatiq's own watch."""
    limit = next(m for m in b.broker.middleware if isinstance(m, TimeLimit))
    limit.manager.interval = 0.02
    limit.manager.start()


def wait(condition: Callable[[], bool], timeout: float = 10) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_waiting_for_a_suspect_is_not_the_neighbours_time(bench: Callable[..., Bench]) -> None:
    """P7: a job whose workers have died runs alone; those who wait meanwhile are not charged for it."""
    b = bench()
    runs: list[str] = []

    @dramatiq.actor(broker=b.broker, time_limit=20_000)
    def suspect() -> None:
        runs.append("suspect")
        time.sleep(1.2)

    @dramatiq.actor(broker=b.broker, time_limit=300, max_retries=0)
    def neighbour() -> None:
        runs.append("neighbour")

    first = suspect.send()
    b.db.execute(_SUSPECT, (first.message_id,))
    watch_time_limits(b)
    b.work(threads=2)
    wait(lambda: runs == ["suspect"])
    second = neighbour.send()
    b.join()
    row = b.job(second)
    assert (row.state, row.attempt, row.interruptions) == ("completed", 1, 0)
    assert runs == ["suspect", "neighbour"]


def test_waiting_for_the_database_is_not_the_jobs_time(bench: Callable[..., Bench]) -> None:
    """A time limit that is shorter than a strict start takes to be written; it still holds for the actor."""
    b = bench()
    ends: list[str] = []

    @dramatiq.actor(broker=b.broker, time_limit=300, max_retries=0, on_lost="hold")
    def strict(seconds: float) -> None:
        try:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                time.sleep(0.01)
            ends.append("returned")
        except TimeLimitExceeded:
            ends.append("limited")
            raise

    watch_time_limits(b)
    b.work(threads=1)
    # Given a writer that is busy for longer than the limit
    busy = threading.Thread(target=b.engine.writer.call, args=(lambda: time.sleep(1),))
    busy.start()
    short = strict.send(0)
    busy.join()
    b.join()
    long = strict.send(2)
    b.join()
    assert (b.job(short).state, b.job(short).attempt, b.job(short).interruptions) == ("completed", 1, 0)
    assert (b.job(long).state, b.job(long).attempt) == ("failed", 1)
    assert ends == ["returned", "limited"]


def test_an_interrupt_before_the_actor_begins_costs_no_attempt(bench: Callable[..., Bench]) -> None:
    """Wherever it lands: the actor has not run."""

    class Breaks(Middleware):
        interrupts = [TimeLimitExceeded("landed before the actor")]

        def before_process_message(self, broker: Any, message: Any) -> None:
            if self.interrupts:
                raise self.interrupts.pop()

    b = bench(Breaks())

    @dramatiq.actor(broker=b.broker, max_retries=0)
    def job() -> None: ...

    message = job.send()
    b.work()
    b.join()
    row = b.job(message)
    assert (row.state, row.attempt, row.retries, row.interruptions) == ("completed", 1, 0, 1)


def test_a_stop_does_not_wait_for_those_who_wait_for_each_other(bench: Callable[..., Bench]) -> None:
    """A suspect that waits for its neighbours does not begin while the worker stops: its claim is given back."""
    b = bench()
    runs: list[str] = []
    go_on = threading.Event()

    @dramatiq.actor(broker=b.broker)
    def neighbour() -> None:
        runs.append("neighbour")
        go_on.wait(20)

    @dramatiq.actor(broker=b.broker)
    def suspect() -> None:
        runs.append("suspect")

    neighbour.send()
    worker = b.work(threads=2)
    wait(lambda: runs == ["neighbour"])
    message = suspect.send_with_options(delay=300)
    b.db.execute(_SUSPECT, (message.message_id,))
    wait(lambda: b.engine.registry.get(message.message_id) is not None)
    stopper = threading.Thread(target=worker.stop)
    stopper.start()
    wait(lambda: b.job(message).state == "queued", timeout=3)
    go_on.set()
    stopper.join(10)
    b.workers.clear()
    row = b.job(message)
    assert (row.state, row.attempt, row.lost_claims, runs) == ("queued", 0, 1, ["neighbour"])


def test_a_job_that_hangs_is_interrupted_when_it_is_taken_over(bench: Callable[..., Bench]) -> None:
    """P3: past its max_runtime the lease is not renewed; the run that was overtaken ends, and the next one counts."""
    b = bench(lease=900, heartbeat_interval=200)
    ends: list[str] = []

    @dramatiq.actor(broker=b.broker, max_runtime=400)
    def hangs() -> None:
        if RUN.get().attempt or ends:  # type: ignore[union-attr]
            ends.append("returned")
            return
        try:
            while True:
                time.sleep(0.01)
        except LeaseLost:
            ends.append("lost")
            raise

    message = hangs.send()
    b.work(threads=2)
    wait(lambda: "lost" in ends, timeout=15)
    b.join()
    row = b.job(message)
    assert (row.state, row.lost) == ("completed", 1)
    assert set(ends) == {"lost", "returned"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_the_child_of_a_fork_inside_an_actor_runs_no_job(bench: Callable[..., Bench]) -> None:
    """What it sends is nobody's child: it has no claim of its own."""
    b = bench()
    codes: list[int] = []

    @dramatiq.actor(broker=b.broker)
    def forks() -> None:
        child = os.fork()
        if not child:
            os._exit(0 if RUN.get() is None else 1)
        codes.append(os.waitpid(child, 0)[1])

    forks.send()
    b.work(threads=1)
    b.join()
    assert codes == [0]
