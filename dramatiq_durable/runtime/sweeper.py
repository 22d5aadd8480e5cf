"""Reconciliation: putting right from rows what the queue lost and what dead processes left behind.

Two looks with different clocks.  The *reaper* watches leases, in every process and all the time, so that whoever leads
has seen what it acts on.  The *look* compares queued rows with the broker, at start and then at intervals, by one
process at a time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dramatiq.logging import get_logger

from ..errors import StoreError
from ..store import outcomes, recovery
from ..store.types import ActiveRow, Waiting, WorkerInfo
from .courier import deliver_results
from .leases import LeaseWatch
from .options import STOP_TIMEOUT
from .stranded import Strandings, give_back, put_back_stranded

if TYPE_CHECKING:
    from dramatiq import Broker
    from dramatiq.results import ResultBackend

    from ..brokers.base import BrokerView
    from ..store.database import Database
    from .options import Options

__all__ = ["Look", "Sweeper", "look"]

#: The name of the leader lease.
LEADER = "reconciler"

#: How many rows are compared at a time, and how many suspects are kept between two looks.
PAGE, SUSPECTS = 2_000, 20_000

#: How long a copy must be missing before its job is put back (seconds): the time between the two looks.
SECOND_LOOK = 1.0

#: At a broker that cannot be looked into, a job that was published longer ago than this (milliseconds) is published
#: again.  The claim makes a wrong guess harmless; an hour keeps the guesses few.
BLIND_AGE = 3_600_000

#: How many parked jobs, and how many undelivered results, one turn takes up.
TURN_LIMIT = 200


class Look(NamedTuple):
    """What one look found.

    Parameters:
      looked(int): Queued rows that were compared.
      put_back(int): Jobs whose message was lost and that are published again.
    """

    looked: int
    put_back: int


def look(
    db: Database,
    view: BrokerView,
    *,
    grace: int,
    stranded_after: float,
    strandings: Strandings,
    progress: Callable[[int], None] | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> Look:
    """Compare the queued rows with the broker and mark those whose message is gone, so that a scheduler publishes them.

    A long queue that waits its turn costs nothing: its messages are there.  A copy counts as lost when it is missing in
    two looks, :data:`SECOND_LOOK` apart, and its row has not moved meanwhile.

    Parameters:
      db(Database)
      view(BrokerView)
      grace(int): Rows published less than this many milliseconds ago are left alone.
      stranded_after(float): Seconds for which a copy may be in a consumer's hands without its row being claimed.
      strandings(dict): When each such copy was first seen; kept by the caller from look to look.
      progress(Callable): Called with the number of rows looked at so far.
      pause(Callable): Waits for so many seconds; breaks the look off when it returns ``True``.

    Raises:
      StoreError: If the database does not answer.
      Exception: Whatever the broker's client raises when it does not answer.
    """
    looked = put_back = 0
    suspects: list[tuple[float, list[Waiting]]] = []
    held: Strandings = {}
    queues: set[str] = set()
    after = ""
    while page := recovery.waiting_page(db, after, PAGE, grace if view.can_look else BLIND_AGE):
        after = page[-1].id
        looked += len(page)
        queues.update(row.queue for row in page)
        missing = view.missing(page) if view.can_look else {row.id for row in page}
        if missing:
            suspects.append((time.monotonic(), [row for row in page if row.id in missing]))
        there = [row for row in page if row.id not in missing]
        put_back += put_back_stranded(db, view, there, stranded_after, strandings, held)
        while sum(len(rows) for _, rows in suspects) > SUSPECTS:
            put_back += _second_look(db, view, *suspects.pop(0), pause)
        if progress is not None:
            progress(looked)
        if pause(0) is True:
            break
    for since, rows in suspects:
        put_back += _second_look(db, view, since, rows, pause)
    put_back += _place_again(view, queues, pause)
    give_back(db, view, stranded_after, strandings, held)
    strandings.clear()
    strandings.update(held)
    return Look(looked, put_back)


def _place_again(view: BrokerView, queues: set[str], pause: Callable[[float], object]) -> int:
    """Give back their place to copies that lost it; like a lost copy, one must be found twice."""
    first = set(view.misplaced(queues))
    if not first or pause(SECOND_LOOK) is True:
        return 0
    again = [copy for copy in view.misplaced(queues) if copy in first]
    view.place(again)
    return len(again)


def _second_look(
    db: Database, view: BrokerView, since: float, rows: list[Waiting], pause: Callable[[float], object]
) -> int:
    if pause(max(0.0, since + SECOND_LOOK - time.monotonic())) is True:
        return 0
    missing = view.missing(rows) if view.can_look else {row.id for row in rows}
    return len(recovery.put_back(db, [(row.id, row.broker_ref) for row in rows if row.id in missing]))


class Host(Protocol):
    """What the sweeper needs of its process."""

    broker: Broker
    view: BrokerView
    db: Database
    options: Options

    @property
    def owner(self) -> str: ...

    def ready(self) -> bool: ...

    def result_backends(self) -> list[ResultBackend]: ...

    def wake_scheduler(self) -> None: ...

    def worker_info(self) -> WorkerInfo: ...


class Sweeper:
    """The thread that reconciles.

    Parameters:
      host(Host)
      interval(int): Milliseconds between two looks at the broker.
    """

    def __init__(self, host: Host, *, interval: int) -> None:
        self.logger = get_logger(__name__, type(self))
        self.host = host
        self.interval = interval / 1000
        lease = host.options.lease / 1000
        self._tick = min(host.options.heartbeat_interval / 1000, lease / 4, self.interval)
        self._watch = LeaseWatch(lease, self._tick)
        self._strandings: Strandings = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._next_look = 0.0
        self._next_enlist = 0.0
        # Apart from the thread that watches leases: a broker or a results backend may hang for minutes.
        self._looking: threading.Thread | None = None
        self._delivering: threading.Thread | None = None

    def start(self) -> None:
        self._stop.clear()
        # A fleet that restarts together does not look together.
        self._next_look = time.monotonic() + random.uniform(0, min(2.0, self.interval / 2))  # noqa: S311
        self._next_enlist = 0.0
        self._thread = threading.Thread(target=self._loop, name="durable-reconciler", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        if self._thread is not None and self._thread.is_alive():
            # In the child of a fork the parent's thread is not alive, and its event may be locked for ever.
            self._stop.set()
        deadline = time.monotonic() + timeout
        for thread in (self._thread, self._looking, self._delivering):
            if thread is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _loop(self) -> None:
        try:
            while not self._stop.wait(self._tick):
                try:
                    if self.host.ready():
                        self._turn()
                except StoreError as e:
                    self._watch.forget()
                    self.logger.warning("Reconciliation waits for the database: %s", e)
                except Exception:
                    self.logger.critical("Unexpected failure while reconciling.", exc_info=True)
        finally:
            try:
                recovery.resign(self.host.db, LEADER, self.host.owner)
            except StoreError as e:
                self.logger.debug("The leader lease runs out by itself: %s", e)
            self.host.db.close_thread()

    def _turn(self) -> None:
        db, owner = self.host.db, self.host.owner
        now = time.monotonic()
        overdue = self._spare_locked(self._watch.observe(recovery.watch(db), now), now)
        if now >= self._next_enlist:
            self._next_enlist = now + max(5.0, self._tick)
            recovery.enlist(db, self.host.worker_info())
        if not recovery.lead(db, LEADER, owner, int((3 * self._tick + 1) * 1000)):
            return
        if overdue:
            self._reap(overdue)
        self._deliver_results()
        if recovery.unpark(db, sorted(self.host.broker.actors), TURN_LIMIT):
            self.host.wake_scheduler()
        looking = self._looking is not None and self._looking.is_alive()
        if now >= self._next_look and not looking:
            self._next_look = now + self.interval * random.uniform(0.9, 1.1)  # noqa: S311
            self._looking = self._beside(self.look_once, "durable-look")

    def _spare_locked(self, overdue: list[ActiveRow], now: float) -> list[ActiveRow]:
        """Start anew with rows that somebody outside has locked; return those that are overdue all the same.

        Who forgets to commit keeps the owner from renewing and the reaper from reaping.  When the lock is gone, the
        owner must have the time to come first.
        """
        late = self._watch.late(now, 2 * self.host.options.heartbeat_interval / 1000)
        if not late:
            return overdue
        locked = set(late) - recovery.unlocked(self.host.db, late)
        self._watch.restart(locked)
        return [row for row in overdue if row.id not in locked]

    def _beside(self, work: Callable[[], object], name: str) -> threading.Thread:
        """Do *work* on a thread of its own: leases must be watched, and the leader's own renewed, meanwhile."""

        def run() -> None:
            try:
                work()
            except StoreError as e:
                self.logger.warning("Reconciliation waits for the database: %s", e)
            except Exception:
                self.logger.critical("Unexpected failure while reconciling.", exc_info=True)
            finally:
                self.host.db.close_thread()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _reap(self, overdue: list[ActiveRow]) -> None:
        rows = [(row.id, row.claim, row.beat) for row in overdue]
        reaped = recovery.reap(self.host.db, rows, self.host.options.max_lost)
        if any(reaped):
            self.logger.warning(
                "Leases of lost workers ran out: %d jobs queued again, %d failed, %d in doubt.", *reaped
            )
            recovery.note_pass(self.host.db, "reaper", self.host.owner, requeued=reaped.requeued, failed=reaped.failed)
            self.host.wake_scheduler()

    def look_once(self, progress: Callable[[int], None] | None = None) -> Look | None:
        """Look once; ``None`` when the broker did not answer.

        Raises:
          StoreError: If the database does not answer.
        """
        options = self.host.options
        try:
            found = look(
                self.host.db,
                self.host.view,
                grace=options.publish_grace,
                stranded_after=max(options.lease / 1000, 2 * self.interval),
                strandings=self._strandings,
                progress=progress,
                pause=self._stop.wait,
            )
        except StoreError:
            raise
        except Exception as e:
            self.logger.warning("The broker could not be looked into: %s", e)
            return None
        self._maintain()
        if found.put_back:
            self.logger.warning(
                "The broker had lost the messages of %d queued jobs; they are put back.", found.put_back
            )
            self.host.wake_scheduler()
        recovery.note_pass(self.host.db, "reconcile", self.host.owner, looked=found.looked, put_back=found.put_back)
        return found

    def _maintain(self) -> None:
        try:
            self.host.view.maintain()
        except Exception as e:
            # Some providers forbid a command that Dramatiq's maintenance uses (KEYS); rows do not depend on it.
            self.logger.debug("The broker's maintenance could not be run: %s", e)

    def _deliver_results(self) -> None:
        backends = self.host.result_backends()
        if not backends or self._delivering is not None and self._delivering.is_alive():
            return
        rows = outcomes.pending_results(self.host.db, 5_000, TURN_LIMIT)
        if rows:
            self._delivering = self._beside(
                lambda: outcomes.mark_stored(self.host.db, deliver_results(backends, rows, self.logger)),
                "durable-results",
            )
