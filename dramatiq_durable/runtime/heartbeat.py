"""The thread that keeps leases alive: one statement a process, whatever the number of jobs."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dramatiq.logging import get_logger

from .. import greenlets
from ..errors import StoreError
from ..store import jobs
from .held import find_lost
from .options import STOP_TIMEOUT

if TYPE_CHECKING:
    from ..store.database import Database
    from .counters import Counters
    from .held import Registry, Run

__all__ = ["Heartbeat"]

#: Rows with this process's name: id, claim, and whether the actor has begun.
Strays = tuple[tuple[str, int, bool], ...]


class Heartbeat:
    """Names the claims that this process really holds; finds out which it has lost, and lets go of rows that carry its
    name although nothing here works on them.

    Parameters:
      db(Database)
      owner(Callable[[], str])
      registry(Registry)
      counters(Counters)
      lease(int): Milliseconds.
      interval(int): Milliseconds.
      submit(Callable[[Run], None]): Takes over an outcome whose thread did not hand it over.
      stopping(Callable[[], bool]): Whether the process begins no more jobs.  Claims that wait in its memory are then
        not renewed any more: nothing may be relied on to give them back (``Worker.stop`` may raise on its way).
      connect(Callable[[], Database]): Describes the same database anew, for a native thread beside greenlets.
    """

    def __init__(
        self,
        db: Database,
        owner: Callable[[], str],
        registry: Registry,
        counters: Counters,
        *,
        lease: int,
        interval: int,
        submit: Callable[[Run], None],
        stopping: Callable[[], bool],
        connect: Callable[[], Database],
    ) -> None:
        self.logger = get_logger(__name__, type(self))
        self._db = db
        self._owner = owner
        self._registry = registry
        self._counters = counters
        self._lease = lease
        self._interval = interval / 1000
        self._submit = submit
        self._stopping = stopping
        self._takes_none = False
        self._stop = threading.Event()
        self._connect = connect
        self._thread: threading.Thread | None = None
        self._native: greenlets.NativeThread | None = None

    def start(self) -> None:
        if greenlets.active():
            db = self._connect()
            self._native = greenlets.NativeThread(lambda: self._beat_apart(db), self._interval, db.close_all)
            self._native.start()
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._loop, name="durable-heartbeat", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout)
        if self._native is not None:
            self._native.stop(timeout)

    def _loop(self) -> None:
        try:
            while not self._stop.wait(self._interval):
                self._guarded(self.beat)
        finally:
            self._db.close_thread()

    def _beat_apart(self, db: Database) -> Callable[[], None] | None:
        """Renew on a native thread; return what is to be done by a greenlet."""
        try:
            unsure, strays = self._renew(db)
        except Exception as e:
            return functools.partial(self._complain, e)

        def follow_up() -> None:
            self._prepare()
            self._follow_up(unsure, strays)

        return functools.partial(self._guarded, follow_up)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as e:
            self._complain(e)

    def _complain(self, error: Exception) -> None:
        if isinstance(error, StoreError):
            self.logger.warning("Leases could not be renewed: %s", error)
        else:
            self.logger.critical("Unexpected failure while renewing leases.", exc_info=error)

    def beat(self) -> None:
        """Renew once.

        Raises:
          StoreError: If the database does not answer.
        """
        self._prepare()
        self._follow_up(*self._renew(self._db))

    def _prepare(self) -> None:
        self._hand_over([run for run in self._registry.runs() if not run.lost])
        self._takes_none = self._stopping()

    def _renew(self, db: Database) -> tuple[list[Run], Strays]:
        """Renew; return the runs whose claims were not renewed, and the rows that carry our name in vain."""
        now = time.monotonic()
        mine = [run for run in self._registry.runs() if not run.lost]
        ended = [run for run in mine if _over_time(run, now) or (self._takes_none and not run.started)]
        held = [run for run in mine if run not in ended]
        pairs = [(run.id, run.claim, run.started) for run in held]
        beat = jobs.renew(db, self._owner(), pairs, self._lease)
        # These are not renewed, but are told when they have been taken over.
        unsure = ended
        for run in held:
            if (run.id, run.claim) in beat.renewed:
                run.valid_until = now + self._lease / 1000
            else:
                unsure.append(run)
        return unsure, beat.strays

    def _follow_up(self, unsure: list[Run], strays: Strays) -> None:
        if unsure:
            self._confirm(unsure)
        self._let_go(strays)

    def _hand_over(self, runs: list[Run]) -> None:
        """See to outcomes that were decided at the last beat and that nobody has handed over since: a ``before_ack`` of
        another middleware has stopped the acknowledgement, or the thread has died.
        """
        for run in runs:
            if run.outcome is not None and not run.submitted:
                if run.decided:
                    self._submit(run)
                run.decided = True

    def _confirm(self, unsure: list[Run]) -> None:
        """Find out about claims that were not renewed: locked for a moment, settled just now, or lost."""
        for run in find_lost(self._db, self._owner(), self._registry, unsure):
            self._counters.lost += 1
            self.logger.warning("Job %s was taken over while this process held it; its run no longer counts.", run.id)

    def _let_go(self, strays: Strays) -> None:
        """Release rows that nothing here works on.  An id is announced to the registry before it is claimed, so what is
        not in the registry after the row was seen is an orphan (a lost reply, a dead thread).  Started orphans are left
        to run out: whoever takes them over must know that their actor may have run.
        """
        orphans = [(id, claim) for id, claim, started in strays if not started and id not in self._registry]
        if orphans:
            released = jobs.release(self._db, self._owner(), orphans, "orphaned")
            self.logger.warning("Released %d claims that nothing in this process works on.", len(released))


def _over_time(run: Run, now: float) -> bool:
    return run.max_runtime is not None and run.began is not None and now - run.began > run.max_runtime
