"""When a job is handed to the broker, and in which queue it stays."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import dramatiq
from dramatiq.common import current_millis
from dramatiq.middleware import CurrentMessage

from tests.inprocess.conftest import Bench


def test_a_time_that_lies_ahead_is_kept(bench: Callable[..., Bench]) -> None:
    """A message may name its time itself (``eta``), as Dramatiq's consumers understand it; also a stranger's."""
    b = bench()
    runs: dict[str, int] = {}

    @dramatiq.actor(broker=b.broker)
    def job(name: str) -> None:
        runs[name] = current_millis()

    due = current_millis() + 1_500
    ours = job.message_with_options(args=("ours",), eta=due)
    b.broker.enqueue(ours)
    stranger = job.message_with_options(args=("stranger",), eta=due)
    b.broker.queues["default"].put(json.dumps(stranger.asdict()).encode())
    b.broker.enqueue(job.message_with_options(args=("past",), eta=due - 60_000))
    b.work()
    wait(lambda: set(runs) == {"past"})
    wait(lambda: b.job(stranger).state == "scheduled")
    assert b.job(ours).state == "scheduled"
    b.join()
    assert runs["ours"] >= due - 5
    assert runs["stranger"] >= due - 5


def test_a_job_that_asks_to_run_again_stays_in_its_queue(bench: Callable[..., Bench]) -> None:
    """A worker that listens to this queue alone would have no consumer to answer another one with."""
    b = bench()
    b.broker.declare_queue("other")
    runs: list[int] = []

    @dramatiq.actor(broker=b.broker)
    def job(number: int) -> None:
        runs.append(number)
        if number == 1:
            message = CurrentMessage.get_current_message()
            assert message is not None
            b.broker.enqueue(message.copy(queue_name="other", args=(2,)))

    sent = job.send(1)
    worker = dramatiq.Worker(b.broker, queues={"default"}, worker_timeout=50, worker_threads=1)
    worker.start()
    b.workers.append(worker)
    b.join()
    assert runs == [1, 2]
    assert (b.job(sent).state, b.job(sent).queue) == ("completed", "default")


def test_a_payload_that_cannot_be_read_does_not_hang_a_test(bench: Callable[..., Bench]) -> None:
    """``join`` on a StubBroker waits for every message; this one is kept aside, and done with."""
    b = bench()

    @dramatiq.actor(broker=b.broker)
    def job() -> None: ...

    b.broker.queues["default"].put(b"junk")
    job.send()
    b.work(threads=1)
    b.join(timeout=5_000)
    assert b.engine.counters.undecodable == 1


def wait(condition: Callable[[], bool], timeout: float = 10) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_job_that_runs_itself_again_sends_anew(bench: Callable[..., Bench]) -> None:
    """A periodic job: each of its rounds sends, and what a retry of a round sends again is sent once."""
    b = bench()
    runs: list[str] = []

    @dramatiq.actor(broker=b.broker, max_retries=3, min_backoff=10, max_backoff=20)
    def periodic() -> None:
        runs.append("run")
        child.send(len(runs))
        if len(runs) in (2, 4):
            raise ValueError("the second try of a round")
        if len(runs) < 5:
            message = CurrentMessage.get_current_message()
            assert message is not None
            b.broker.enqueue(message, delay=20)

    children: list[int] = []

    @dramatiq.actor(broker=b.broker)
    def child(number: int) -> None:
        children.append(number)

    b.broker.enqueue(periodic.message())
    b.work(threads=1)
    b.join()
    # Rounds: run 1; run 2, which fails, and 3; run 4, which fails, and 5.
    assert runs == ["run"] * 5
    assert children == [1, 2, 4]


def test_a_delay_is_kept_by_whoever_kept_the_brokers_own_enqueue(bench: Callable[..., Bench]) -> None:
    """A reference from before the installation goes past our enqueue, and through Dramatiq's delay queue."""
    b = bench()
    runs: list[int] = []

    @dramatiq.actor(broker=b.broker)
    def job() -> None:
        runs.append(current_millis())

    due = current_millis() + 1_500
    message = b.engine.sender.plain(job.message(), delay=1_500)
    b.work()
    wait(lambda: b.broker.queues["default.DQ"].unfinished_tasks == 0)
    assert b.job(message).state == "scheduled"
    b.join()
    assert len(runs) == 1
    assert runs[0] >= due - 5
