"""The thread that tells the broker: acknowledgements and results, after the outcome is committed and never before."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from dramatiq.errors import BrokerConnectionError
from dramatiq.logging import get_logger

from ..errors import StoreError
from ..store import outcomes
from .options import STOP_TIMEOUT

if TYPE_CHECKING:
    from dramatiq.results import ResultBackend

    from ..store.database import Database
    from .held import Run

__all__ = ["Courier"]

#: How long to wait before an acknowledgement is tried again (seconds): first, and at most.
RETRY_DELAY, MAX_RETRY_DELAY = 0.1, 5.0

#: How often an acknowledgement is tried that the broker's client refuses, though the broker is there.
ATTEMPTS = 5


#: A results backend that failed after more than :data:`HANGING` is left to the reconciler for :data:`RESULTS_PAUSE`
#: (seconds): acknowledgements must not wait for it, or the broker hands out nothing more.
HANGING, RESULTS_PAUSE = 0.5, 5.0


class Courier:
    """Delivers what a commit made true.  Nothing is lost if it dies: results are rows, and a message that was not
    acknowledged is recognised as a duplicate when it comes again.

    Parameters:
      db(Database)
      backends(Callable[[], list[ResultBackend]]): Where captured results go.
    """

    def __init__(self, db: Database, backends: Callable[[], list[ResultBackend]]) -> None:
        self.logger = get_logger(__name__, type(self))
        self._db = db
        self._backends = backends
        self._changed = threading.Condition()
        self._runs: deque[Run] = deque()
        self._busy = False
        self._running = False
        self._results_after = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._running = True
        self._thread = threading.Thread(target=self._loop, name="durable-courier", daemon=True)
        self._thread.start()

    def deliver(self, run: Run) -> None:
        """Take over a run whose outcome is committed, or was refused."""
        with self._changed:
            self._runs.append(run)
            self._changed.notify_all()

    def drain(self, timeout: float) -> bool:
        """Wait up to *timeout* seconds until everything is delivered; return whether it is."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._runs or self._busy:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._running:
                    return False
                self._changed.wait(min(remaining, 0.25))
        return True

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        with self._changed:
            self._running = False
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    def _loop(self) -> None:
        delay, refused = RETRY_DELAY, 0
        try:
            while True:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
                    while self._running and not self._runs:
                        self._changed.wait(1)
                    if not self._running:
                        return
                    run = self._runs.popleft()
                    self._busy = True
                error = self._deliver(run)
                refused = 0 if error is None or _is_away(error) else refused + 1
                if error is None or refused >= ATTEMPTS:
                    # One that is refused for ever must not hold up the others: the broker gives it out again some
                    # time, and it is recognised.
                    delay, refused = RETRY_DELAY, 0
                    continue
                with self._changed:
                    self._runs.appendleft(run)
                    if self._running:
                        self._changed.wait(delay)
                delay = min(delay * 2, MAX_RETRY_DELAY)
        finally:
            self._db.close_thread()

    def _deliver(self, run: Run) -> Exception | None:
        """Tell the broker about *run*; return what went wrong."""
        self._store_results(run)
        try:
            if run.answer == "nack":
                run.consumer.inner.nack(run.message)
            elif run.answer == "ack":
                run.consumer.inner.ack(run.message)
        except Exception as e:
            self.logger.warning("Job %s is settled but its message could not be acknowledged yet: %r", run.id, e)
            return e
        run.answer = None
        return None

    def _store_results(self, run: Run) -> None:
        if run.outcome is None or not run.outcome.results:
            return
        stored: list[tuple[str, str]] = []
        began = time.monotonic()
        if began >= self._results_after:
            rows = [(run.id, *result) for result in run.outcome.results]
            stored = deliver_results(self._backends(), rows, self.logger)
            if len(stored) < len(rows) and time.monotonic() - began > HANGING:
                self._results_after = time.monotonic() + RESULTS_PAUSE
        # From here on the rows are the reconciler's, whatever became of this attempt.
        run.outcome = run.outcome._replace(results=())
        try:
            if stored:
                outcomes.mark_stored(self._db, stored)
        except StoreError as e:
            self.logger.warning("The result of job %s is stored but could not be marked so: %s", run.id, e)


def _is_away(error: Exception) -> bool:
    """Return whether the broker does not answer.  A client's own error of that name is often no ``OSError``."""
    return isinstance(error, (BrokerConnectionError, OSError)) or "Timeout" in type(error).__name__


def deliver_results(
    backends: list[ResultBackend], rows: list[tuple[str, str, bytes, int]], logger: object
) -> list[tuple[str, str]]:
    """Write results to the backend; return the (job, key) pairs that it took."""
    from .capture import store_result

    stored = []
    for job_id, key, value, ttl in rows:
        try:
            for backend in backends:
                store_result(backend, key, value, ttl)
            stored.append((job_id, key))
        except Exception as e:
            logger.warning("The result of job %s could not be stored yet; it is kept: %s", job_id, e)  # type: ignore[attr-defined]
    return stored
