"""The thread that commits: outcomes in batches, and what running jobs must have in the database before they go on.

Worker threads hand over and go on with the next job; the acknowledgement waits for the commit, not the thread.  It also
keeps every write out of reach of asynchronous exceptions (time limits, shutdown), which may land on any line of a
worker thread, half-way through a transaction included.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from dramatiq.logging import get_logger

from ..errors import StoreError
from ..store import outcomes
from ..store.types import Evidence, Outcome
from .options import STOP_TIMEOUT

if TYPE_CHECKING:
    from ..store.database import Database
    from .held import Run

__all__ = ["Stopping", "Writer"]

T = TypeVar("T")

#: How long the writer waits before it tries again when the database does not answer (seconds): first, and at most.
RETRY_DELAY, MAX_RETRY_DELAY = 0.05, 2.0


def _may_pass(error: BaseException) -> bool:
    """Return whether trying again may help: the database is away, full, only reads, or refuses this user for now.  What
    it refuses because of what it was given is a plain :class:`StoreError`.
    """
    return isinstance(error, StoreError) and type(error) is not StoreError


class Stopping(Exception):
    """The process is stopping and the database does not answer: what was asked for was not written."""


class _Request:
    __slots__ = ("cancelled", "done", "error", "fn", "patient", "value")

    def __init__(self, fn: Callable[[], Any], patient: bool) -> None:
        self.fn = fn
        self.patient = patient
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self.cancelled = False


class Writer:
    """Commits outcomes and answers requests, one after the other, on one thread.

    Parameters:
      db(Database)
      owner(Callable[[], str]): Returns this process's owner id.
      committed(Callable[[Run, bool], None]): Called after the commit, with whether the outcome was accepted.
      batch(int): How many outcomes one transaction takes, and how many may wait before worker threads have to.
      max_interruptions(int): See :func:`outcomes.settle`.
    """

    def __init__(
        self,
        db: Database,
        owner: Callable[[], str],
        committed: Callable[[Run, bool], None],
        *,
        batch: int = 100,
        max_interruptions: int = 20,
    ) -> None:
        self.logger = get_logger(__name__, type(self))
        self._db = db
        self._owner = owner
        self._committed = committed
        self._batch = batch
        self._max_interruptions = max_interruptions
        self._changed = threading.Condition()
        self._runs: deque[Run] = deque()
        self._requests: deque[_Request] = deque()
        self._busy = 0
        self._running = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._running, self._stopping = True, False
        self._thread = threading.Thread(target=self._loop, name="durable-writer", daemon=True)
        self._thread.start()

    def submit(self, run: Run, *, wait: bool = True) -> None:
        """Take over a run whose outcome is decided; wait only when more than a batch is waiting already."""
        with self._changed:
            while wait and len(self._runs) >= self._batch and self._running and not self._stopping:
                self._changed.wait(0.5)
            # NOTE: These three lines may be interrupted, and are then called again.
            if not run.submitted:
                self._runs.append(run)
                run.submitted = True
            self._changed.notify_all()

    def call(self, fn: Callable[[], T], *, patient: bool = False) -> T:
        """Have *fn* run on the writer's thread and wait for it.

        Parameters:
          fn(Callable): What to do; it must be safe to repeat.
          patient(bool): Keep trying while the database does not answer, or takes nothing.

        Raises:
          Stopping: If the process stops while the database does not answer.
          StoreError: Whatever *fn* raises.
        """
        request = _Request(fn, patient)
        with self._changed:
            if not self._running:
                raise Stopping
            self._requests.append(request)
            self._changed.notify_all()
        try:
            while not request.done.wait(0.25):
                if not self._running or (self._stopping and patient):
                    raise Stopping
        except BaseException:
            # An interrupt of the worker thread: nobody waits for the answer any more.
            request.cancelled = True
            raise
        if request.error is not None:
            raise request.error
        value: T = request.value
        return value

    def stop_waiting(self) -> None:
        """Let nobody wait for a database that is away: the process is about to stop."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def drain(self, timeout: float) -> bool:
        """Wait up to *timeout* seconds until everything handed over is committed; return whether it is."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._runs or self._requests or self._busy:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._running:
                    return False
                self._changed.wait(min(remaining, 0.25))
        return True

    def stop(self, timeout: float = STOP_TIMEOUT) -> list[Run]:
        """Stop the thread; return the runs whose outcomes it could not commit."""
        with self._changed:
            self._running = False
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        with self._changed:
            left = list(self._runs)
            self._runs.clear()
        return left

    def _loop(self) -> None:
        delay = RETRY_DELAY
        try:
            while True:
                with self._changed:
                    while self._running and not self._runs and not self._requests:
                        self._changed.wait(1)
                    if not self._running:
                        return
                    requests = list(self._requests)
                    self._requests.clear()
                    batch = [self._runs[i] for i in range(min(len(self._runs), self._batch))]
                    self._busy = len(requests) + len(batch)
                again = [request for request in requests if not self._answer(request)]
                try:
                    written = self._write(batch)
                except Exception:
                    # Nothing above lets an exception through; if it does, the thread must outlive it all the same.
                    self.logger.critical("Unexpected failure while writing %d outcomes.", len(batch), exc_info=True)
                    written = False
                with self._changed:
                    self._busy = 0
                    self._requests.extendleft(reversed(again))
                    while self._runs and self._runs[0].reported:
                        self._runs.popleft()
                    self._changed.notify_all()
                if written and not again:
                    delay = RETRY_DELAY
                else:
                    time.sleep(delay)
                    delay = min(delay * 2, MAX_RETRY_DELAY)
        finally:
            self._db.close_thread()

    def _answer(self, request: _Request) -> bool:
        if request.cancelled:
            return True
        try:
            request.value = request.fn()
        except BaseException as e:
            if request.patient and _may_pass(e) and self._running and not self._stopping:
                return False
            request.error = e
        request.done.set()
        return True

    def _write(self, runs: list[Run]) -> bool:
        """Commit a batch; ``False`` if the database is away or takes nothing: the same batch is to be tried again."""
        runs = [run for run in runs if not run.reported]
        if not runs:
            return True
        batch = [run.outcome for run in runs if run.outcome is not None]
        try:
            accepted = outcomes.settle(self._db, self._owner(), batch, max_interruptions=self._max_interruptions)
        except Exception as e:
            if _may_pass(e):
                self.logger.warning("%d outcomes wait for the database: %s", len(batch), e)
                return False
            if len(runs) > 1:
                # One of them cannot be written.  Its neighbours must not suffer: each on its own.
                return all([self._write([run]) for run in runs])
            return self._write_unwritable(runs[0])
        for run in runs:
            self._report(run, run.id in accepted)
        return True

    def _write_unwritable(self, run: Run) -> bool:
        """Fail a run whose outcome the database refuses for what is in it (a NUL byte, say)."""
        self.logger.critical("The outcome of job %s cannot be stored; it is failed instead.", run.id, exc_info=True)
        evidence = Evidence("OutcomeNotStorable", "The database refused this run's outcome; see the worker's log.", "")
        outcome = Outcome(run.id, run.claim, "failed", ran_for=run.ran_for(), reason="not_storable", evidence=evidence)
        try:
            accepted = outcomes.settle(self._db, self._owner(), [outcome], max_interruptions=self._max_interruptions)
        except Exception as e:
            if _may_pass(e):
                return False
            self.logger.critical("Job %s cannot be failed either; its lease will run out.", run.id, exc_info=True)
            run.answer = None
            accepted = set()
        self._report(run, run.id in accepted)
        return True

    def _report(self, run: Run, accepted: bool) -> None:
        run.reported = True
        try:
            self._committed(run, accepted)
        except Exception:
            self.logger.critical("Unexpected failure after the outcome of job %s was written.", run.id, exc_info=True)
