"""The last middleware of the list: the start right before the actor, and the first look at how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dramatiq.middleware import SkipMessage

from ..runtime.capture import Capture
from ..runtime.current import thread
from ..runtime.held import run_of
from .base import DurableMiddleware

if TYPE_CHECKING:
    from dramatiq import Broker, Message, Worker
    from dramatiq.broker import MessageProxy

__all__ = ["CaptureOutcome"]


class CaptureOutcome(DurableMiddleware):
    """The counterpart of :class:`DurableRecord`; ``install()`` adds it, last in the list.

    One middleware cannot be both first and last, and both are needed: the row must be written after every other
    ``before_enqueue``, the actor must not begin before every other ``before_process_message``, and what other
    middlewares publish from their ``after_process_message`` must be caught before it is known whether the run still
    counts.
    """

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int) -> None:
        self.engine.sender.record(message)

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        self.engine  # noqa: B018

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        run = run_of(message)
        if run is None:
            raise SkipMessage(f"Message {message.message_id} was not claimed; it is not run.")
        if message.failed:
            # Another middleware has failed it without raising: its actor will not run, so nothing is started.
            return
        try:
            self.engine.begin(run)
        except SkipMessage:
            run.refused = True
            raise
        except Exception as e:
            # NOTE: The broker swallows what is no MiddlewareError, and would run the actor without a start.
            self.logger.critical("Job %s could not be started; it is tried again later.", run.id, exc_info=True)
            run.refused = True
            self.engine.postpone(run)
            raise SkipMessage(f"Job {run.id} could not be started.") from e

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        run = run_of(message)
        if run is not None:
            # The capture first: an interrupt that lands between the two must find it in place.
            thread.capture = Capture(run)
            if run.verdict is None:
                run.verdict = (result, exception)
            self.engine.end(run)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        run = run_of(message)
        if run is not None:
            thread.capture = Capture(run)
            if run.started:
                # Its own actor raised SkipMessage.
                self.engine.end(run)
