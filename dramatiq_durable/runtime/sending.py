"""``broker.enqueue``, wrapped: every job is a row before it is a message.

Four cases, in the order in which they are looked for:

* after-hooks of a finished run (a capture is open): the message becomes a follow-up of the outcome;
* a running actor sends: the row is written under the run's fence, with an id derived from the run;
* a delay lies ahead: the row is written and the broker sees nothing until it is due;
* anything else: the row is written by the last ``before_enqueue`` of the broker's own enqueue, after the hooks of all
  other middlewares and after the message was encoded; then the broker gets it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from dramatiq.logging import get_logger

from ..errors import DurableError, NotPublished, NotRecorded, StaleRun, StoreError
from ..store import jobs, recovery
from ..store.types import NewJob, Token
from . import messages
from .current import RUN, thread
from .writer import Stopping

if TYPE_CHECKING:
    from dramatiq import Broker, Message

    from ..brokers.base import BrokerView
    from ..store.database import Database
    from .counters import Counters
    from .held import Run
    from .options import Options
    from .writer import Writer

__all__ = ["AlreadyRecorded", "Sender", "Sending"]


class AlreadyRecorded(DurableError):
    """A job with this id exists: nothing is published.  Never leaves this module."""


class Sending:
    """A message on its way into the broker.

    Attributes:
      quiet(bool): The row is written elsewhere: the hook that writes rows does nothing.
      row(NewJob): The row, once it is written.
      ref(str): The broker's own id of this copy.
    """

    __slots__ = ("quiet", "ref", "row")

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.row: NewJob | None = None
        self.ref: str | None = None


class Host(Protocol):
    """What sending needs of its process."""

    broker: Broker
    view: BrokerView
    db: Database
    writer: Writer
    options: Options
    counters: Counters

    @property
    def owner(self) -> str: ...

    def check_order(self) -> None: ...

    def wake_scheduler(self) -> None: ...


class Sender:
    """The wrapped ``enqueue`` of one broker.

    Parameters:
      host(Host)
      plain(Callable): The broker's own ``enqueue``.
    """

    def __init__(self, host: Host, plain: Callable[..., Message[Any]]) -> None:
        self.logger = get_logger(__name__, type(self))
        self.host = host
        self.plain = plain

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Accept *message*, as ``Broker.enqueue`` does.

        Parameters:
          message(Message)
          delay(int): Milliseconds until it is due.

        Raises:
          NotRecorded: If its row could not be written; nothing was queued.
          NotEncodable, PayloadTooLarge: Likewise, for what is in the message.
          StaleRun: If the run that sends it has lost its claim; nothing was queued.
          NotPublished: If the broker is away and ``on_publish_error="raise"``; the row stands and will be published.

        Returns:
          Message: The message as it was sent.
        """
        ahead = _milliseconds(message, delay) if delay is not None else messages.until_due(message)
        capture = thread.capture
        if capture is not None and self._is_ours(capture.run):
            return self._capture(message, ahead)
        run = RUN.get()
        if run is not None and self._is_ours(run):
            return self._send_from(run, message, ahead)
        self.host.check_order()
        if ahead:
            return self._record_for_later(messages.marked(message), ahead)
        return self._send(messages.marked(message))

    def _is_ours(self, run: Run) -> bool:
        """A job of another broker of this process has another record: what it sends here is sent like anything else."""
        host: object = run.consumer.host
        return host is self.host

    # After-hooks

    def _capture(self, message: Message[Any], ahead: int) -> Message[Any]:
        capture = thread.capture
        assert capture is not None  # noqa: S101
        if message.message_id != capture.run.id:
            message = messages.marked(message)
            try:
                self._announce(message, ahead)
            except Exception as e:
                # NOTE: Whoever sends this is a hook whose errors the broker swallows; see Capture.add().
                capture.errors.append(e)
                raise
        capture.add(self.host.broker, message, ahead)
        return message

    # A running actor

    def _send_from(self, run: Run, message: Message[Any], ahead: int) -> Message[Any]:
        if run.thread_id is None:
            # A coroutine that resisted its cancellation, or a task that nobody waited for.
            raise StaleRun(
                f"Job {message.message_id} for actor {message.actor_name!r} was not queued: job {run.id}, which sends "
                "it, has ended.",
                job_id=message.message_id,
            )
        if message.message_id == run.id:
            run.again = (message, ahead)
            return message
        ordinal = run.next_ordinal(message.actor_name)
        if _is_generated(message.message_id):
            # NOTE: In place, because groups ask their children for results by the messages they were given.
            id = messages.child_id(run.id, message.actor_name, ordinal, messages.round_of(run.message))
            object.__setattr__(message, "message_id", id)
        message = messages.marked(message)
        self._announce(message, ahead)
        row = messages.new_job(
            self.host.broker,
            message,
            max_payload=self.host.options.max_payload,
            delay=ahead or None,
            parent_id=run.id,
            origin="child",
        )
        token = Token(run.id, self.host.owner, run.claim)
        # On the writer's thread: a time limit may interrupt this one on any line.
        answer = self._write(row, lambda: self.host.writer.call(lambda: jobs.record(self.host.db, row, under=token)))
        if answer == "stale":
            raise StaleRun(
                f"Job {row.id} for actor {row.actor!r} was not queued: job {run.id}, which sends it, was taken over by "
                "another worker meanwhile.",
                job_id=row.id,
            )
        self.host.wake_scheduler()
        self.host.broker.emit_after("enqueue", message, ahead or None)
        return message

    # Everybody else

    def _record_for_later(self, message: Message[Any], ahead: int) -> Message[Any]:
        self._announce(message, ahead)
        row = messages.new_job(
            self.host.broker, message, max_payload=self.host.options.max_payload, delay=ahead, origin="sent"
        )
        if self._write(row, lambda: jobs.record(self.host.db, row)) == "exists":
            self._log_existing(row)
        self.host.wake_scheduler()
        self.host.broker.emit_after("enqueue", message, ahead)
        return message

    def _send(self, message: Message[Any]) -> Message[Any]:
        sending = Sending()
        outer, thread.sending = thread.sending, sending
        try:
            return self.plain(message)
        except AlreadyRecorded:
            return message
        except Exception as e:
            if sending.row is None:
                raise
            return self._publishing_failed(message, sending, e)
        finally:
            thread.sending = outer

    def record(self, message: Message[Any]) -> None:
        """Write the row of the message that this thread is sending.  Called by the last ``before_enqueue``.

        Raises:
          DurableError: Whatever goes wrong: anything else would be swallowed by the broker, and the message published
          without its row.
        """
        try:
            self._record(message)
        except DurableError:
            raise
        except Exception as e:
            raise _not_recorded(message.message_id, message.actor_name, f"{type(e).__name__}: {e}") from e

    def _record(self, message: Message[Any]) -> None:
        sending = thread.sending
        if sending is None:
            # Somebody kept the broker's own enqueue from before it was wrapped.  Its message gets its row all the same.
            sending = Sending()
            message.options[messages.MARK] = 1
        if sending.quiet or sending.row is not None:
            return
        ref = self.host.view.reference(message)
        row = messages.new_job(
            self.host.broker,
            message,
            max_payload=self.host.options.max_payload,
            due_at=messages.due_time(message.options.get("eta")),
            broker_ref=ref,
        )
        if self._write(row, lambda: jobs.record(self.host.db, row)) == "exists":
            self._log_existing(row)
            raise AlreadyRecorded(row.id)
        sending.row, sending.ref = row, ref

    def _publishing_failed(self, message: Message[Any], sending: Sending, error: Exception) -> Message[Any]:
        self.host.counters.publish_failures += 1
        try:
            recovery.unpublish(self.host.db, [(message.message_id, sending.ref or "")], 0)
        except StoreError:
            self.logger.debug("Job %s will be found by reconciliation.", message.message_id, exc_info=True)
        text = (
            f"Job {message.message_id} for actor {message.actor_name!r} is recorded, but the broker did not take it "
            f"({type(error).__name__}). A worker publishes it when the broker is back."
        )
        if self.host.options.on_publish_error == "raise":
            raise NotPublished(text, job_id=message.message_id) from error
        self.logger.warning(text)
        return message

    def _announce(self, message: Message[Any], ahead: int) -> None:
        """Run the ``before_enqueue`` of other middlewares for a message whose row is written by the caller."""
        outer, thread.sending = thread.sending, Sending(quiet=True)
        try:
            self.host.broker.emit_before("enqueue", message, ahead or None)
        finally:
            thread.sending = outer

    def _write(self, row: NewJob, write: Callable[[], str]) -> str:
        try:
            return write()
        except (StoreError, Stopping) as e:
            raise _not_recorded(row.id, row.actor, e) from e
        except DurableError:
            raise
        except Exception as e:
            raise _not_recorded(row.id, row.actor, f"{type(e).__name__}: {e}") from e

    def _log_existing(self, row: NewJob) -> None:
        self.logger.info("Job %s exists already; sending it again does nothing.", row.id)


def _not_recorded(id: str, actor: str, why: object) -> NotRecorded:
    return NotRecorded(f"Job {id} for actor {actor!r} could not be recorded; nothing was queued. {why}", job_id=id)


def _milliseconds(message: Message[Any], delay: int | None) -> int:
    if delay is None:
        return 0
    if isinstance(delay, bool) or not isinstance(delay, (int, float)) or delay != delay or delay in (float("inf"),):
        raise ValueError(
            f"The delay of job {message.message_id} must be a number of milliseconds, not {delay!r}; nothing was "
            f"queued."
        )
    return max(0, int(delay))


def _is_generated(message_id: str) -> bool:
    """Return whether Dramatiq made up this id (a random UUID), rather than somebody who had a reason."""
    try:
        return uuid.UUID(message_id).version == 4
    except ValueError:
        return False
