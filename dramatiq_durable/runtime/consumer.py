"""The consumer that claims: it stands between Dramatiq's consumer thread and the broker's own consumer.

A message is only a hint.  What comes through here has been claimed on its row, a whole fetched batch in one statement;
everything else (duplicates, late copies, jobs of other releases, payloads that cannot be read) is dealt with on the
spot and acknowledged, because its row is the record and reconciliation starts from rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from dramatiq.broker import Consumer, MessageProxy
from dramatiq.common import q_name
from dramatiq.errors import DecodeError
from dramatiq.logging import get_logger

from ..errors import StoreError
from ..store import jobs, recovery
from ..store.types import Claimed, NewJob, Outcome
from . import messages
from .held import Registry, Run, find_lost, run_of

if TYPE_CHECKING:
    from dramatiq import Broker

    from ..brokers.base import BrokerView
    from ..store.database import Database
    from .counters import Counters
    from .options import Options
    from .writer import Writer

__all__ = ["DurableConsumer", "Host"]

#: How long a consumer pauses when it may not fetch, or when the database does not answer (seconds).
PAUSE = 0.1

#: How often a consumer that fetches nothing shows the broker that its process is alive (seconds).  Dramatiq's own
#: default for "offline" is a minute.
TOUCH_INTERVAL = 10.0


class Host(Protocol):
    """What a consumer needs of its process."""

    broker: Broker
    view: BrokerView
    db: Database
    registry: Registry
    writer: Writer
    options: Options
    counters: Counters
    stopping: bool

    @property
    def owner(self) -> str: ...

    def ready(self) -> bool: ...

    def staffed(self) -> bool: ...

    def drain(self) -> None: ...

    def conclude(self, run: Run) -> None: ...

    def run_options(self, message: MessageProxy) -> tuple[str, float | None]: ...


class DurableConsumer(Consumer):
    """Wraps the consumer of one queue.

    Parameters:
      host(Host)
      inner(Consumer): The broker's own consumer.
      queue_name(str): The queue, a delay queue included.
    """

    def __init__(self, host: Host, inner: Consumer, queue_name: str) -> None:
        self.logger = get_logger(__name__, type(self))
        self.host = host
        self.inner = inner
        self.queue_name = queue_name
        self._fetched: list[MessageProxy] = []
        self._claimable: deque[MessageProxy] = deque()
        self._announced: set[str] = set()
        self._repeat = False
        self._pause = PAUSE
        self._touched = time.monotonic()

    # Fetching

    def __next__(self) -> MessageProxy | None:
        if self._claimable:
            return self._claimable.popleft()
        if self.host.stopping or not self.host.staffed() or not self.host.ready():
            self._idle()
            return None
        if not self._fetched:
            self._fetch()
        if self._fetched:
            try:
                self._sort()
                self._pause = PAUSE
            except StoreError as e:
                # The reply may have been lost after the commit: the next try accepts what this process holds already.
                self._repeat = True
                self.logger.warning("Messages of queue %r wait for the database: %s", self.queue_name, e)
                self._idle()
                self._pause = min(self._pause * 2, 1.0)
        if self._claimable:
            return self._claimable.popleft()
        self._stay_alive()
        return None

    def _idle(self) -> None:
        self._stay_alive()
        time.sleep(self._pause)

    def _stay_alive(self) -> None:
        now = time.monotonic()
        if now - self._touched >= TOUCH_INTERVAL:
            self._touched = now
            try:
                self.host.view.touch(self.queue_name)
            except Exception as e:
                self.logger.debug("The broker could not be touched: %s", e)

    def _fetch(self) -> None:
        """Take what the broker's consumer has: one message, and all that came with it."""
        while True:
            try:
                message = next(self.inner)
            except DecodeError as e:
                self._keep_undecodable(e)
                if not self.host.view.has_fetched(self.inner):
                    return
                continue
            if message is None:
                return
            flaw = messages.flaw_of(message)
            if flaw is None:
                self._fetched.append(message)
            else:
                self._keep_flawed(message, flaw)
            if not self.host.view.has_fetched(self.inner):
                return

    def _keep_undecodable(self, error: DecodeError) -> None:
        why = f"{type(error.error).__name__}: {error.error}"
        self._keep(error.data, why, lambda: self.host.view.drop_undecodable(self.inner, error.data))

    def _keep_flawed(self, message: MessageProxy, flaw: str) -> None:
        try:
            payload = message.encode()
        except Exception:
            payload = repr(message._message).encode("utf-8", "backslashreplace")
        self._keep(payload, flaw, lambda: self.inner.ack(message))

    def _keep(self, payload: bytes, why: str, drop: Callable[[], None]) -> None:
        """Keep the bytes of a message that cannot be recorded, and take it out of the broker."""
        self.logger.error("A message on queue %r cannot be read; its bytes are kept: %s", self.queue_name, why)
        while True:
            try:
                recovery.keep_undecodable(self.host.db, self.queue_name, payload, why, None)
                break
            except StoreError as e:
                if self.host.stopping:
                    return
                self.logger.warning("A message that cannot be read waits for the database: %s", e)
                self._stay_alive()
                time.sleep(1)
        self.host.counters.undecodable += 1
        try:
            drop()
        except Exception as e:
            self.logger.warning("A message that cannot be read could not be removed from the broker: %s", e)

    # Claiming

    def _sort(self) -> None:
        """Claim what can be claimed of the fetched messages and answer the others.

        Raises:
          StoreError: If the database does not answer; then nothing is answered and all can be tried again.
        """
        batch = self._announce()
        for _ in range(3):
            batch = self._claim_batch(batch)
            if not batch:
                break
        self._repeat = False
        # What is left became claimable only now, between two looks: it comes again with the next round.
        self._fetched += batch.values()

    def _announce(self) -> dict[str, MessageProxy]:
        """Tell the registry what is about to be claimed; answer copies of what this process has in hand already."""
        self._find_lost()
        fetched, self._fetched = self._fetched, []
        batch: dict[str, MessageProxy] = {}
        fresh = self.host.registry.begin([m.message_id for m in fetched]) | self._announced
        for message in fetched:
            id = message.message_id
            if id in fresh and id not in batch:
                batch[id] = message
                continue
            run = self.host.registry.get(id)
            if run is not None and run.outcome is not None and id not in batch:
                # Its last run is about to be committed; this copy may be for the next one.
                self._fetched.append(message)
            else:
                self._quiet(message)
        self._announced = set(batch)
        if not batch and self._fetched:
            time.sleep(0.005)
        return batch

    def _find_lost(self) -> None:
        """Look at jobs that this process is running while one more copy comes: it may be the one of a taken-over job,
        put back for a run that counts.  Taking it for a duplicate would lose it.
        """
        host = self.host
        runs = [host.registry.get(message.message_id) for message in self._fetched]
        held = [run for run in runs if run is not None and run.outcome is None and not run.lost]
        for run in find_lost(host.db, host.owner, host.registry, held) if held else []:
            host.counters.lost += 1
            self.logger.warning("Job %s was taken over while this process ran it; its run no longer counts.", run.id)

    def _claim_batch(self, batch: dict[str, MessageProxy]) -> dict[str, MessageProxy]:
        """Claim *batch*; return what has to be claimed again."""
        if not batch:
            return {}
        host = self.host
        try:
            before = time.monotonic()
            claims = jobs.claim(host.db, host.owner, list(batch), host.options.lease, again=self._repeat)
            granted = {claimed.id: claimed for claimed in claims}
            refused = [id for id in batch if id not in granted]
            standing = jobs.locate(host.db, refused) if refused else {}
            strangers = [id for id in refused if id not in standing]
            adopted = self._adopt([batch[id] for id in strangers])
            reloaded = self._reload({id: batch[id] for id in granted}, granted)
        except Exception:
            # Whatever it was, the messages are in hand and nothing has been said about them.
            self._fetched += batch.values()
            raise
        again: dict[str, MessageProxy] = {}
        for id, message in batch.items():
            if id in granted:
                self._take(message, granted[id], before, reloaded)
            elif id in adopted or (id in standing and standing[id].state == "queued"):
                again[id] = message
            else:
                host.registry.drop(id)
                self._announced.discard(id)
                self._quiet(message)
        return again

    def _adopt(self, strangers: list[MessageProxy]) -> set[str]:
        """Record messages that have no row; return the ids of those that may run.

        A message without our mark was sent by a process that is not equipped: it is adopted.  One with our mark had a
        row once, which was pruned: it is parked and never run.
        """
        host = self.host
        rows: list[NewJob] = []
        runnable: set[str] = set()
        for message in strangers:
            pruned = messages.revision_of(message) is not None
            due_at = messages.due_time(message.options.get("eta"))
            delayed = due_at is not None and (self.queue_name.endswith(".DQ") or messages.until_due(message) > 0)
            parked = "no_row" if pruned else None if host.options.adopt else "not_adopted"
            rows.append(
                messages.new_job(
                    host.broker,
                    _adoptable(message._message),
                    max_payload=None,
                    due_at=due_at if delayed else None,
                    # A delayed copy is answered at once and its row published when due; others are in hand here.
                    broker_ref=None if delayed else host.view.reference(message._message),
                    origin="adopted",
                    parked=parked,
                )
            )
            if parked is None and not delayed:
                runnable.add(message.message_id)
        if rows:
            recorded = jobs.record_many(host.db, rows)
            host.counters.adopted += sum(1 for row in rows if row.id in recorded and row.parked is None)
            host.counters.parked += sum(1 for row in rows if row.id in recorded and row.parked is not None)
        return runnable

    def _reload(self, batch: dict[str, MessageProxy], granted: dict[str, Claimed]) -> dict[str, Any]:
        """Load the rows of claimed jobs whose message was made from another revision: what runs is the row's input.

        Returns:
          dict: The message for each of them, or ``None`` where this process cannot read the row's payload.
        """
        stale = [id for id, m in batch.items() if (messages.revision_of(m) or 1) != granted[id].revision]
        reloaded: dict[str, Any] = {}
        for id, row in jobs.load(self.host.db, stale).items() if stale else ():
            try:
                reloaded[id] = messages.rebuild(row)
            except Exception:
                self.logger.error("The payload of job %s cannot be read by this process.", id, exc_info=True)
                reloaded[id] = None
        return reloaded

    def _take(self, message: MessageProxy, claimed: Claimed, before: float, reloaded: dict[str, Any]) -> None:
        host = self.host
        unreadable = claimed.id in reloaded and reloaded[claimed.id] is None
        if claimed.id in reloaded and not unreadable:
            ref = message.options.get("redis_message_id")
            message._message = reloaded[claimed.id]
            if ref is not None:
                message.options["redis_message_id"] = ref
        elif claimed.retries:
            message.options["retries"] = claimed.retries
        message.options.pop("eta", None)
        on_lost, max_runtime = host.run_options(message)
        run = Run(
            claimed, message, self, before + host.options.lease / 1000, on_lost, max_runtime, host.options.max_lost
        )
        host.registry.hold(run)
        self._announced.discard(run.id)
        if unreadable:
            self._park(run, "undecodable")
        elif message.actor_name not in host.broker.actors:
            self._park(run, "unknown_actor")
        else:
            self._claimable.append(message)

    def _park(self, run: Run, reason: str) -> None:
        self.logger.warning("Job %s of actor %r is parked (%s).", run.id, run.message.actor_name, reason)
        self.host.counters.parked += 1
        run.outcome = Outcome(run.id, run.claim, "parked", started=False, reason=reason)
        run.answer = "ack"
        self.host.writer.submit(run)

    def _quiet(self, message: MessageProxy) -> None:
        """Acknowledge a copy that has nothing to do."""
        self.host.counters.duplicates += 1
        self.logger.debug("Message %s is a duplicate delivery or comes too late; acknowledged.", message.message_id)
        try:
            self.inner.ack(message)
        except Exception as e:
            # It comes again some time, and is recognised again.
            self.logger.debug("Duplicate %s could not be acknowledged: %s", message.message_id, e)

    # Answering

    def ack(self, message: MessageProxy) -> None:
        self._answer(message, "ack")

    def nack(self, message: MessageProxy) -> None:
        self._answer(message, "nack")

    def _answer(self, message: MessageProxy, answer: str) -> None:
        """Hand the run over to the writer: the broker hears of it after the commit."""
        run = run_of(message)
        if run is None:
            self.logger.critical("Message %s was processed without a claim; not acknowledged.", message.message_id)
            return
        if run.outcome is None and run.started and not run.lost:
            # The hooks that decide were interrupted; the last word is here.
            self.host.conclude(run)
            answer = "nack" if message.failed else "ack"
        if run.outcome is not None:
            run.answer = run.answer or answer
            try:
                self.host.writer.submit(run)
            except BaseException:
                # A late interrupt: without this the outcome would be lost, and the lease renewed for ever.
                self.host.writer.submit(run)
                raise
        elif run.lost:
            # Somebody else has the job; this copy has nothing to do any more.
            self.host.registry.forget(run)
            self._quiet(message)
        else:
            # The heartbeat finds a row with our name that nothing works on, and releases it.
            self.host.registry.forget(run)
            self.logger.warning("Job %s was not started; its message stays unacknowledged.", run.id)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Give back messages that will not be processed here: first the claims, then the copies."""
        given_back = list(messages)
        runs = [run for run in map(run_of, given_back) if run is not None and run.outcome is None]
        if runs:
            try:
                pairs = [(run.id, run.claim) for run in runs]
                jobs.release(self.host.db, self.host.owner, pairs, "worker_stopped")
            except StoreError as e:
                self.logger.warning("%d claims could not be released; their leases will run out: %s", len(runs), e)
            for run in runs:
                self.host.registry.forget(run)
        if given_back:
            try:
                self.inner.requeue(given_back)
            except Exception as e:
                # NOTE: Dramatiq's worker lets anything but its own connection error end the thread (or the shutdown).
                self.logger.warning("%d messages could not be requeued; their rows remain: %s", len(given_back), e)

    def close(self) -> None:
        if self.host.stopping:
            self.host.drain()
        left = [*self._claimable, *self._fetched]
        self._claimable.clear()
        self._fetched = []
        self.host.registry.drop(*self._announced)
        self._announced = set()
        self.requeue(left)
        try:
            self.inner.close()
        except Exception as e:
            self.logger.debug("The consumer of queue %r could not be closed: %s", self.queue_name, e)


def _adoptable(message: Any) -> Any:
    """Return *message* as it would have been sent: without what the broker added to this copy."""
    options = {name: value for name, value in message.options.items() if name not in ("redis_message_id", "eta")}
    copy = message.copy(queue_name=q_name(message.queue_name))
    copy.options.clear()
    copy.options.update(options)
    return copy
