"""The thread that hands jobs to the broker when they are due: delays, retries, follow-ups, and what was put back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from dramatiq.logging import get_logger

from ..errors import StoreError
from ..store import recovery
from . import messages
from .current import thread
from .options import STOP_TIMEOUT
from .sending import Sending

if TYPE_CHECKING:
    from ..brokers.base import BrokerView, Publication
    from ..store.database import Database
    from ..store.types import Due
    from .counters import Counters
    from .options import Options

__all__ = ["Scheduler"]

#: How many jobs are taken at a time.
BATCH = 500

#: When to try again with a job that the broker did not take, and with one that this process cannot read (milliseconds).
BROKER_RETRY, UNREADABLE_RETRY = 1_000, 60_000


class Host(Protocol):
    """What the scheduler needs of its process."""

    view: BrokerView
    db: Database
    options: Options
    counters: Counters

    def ready(self) -> bool: ...


class Scheduler:
    """Publishes due jobs.  Any number of processes may do so side by side: each takes rows that the others do not.

    Parameters:
      host(Host)
    """

    def __init__(self, host: Host) -> None:
        self.logger = get_logger(__name__, type(self))
        self.host = host
        self._wake = threading.Event()
        self._running = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._running = True
        self._thread = threading.Thread(target=self._loop, name="durable-scheduler", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        self._running = False
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def wake(self) -> None:
        """Something was committed that may be due."""
        self._wake.set()

    def _loop(self) -> None:
        thread.sending = Sending(quiet=True)
        try:
            while self._running:
                self._wake.wait(self._turn())
                self._wake.clear()
        finally:
            self.host.db.close_thread()

    def _turn(self) -> float:
        """Publish what is due; return for how long to sleep (seconds)."""
        pause = self.host.options.scheduler_interval / 1000
        try:
            if not self.host.ready():
                return 1.0
            while self._running:
                ahead = recovery.next_due(self.host.db)
                if ahead is None:
                    return pause
                if ahead > 0:
                    return min(pause, ahead / 1000)
                if not self.publish_due():
                    return 1.0
        except StoreError as e:
            self.logger.warning("Due jobs wait for the database: %s", e)
            return 1.0
        except Exception:
            self.logger.critical("Unexpected failure while publishing due jobs.", exc_info=True)
            return 1.0
        return 0

    def publish_due(self) -> bool:
        """Take one batch of due jobs and hand it to the broker; ``False`` when the broker did not take all.

        Raises:
          StoreError: If the database does not answer.
        """
        due = recovery.take_due(self.host.db, BATCH)
        publications: list[Publication] = []
        rows: list[Due] = []
        unreadable: list[tuple[str, str]] = []
        for row in due:
            try:
                publications.append((messages.rebuild(row), row.queue, row.broker_ref))
                rows.append(row)
            except Exception:
                self.logger.error("The payload of job %s cannot be read by this process.", row.id, exc_info=True)
                unreadable.append((row.id, row.broker_ref))
        answers = self.host.view.publish(publications)
        failed = [(row, e) for row, e in zip(rows, answers, strict=True) if e is not None]
        if unreadable:
            recovery.unpublish(self.host.db, unreadable, UNREADABLE_RETRY)
        if failed:
            self.host.counters.publish_failures += len(failed)
            row, error = failed[0]
            self.logger.warning(
                "%d due jobs were not taken by the broker and are kept, job %s among them: %s",
                len(failed),
                row.id,
                error,
            )
            recovery.unpublish(self.host.db, [(row.id, row.broker_ref) for row, _ in failed], BROKER_RETRY)
        return not failed
