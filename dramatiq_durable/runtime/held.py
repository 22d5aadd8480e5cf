"""What this process holds: one :class:`Run` for every claimed job, from the fetch until its outcome is committed."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

from dramatiq.middleware import raise_thread_exception

from .. import greenlets
from ..errors import LeaseLost
from ..store import jobs
from ..store.types import Claimed, Outcome

if TYPE_CHECKING:
    from dramatiq import Message
    from dramatiq.broker import MessageProxy

    from ..store.database import Database
    from .consumer import DurableConsumer

__all__ = ["Registry", "Run", "find_lost", "run_of"]

_ATTRIBUTE = "_durable_run"


def run_of(message: MessageProxy) -> Run | None:
    """Return the claim under which *message* is being processed, if it has one."""
    # NOTE: A proxy forwards unknown names to the message, so getattr() would raise; its own dict is asked instead.
    return message.__dict__.get(_ATTRIBUTE)


class Run:
    """One claim on one job, and what has become of it in this process.

    Attributes:
      valid_until(float): When the lease runs out at the latest, on this process's monotonic clock, counted from before
        the statement that took or renewed it was sent.
      strict(bool): Whether the start must be committed before the actor runs.
      suspect(bool): Whether one more lost run would fail the job for good, so that it should run alone in its process.
      alone(bool): Whether nothing else ran in this process when it started.
      admitted(bool): Whether it counts among the runs of this process.
      began(float): When the actor began (monotonic), or ``None``.
      thread_id(int): The thread that runs the actor now, or ``None``; changed only under the registry's lock.
      greenlet(Greenlet): The greenlet that runs it, under gevent, or ``None``.
      lost(bool): Whether the row is known to be someone else's.
      refused(bool): Whether its start was refused, so that the actor did not run and there is nothing to write.
      outcome(Outcome): How it ended, once that is decided.
      verdict(tuple): What the actor returned and raised, as it was first seen; what lands on the hooks later is not it.
      decided(bool): Whether a heartbeat has seen the outcome, not handed over yet.
      submitted(bool): Whether the writer has been given the outcome.
      reported(bool): Whether the writer has told what became of the outcome.
      answer(str): What the broker is to be told after the commit: ``"ack"``, ``"nack"``, or ``None`` for nothing.
      max_runtime(float): Seconds after its start at which the lease is no longer renewed, or ``None``.
      on_lost(str): What becomes of the job if this process dies while its actor runs.
      again(tuple): The own message that the actor enqueued ("run me again later") with its delay.
      children(dict): Counts the jobs that this run has sent, per actor.
    """

    __slots__ = (
        "admitted",
        "again",
        "alone",
        "answer",
        "attempt",
        "began",
        "children",
        "claim",
        "consumer",
        "decided",
        "greenlet",
        "id",
        "interrupted",
        "lost",
        "max_runtime",
        "message",
        "on_lost",
        "outcome",
        "refused",
        "reported",
        "retries",
        "started",
        "strict",
        "suspect",
        "thread_id",
        "submitted",
        "valid_until",
        "verdict",
    )

    def __init__(
        self,
        claimed: Claimed,
        message: MessageProxy,
        consumer: DurableConsumer,
        valid_until: float,
        on_lost: str = "rerun",
        max_runtime: float | None = None,
        max_lost: int = 3,
    ) -> None:
        self.id = claimed.id
        self.claim = claimed.claim
        self.attempt = claimed.attempt
        self.retries = claimed.retries
        self.message = message
        self.consumer = consumer
        self.valid_until = valid_until
        self.on_lost = on_lost
        lost_before = bool(claimed.lost_claims or claimed.lost)
        self.strict = lost_before or on_lost != "rerun"
        self.suspect = lost_before and claimed.lost + 1 >= max_lost
        self.alone = False
        self.admitted = False
        self.started = False
        self.began: float | None = None
        self.max_runtime = max_runtime
        self.thread_id: int | None = None
        self.greenlet: Any = None
        self.interrupted = False
        self.lost = False
        self.refused = False
        self.outcome: Outcome | None = None
        self.verdict: tuple[Any, BaseException | None] | None = None
        self.decided = False
        self.submitted = False
        self.reported = False
        self.answer: str | None = None
        self.again: tuple[Message[Any], int] | None = None
        self.children: dict[str, itertools.count[int]] = {}
        message.__dict__[_ATTRIBUTE] = self

    def ran_for(self) -> int:
        """Return for how many milliseconds the actor has run."""
        return 0 if self.began is None else int((time.monotonic() - self.began) * 1000)

    def next_ordinal(self, actor_name: str) -> int:
        """Count one more job sent to *actor_name*; return how many were sent before."""
        # Threads of one actor may send at the same time; of two jobs with one id the second would be taken for a copy.
        return next(self.children.setdefault(actor_name, itertools.count()))


#: How long a suspect waits for the other runs of the process to end, and how long the others then wait for it
#: (seconds). What kills a process does so in its first seconds, as a rule; longer waits would cost more than they tell.
PATIENCE, SOLITUDE = 10.0, 30.0


class Registry:
    """The claims of this process.  An id is here before its claim is sent and until its outcome is committed, so that a
    row with our name on it that is *not* here is an orphan.

    It also sees to it that a suspect (a job whose workers have died again and again) runs alone in the process: if the
    process dies once more, the job is the culprit, and no neighbour is failed with it.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything: a process that was just forked holds nothing."""
        self._changed = threading.Condition()
        self._greenlets = greenlets.active()
        self._runs: dict[str, Run | None] = {}
        self._admitted = 0
        self._suspect: Run | None = None
        self._suspect_until = 0.0
        self._hurried = False

    def begin(self, ids: list[str]) -> set[str]:
        """Announce that *ids* are about to be claimed; return those that are not held or announced already.  A run that
        was taken over, and may hang, does not keep its job from being claimed anew.
        """
        with self._changed:
            fresh = {id for id in ids if id not in self._runs or _is_lost(self._runs[id])}
            self._runs.update(dict.fromkeys(fresh))
        return fresh

    def hold(self, run: Run) -> None:
        """Keep a claim that was granted."""
        with self._changed:
            self._runs[run.id] = run

    def drop(self, *ids: str) -> None:
        """Forget claims that are over, or were not granted."""
        with self._changed:
            for id in ids:
                self._runs.pop(id, None)

    def forget(self, run: Run) -> None:
        """Forget *run*, unless the same job was claimed anew meanwhile."""
        with self._changed:
            if self._runs.get(run.id) is run:
                del self._runs[run.id]
            if run.admitted:
                run.admitted = False
                self._admitted -= 1
                if self._suspect is run:
                    self._suspect = None
                self._changed.notify_all()

    def __contains__(self, id: str) -> bool:
        return id in self._runs

    def get(self, id: str) -> Run | None:
        return self._runs.get(id)

    def runs(self) -> list[Run]:
        """Return the claims that were granted."""
        # NOTE: Copied in one step instead of under the lock, which belongs to greenlets where there are any.
        return [run for run in list(self._runs.values()) if run is not None]

    def crowded(self) -> bool:
        """Return whether a suspect runs, or waits to run, so that others have to wait."""
        return self._suspect is not None

    def hurry(self, hurried: bool = True) -> None:
        """The process stops: nobody shall wait any more."""
        with self._changed:
            self._hurried = hurried
            self._changed.notify_all()

    def admit(self, run: Run) -> bool:
        """Count *run* among the runs of this process, after waiting for a suspect, or as the suspect for the others;
        ``False`` when the process stops while it would have to wait.
        """
        with self._changed:
            while self._suspect is not None and (left := self._suspect_until - time.monotonic()) > 0:
                if self._hurried:
                    return False
                self._changed.wait(left)
            if run.suspect and not self._isolate(run):
                return False
            run.admitted = True
            self._admitted += 1
            return True

    def _isolate(self, run: Run) -> bool:
        """Wait until nothing else runs, for a while; ``False`` when the process stops meanwhile."""
        self._suspect, self._suspect_until = run, time.monotonic() + PATIENCE
        waited = False
        try:
            while self._admitted and (left := self._suspect_until - time.monotonic()) > 0:
                if self._hurried:
                    return False
                self._changed.wait(left)
            waited = True
        finally:
            if not waited:
                # An interrupt, or the end: nobody is to wait for it.
                self._suspect = None
                self._changed.notify_all()
        run.alone = not self._admitted
        self._suspect_until = time.monotonic() + (SOLITUDE if run.alone else 0)
        self._changed.notify_all()
        return True

    def enter(self, run: Run) -> bool:
        """Mark that this thread begins to run the actor; ``False`` when the job has been lost meanwhile."""
        with self._changed:
            if run.lost:
                return False
            run.thread_id = threading.get_ident()
            run.greenlet = greenlets.current() if self._greenlets else None
            run.began = time.monotonic()
            run.started = True
            return True

    def leave(self, run: Run) -> None:
        """Mark that the actor has returned: from here on nothing of ours interrupts this thread for this job."""
        with self._changed:
            interrupted, run.interrupted = run.interrupted and run.thread_id is not None, False
            run.thread_id = None
            run.greenlet = None
        if interrupted:
            _absorb_interrupt(self._greenlets)

    def lose(self, run: Run) -> None:
        """Mark *run* as someone else's, and interrupt the thread if its actor is still running.

        The thread is looked at under the same lock under which it enters and leaves, so that the interrupt cannot hit
        the next job of that thread.
        """
        with self._changed:
            run.lost = True
            if run.thread_id is not None and not run.interrupted:
                run.interrupted = True
                if run.greenlet is not None:
                    greenlets.interrupt(run.greenlet, LeaseLost)
                else:
                    raise_thread_exception(run.thread_id, LeaseLost)


def _is_lost(run: Run | None) -> bool:
    return run is not None and run.lost


def find_lost(db: Database, owner: str, registry: Registry, runs: list[Run]) -> list[Run]:
    """Return those of *runs* whose job is someone else's by now; they are marked so, and interrupted.

    Raises:
      StoreError: If the database does not answer.
    """
    standing = jobs.locate(db, [run.id for run in runs])
    lost = []
    for run in runs:
        row = standing.get(run.id)
        if row is not None and row.owner == owner and row.claim == run.claim:
            continue
        # What is settled just now has moved by our own doing, and if not, the fence says so.
        if run.outcome is None and registry.get(run.id) is run:
            registry.lose(run)
            lost.append(run)
    return lost


def _absorb_interrupt(among_greenlets: bool) -> None:
    """Let an interrupt that was sent just before the actor returned surface here, where it does no harm."""
    try:
        if among_greenlets:
            greenlets.let_others_run()
        for _ in range(1000):
            pass
    except LeaseLost:
        pass
