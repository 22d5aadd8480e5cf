"""Acknowledgements that the broker's client refuses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import _StubConsumer
from dramatiq.errors import ConnectionClosed

from tests.inprocess.conftest import Bench


def refuse(monkeypatch: pytest.MonkeyPatch, refused: Callable[[str], Exception | None]) -> None:
    ack = _StubConsumer.ack

    def choosy(self: Any, message: Any) -> None:
        error = refused(message.message_id)
        if error is not None:
            raise error
        ack(self, message)

    monkeypatch.setattr(_StubConsumer, "ack", choosy)


def test_one_that_is_always_refused_holds_up_no_other(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message without what its broker needs to acknowledge it (a stranger's, in Redis) stays; it is a duplicate when
    it comes again."""
    b = bench()

    @dramatiq.actor(broker=b.broker)
    def job() -> None: ...

    first, others = job.send(), [job.send() for _ in range(5)]
    refuse(monkeypatch, lambda id: KeyError("redis_message_id") if id == first.message_id else None)
    b.work(threads=1)
    wait(lambda: b.broker.queues["default"].unfinished_tasks == 1)
    assert {b.job(message).state for message in (first, *others)} == {"completed"}


def test_a_broker_that_is_away_is_waited_for(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench()
    back = time.monotonic() + 5

    @dramatiq.actor(broker=b.broker)
    def job() -> None: ...

    job.send()
    refuse(monkeypatch, lambda id: ConnectionClosed(OSError()) if time.monotonic() < back else None)
    b.work(threads=1)
    b.join()
    assert time.monotonic() >= back


def wait(condition: Callable[[], bool], timeout: float = 10) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
