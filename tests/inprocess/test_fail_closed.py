"""Whatever breaks in our own hooks lets no work through unrecorded (P1, P10, H1, H2)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import Middleware

from dramatiq_durable.errors import DurableError, NotRecorded, WrongOrder
from dramatiq_durable.store import reading
from tests.inprocess.conftest import Bench


class Odd(str):
    """A name with a defect: what is asked of it fails in a way that nobody foresaw."""

    def __hash__(self) -> int:
        raise RuntimeError("defect")


def test_a_defect_while_recording_queues_nothing(bench: Callable[..., Bench]) -> None:
    """H1: the broker would swallow the error and publish."""

    class Spoils(Middleware):
        def before_enqueue(self, broker: Any, message: Any, delay: int) -> None:
            object.__setattr__(message, "actor_name", Odd("job"))

    b = bench(Spoils())

    @dramatiq.actor(broker=b.broker)
    def job() -> None: ...

    with pytest.raises(NotRecorded):
        job.send()
    assert b.broker.queues["default"].empty()
    assert sum(reading.counts(b.db).values()) == 0


def test_a_defect_at_the_start_does_not_let_the_actor_run(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2: the broker would swallow the error and run the actor.  The job is tried again later, with nothing charged."""
    b = bench()
    runs: list[int] = []
    defects = [RuntimeError("defect")] * 5
    admit = b.engine.registry.admit

    def defective(run: Any) -> Any:
        if defects:
            raise defects.pop()
        return admit(run)

    monkeypatch.setattr(b.engine.registry, "admit", defective)
    monkeypatch.setattr("dramatiq_durable.runtime.engine.POSTPONED", 50)

    @dramatiq.actor(broker=b.broker)
    def job() -> None:
        # Only a start that went through may get here.
        assert not defects
        runs.append(1)

    message = job.send()
    b.work(threads=1)
    b.join()
    row = b.job(message)
    assert (row.state, row.attempt, row.retries, runs) == ("completed", 1, 0, [1])
    # The place of the message in the consumer's window was given back each time: the prefetch is 2 here.
    assert b.engine.registry.runs() == []


def test_a_defect_at_boot_starts_no_worker(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker would swallow the error, and consumers would run without claims."""
    b = bench()
    monkeypatch.setattr(b.engine.writer, "start", lambda: 1 / 0)
    worker = dramatiq.Worker(b.broker)
    with pytest.raises(DurableError, match="division"):
        worker.start()


def test_the_order_is_checked_again_when_a_middleware_was_exchanged(bench: Callable[..., Bench]) -> None:
    """Also when their number is the same as before."""

    class Other(Middleware):
        pass

    other = Other()
    b = bench(other)

    @dramatiq.actor(broker=b.broker)
    def job() -> None: ...

    job.send()
    b.broker.middleware.remove(other)
    b.broker.middleware.append(other)
    with pytest.raises(WrongOrder):
        job.send()
    b.broker.middleware.remove(other)


def test_a_hook_that_dies_leaves_nothing_open_on_its_thread(bench: Callable[..., Bench]) -> None:
    """What a later message of the same thread sends is not taken for a follow-up of an earlier one."""
    from dramatiq_durable.runtime.capture import Capture
    from dramatiq_durable.runtime.current import thread

    class Leaves(Middleware):
        def before_ack(self, broker: Any, message: Any) -> None:
            run = message.__dict__["_durable_run"]
            thread.capture = Capture(run)

    class Sends(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            if message.actor_name == "job":
                noted.send(message.message_id)

    b = bench(Sends(), Leaves())

    @dramatiq.actor(broker=b.broker)
    def job() -> None: ...

    @dramatiq.actor(broker=b.broker)
    def noted(id: str) -> None: ...

    job.send()
    job.send()
    b.work(threads=1)
    deadline = time.monotonic() + 10
    while reading.counts(b.db).get("completed", 0) < 4:
        assert time.monotonic() < deadline, reading.counts(b.db)
        time.sleep(0.02)
