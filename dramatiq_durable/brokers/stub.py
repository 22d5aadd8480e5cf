"""The broker of unit tests: everything is in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dramatiq.errors import DecodeError, QueueJoinTimeout
from dramatiq.message import Message

from ..store.types import Waiting
from .base import BrokerView

if TYPE_CHECKING:
    from dramatiq.broker import Consumer
    from dramatiq.brokers.stub import StubBroker

__all__ = ["StubView", "joining"]


class StubView(BrokerView):
    """Looks into the queues of a :class:`dramatiq.brokers.stub.StubBroker`."""

    can_look = True
    broker: StubBroker

    def missing(self, rows: Sequence[Waiting]) -> set[str]:
        present: dict[str, set[str]] = {}
        for queue in {row.queue for row in rows}:
            waiting = self.broker.queues.get(queue)
            data = list(waiting.queue) if waiting is not None else []
            present[queue] = set()
            for each in data:
                with contextlib.suppress(DecodeError):
                    present[queue].add(Message.decode(each).message_id)
        return {row.id for row in rows if row.id not in present[row.queue]}

    def has_fetched(self, consumer: Consumer) -> bool:
        return False

    def drop_undecodable(self, consumer: Consumer, payload: bytes) -> None:
        # What acknowledging it would do; the consumer itself forgets a message that it could not decode.
        stub: Any = consumer
        stub.queue.task_done()
        stub.prefetch_semaphore.release()


def joining(broker: StubBroker, unfinished: Callable[[str], int]) -> Callable[..., None]:
    """Make a ``join`` that also waits for jobs which the database keeps for later: retries and delays.

    Parameters:
      broker(StubBroker)
      unfinished(Callable[[str], int]): Counts the jobs of a queue that are neither finished nor held.
    """
    plain = broker.join

    def join(queue_name: str, *, timeout: int | None = None, fail_fast: bool | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout / 1000
        options: dict[str, Any] = {} if fail_fast is None else {"fail_fast": fail_fast}
        while True:
            left = None if deadline is None else max(1, int((deadline - time.monotonic()) * 1000))
            plain(queue_name, timeout=left, **options)
            if not unfinished(queue_name):
                # A job may have failed for good between the two looks.
                plain(queue_name, timeout=left, **options)
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise QueueJoinTimeout(queue_name)
            time.sleep(0.01)

    return join
