"""Follow-ups of a finished run: caught while the after-hooks of other middlewares run, written with the outcome.

Stock middlewares publish retries, pipeline stages and callbacks from their ``after_process_message``, before anybody
knows whether the run still held its claim.  While a :class:`Capture` is open on a thread, ``broker.enqueue`` and the
results backend add to it instead.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from dramatiq.results import Results

from ..errors import SendError
from ..store.types import FollowUpResult, NewJob
from . import messages
from .current import thread

if TYPE_CHECKING:
    from dramatiq import Broker, Message
    from dramatiq.results import ResultBackend

    from .held import Run

__all__ = ["Capture", "catch_results", "results_of"]


class Capture:
    """What one finished run sends on.

    Attributes:
      follow_ups(list[NewJob]): Jobs for others.
      own(tuple): The run's own message, enqueued again, with its delay in milliseconds; or ``None``.
      results(list[FollowUpResult]): What goes to the results backend.
      errors(list[Exception]): Why follow-ups cannot be sent; the run fails with the first.
    """

    __slots__ = ("errors", "follow_ups", "own", "results", "run")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.follow_ups: list[NewJob] = []
        self.own: tuple[Message[Any], int] | None = None
        self.results: list[FollowUpResult] = []
        self.errors: list[Exception] = []

    def add(self, broker: Broker, message: Message[Any], delay: int) -> None:
        """Take *message* instead of the broker, whatever its size: the work that it follows from is done."""
        if message.message_id == self.run.id:
            self.own = (message, delay)
            return
        try:
            self.follow_ups.append(
                messages.new_job(
                    broker,
                    message,
                    max_payload=None,
                    delay=delay or None,
                    parent_id=self.run.id,
                    origin="follow_up",
                )
            )
        except SendError as e:
            # NOTE: The broker swallows what after-hooks raise (``emit_after``): a stage that cannot be encoded would be
            # lost without a word.
            self.errors.append(e)
            raise


def results_of(broker: Broker) -> list[Results]:
    """Return the results middlewares of *broker*."""
    return [m for m in broker.middleware if isinstance(m, Results)]


def catch_results(backend: ResultBackend) -> None:
    """Make *backend* write through the open capture of the thread, where there is one."""
    if getattr(backend._store, "__name__", "") == "durable_store":
        return
    store = backend._store

    @functools.wraps(store)
    def durable_store(message_key: str, result: Any, ttl: int) -> None:
        capture = thread.capture
        if capture is not None:
            capture.results.append(FollowUpResult(message_key, backend.encoder.encode(result), ttl))
            return
        settled = thread.settled
        if settled is not None and message_key == backend.build_message_key(settled.message):
            # NOTE: Results stores failures after the nack, when it is not known yet whether the outcome was accepted;
            # the failure was captured with the outcome already.
            return
        store(message_key, result, ttl)

    durable_store.__name__ = "durable_store"
    durable_store.plain = store  # type: ignore[attr-defined]
    backend._store = durable_store  # type: ignore[method-assign]


def release_results(backend: ResultBackend) -> None:
    """Undo :func:`catch_results`."""
    if getattr(backend._store, "__name__", "") == "durable_store":
        del backend._store


def store_result(backend: ResultBackend, key: str, value: bytes, ttl: int) -> None:
    """Write a captured result to *backend*."""
    plain = getattr(backend._store, "plain", backend._store)
    plain(key, backend.encoder.decode(value), ttl)
