"""One process's side of the record: what it is called, what it holds, and its threads."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dramatiq.logging import get_logger
from dramatiq.middleware import SkipMessage, TimeLimit

from ..errors import DatabaseUnavailable, StoreError
from ..store import jobs, migrate
from ..store.types import Outcome, WorkerInfo
from .capture import results_of
from .consumer import DurableConsumer
from .counters import Counters
from .courier import Courier
from .current import RUN, thread
from .heartbeat import Heartbeat
from .held import Registry, Run
from .options import STOP_TIMEOUT
from .scheduler import Scheduler
from .sending import Sender
from .writer import Stopping, Writer

if TYPE_CHECKING:
    from dramatiq import Broker, Message, Worker
    from dramatiq.broker import Consumer, MessageProxy
    from dramatiq.middleware import Middleware
    from dramatiq.results import ResultBackend

    from ..brokers.base import BrokerView
    from ..store.database import Database
    from .options import Options

__all__ = ["Engine"]


#: How long a stopping process lets a statement wait for its answer (seconds).
STATEMENT_TIMEOUT = 1.5

#: After how long a job is tried again that could not be started (milliseconds).
POSTPONED = 5_000

#: How often the hooks are run again when interrupts break into them.
CONCLUSIONS = 5

#: How often the log says that the database is away (seconds).
COMPLAINT_INTERVAL = 30.0


class Engine:
    """Joins a broker and a database in this process.

    Parameters:
      broker(Broker)
      db(Database)
      options(Options)
      view(BrokerView)
      plain_enqueue(Callable): The broker's own ``enqueue``.
      plain_consume(Callable): The broker's own ``consume``.
      connect(Callable): Describes the same database anew.
      check_order(Callable): Raises when the middlewares do not stand where they must.
      check_worker(Callable): Likewise, and when a worker lacks a piece.
    """

    def __init__(
        self,
        broker: Broker,
        db: Database,
        options: Options,
        view: BrokerView,
        *,
        plain_enqueue: Callable[..., Message[Any]],
        plain_consume: Callable[..., Consumer],
        connect: Callable[[], Database],
        check_order: Callable[[Broker], None],
        check_worker: Callable[[Broker], None],
    ) -> None:
        self.logger = get_logger(__name__, type(self))
        self.broker = broker
        self.db = db
        self.options = options
        self.view = view
        self.registry = Registry()
        self.counters = Counters()
        self.stopping = False
        self.started = False
        self._plain_consume = plain_consume
        self._connect = connect
        self._check_order = check_order
        self._check_worker = check_worker
        self._drain_until: float | None = None
        self._stop_began = float("-inf")
        self._checked: list[Middleware] = []
        self._worker: Worker | None = None
        self._build()
        self.sender = Sender(self, plain_enqueue)
        _reset_in_children(self)

    def _build(self) -> None:
        """Give this process its name and its threads, not started yet."""
        #: Fresh at every process start and after a fork, never a host's or a pod's name: a restarted process must not
        #: be taken for the one that died.
        self.owner = uuid.uuid4().hex
        self._stopped = threading.Event()
        self._stopper: threading.Thread | None = None
        self._ready = False
        self._asked = self._complained = -COMPLAINT_INTERVAL
        options = self.options
        self.writer = Writer(
            self.db,
            lambda: self.owner,
            self._committed,
            batch=options.commit_batch,
            max_interruptions=options.max_interruptions,
        )
        self.courier = Courier(self.db, self.result_backends)
        self.heartbeat = Heartbeat(
            self.db,
            lambda: self.owner,
            self.registry,
            self.counters,
            lease=options.lease,
            interval=options.heartbeat_interval,
            submit=lambda run: self.writer.submit(run, wait=False),
            stopping=lambda: self.stopping or not self.staffed(),
            connect=self._connect,
        )
        self.scheduler = Scheduler(self)

    def reset(self) -> None:
        """This is the child of a fork: it holds nothing, and nothing of its parent's is its own."""
        self.db.reset_after_fork()
        self.view.reset_after_fork()
        self.registry.clear()
        # NOTE: A fork inside an actor or a hook: the child is not the run.
        RUN.set(None)
        thread.capture = thread.sending = thread.settled = None
        self.counters = Counters()
        self.started = self.stopping = False
        self._build()

    # Life

    def start(self, worker: Worker) -> None:
        """Start this process's threads.

        Raises:
          ConfigurationError: If the middlewares are in the wrong order.
          SchemaOutdated, SchemaTooNew: If the tables do not fit this release.
        """
        if self.started and self.stopping:
            # The last stop broke off before its end (``Worker.stop`` raised).
            self.stop()
        self._worker = worker
        self.stopping = False
        self._drain_until = None
        self.db.hurry(False)
        self.registry.hurry(False)
        self._check_worker(self.broker)
        try:
            migrate.require_current(self.db)
            self._ready = True
        except DatabaseUnavailable as e:
            self.logger.critical("The database is away; nothing is fetched until it is back. %s", e)
        if self.started:
            return
        self.writer.start()
        self.courier.start()
        self.heartbeat.start()
        self.scheduler.start()
        self.started = True

    def begin_stop(self) -> None:
        """Fetch nothing more, and let nobody wait for a database that is away.  Leases are renewed and outcomes written
        as long as jobs run.
        """
        self.stopping = True
        self._stop_began = time.monotonic()
        self.db.hurry()
        self.registry.hurry()
        self.writer.stop_waiting()
        if self.started:
            self._stopped.clear()
            self._stopper = threading.Thread(target=self._break_off, name="durable-stop", daemon=True)
            self._stopper.start()

    def _break_off(self) -> None:
        """Break off statements that a silent database does not answer, as long as the stop lasts."""
        while not self._stopped.wait(0.2):
            self.db.break_off(STATEMENT_TIMEOUT)

    def stop(self) -> None:
        """Write what is left, stop the threads, and close this process's connections."""
        if not self.started:
            return
        self.drain()
        self.started = False
        parts = (self.scheduler, self.heartbeat, self.courier)
        for part in parts:
            part.stop(0)
        deadline = time.monotonic() + STOP_TIMEOUT
        left = self.writer.stop(STOP_TIMEOUT)
        for part in parts:
            part.stop(max(0.0, deadline - time.monotonic()))
        if left:
            self.logger.error(
                "The outcomes of %d jobs were not committed before the process had to stop, job %s among them; they "
                "are not acknowledged and will run again.",
                len(left),
                left[0].id,
            )
        self._stopped.set()
        if self._stopper is not None:
            self._stopper.join(STOP_TIMEOUT)
        # What still runs was given up by the worker.  Its lease is not renewed from here on, so it must not go on.
        for run in self.registry.runs():
            self.registry.lose(run)
        self.registry.clear()
        self.db.close_all()

    def drain(self) -> None:
        """Wait for the outcomes that were handed over: all calls of one stop together no longer than the shutdown
        timeout.  When no job kept the process, half of it has to do, counted from when it was told to stop, so that all
        of the stop takes no longer.
        """
        if self._drain_until is None:
            whole, now = self.options.shutdown_timeout / 1000, time.monotonic()
            kept = now - self._stop_began > whole
            self._drain_until = now + whole if kept else max(self._stop_began + whole / 2, now + 0.25)
        self.writer.drain(self._drain_until - time.monotonic())
        self.courier.drain(self._drain_until - time.monotonic())

    def ready(self) -> bool:
        """Return whether the database is there and its tables fit; asks at most once a second."""
        if self._ready:
            return True
        now = time.monotonic()
        if now - self._asked < 1:
            return False
        self._asked = now
        try:
            migrate.require_current(self.db)
            self._ready = True
        except StoreError as e:
            if now - self._complained >= COMPLAINT_INTERVAL:
                self._complained = now
                self.logger.critical("Nothing is fetched: %s", e)
        return self._ready

    def staffed(self) -> bool:
        """Return whether there is a thread to run jobs: an interrupt that lands on a hook may end one, and Dramatiq
        would go on fetching for those that are dead.
        """
        threads = self._worker.workers if self._worker is not None else []
        if not threads or any(thread.is_alive() for thread in threads):
            return True
        now = time.monotonic()
        if not self.stopping and now - self._complained >= COMPLAINT_INTERVAL:
            self._complained = now
            self.logger.critical("All worker threads of this process are dead; it takes no more jobs. Restart it.")
        return False

    # What the parts ask for

    def check_order(self) -> None:
        """Raise when the middlewares do not stand where they must; looks only when they have changed."""
        if self.broker.middleware != self._checked:
            self._check_order(self.broker)
            self._checked = list(self.broker.middleware)

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30_000) -> Consumer:
        """``Broker.consume``, wrapped."""
        inner = self._plain_consume(queue_name, prefetch=prefetch, timeout=timeout)
        if not self.started:
            return inner
        return DurableConsumer(self, inner, queue_name)

    def wake_scheduler(self) -> None:
        self.scheduler.wake()

    def result_backends(self) -> list[ResultBackend]:
        return [middleware.backend for middleware in results_of(self.broker)]

    def worker_info(self) -> WorkerInfo:
        worker = self._worker
        queues = sorted(self.broker.get_declared_queues() - self.broker.get_declared_delay_queues())
        threads = worker.worker_threads if worker is not None else 0
        return WorkerInfo(self.owner, socket.gethostname(), os.getpid(), threads, ",".join(queues))

    def run_options(self, message: MessageProxy) -> tuple[str, float | None]:
        """Return what the actor's options say: ``on_lost``, and the seconds after which its lease is not renewed."""
        actor = self.broker.actors.get(message.actor_name)
        options = actor.options if actor is not None else {}
        limit = options.get("max_runtime")
        if limit is None:
            given = message.options.get("time_limit")
            if not isinstance(given, (int, float)) or not given > 0:
                # What is no number that makes sense, TimeLimit does not enforce either.
                given = options.get("time_limit") or self._time_limit()
            limit = 2 * given
        return options.get("on_lost", "rerun"), None if limit == float("inf") else limit / 1000

    def _time_limit(self) -> float:
        for middleware in self.broker.middleware:
            if isinstance(middleware, TimeLimit):
                return middleware.time_limit
        return float("inf")

    # A run, from the worker thread's side

    def begin(self, run: Run) -> None:
        """Start *run* on this thread, right before its actor.

        Raises:
          SkipMessage: If the job is someone else's by now, or the worker stops before its start could be written.
          Exception: Anything else that kept it from starting; see :meth:`postpone`.
        """
        if run.strict or self.db.away or self.registry.crowded() or time.monotonic() >= run.valid_until:
            with self._off_the_clock(run):
                self._admit(run)
                if run.strict or self.db.away or time.monotonic() >= run.valid_until:
                    self._start_strictly(run)
        else:
            self._admit(run)
        if not self.registry.enter(run):
            raise SkipMessage(f"Job {run.id} was taken over by another worker.")
        RUN.set(run)

    def _admit(self, run: Run) -> None:
        if not self.registry.admit(run):
            run.outcome = Outcome(run.id, run.claim, "released", started=False, reason="worker_stopped")
            raise SkipMessage(f"Job {run.id} was not started: the worker stops.")

    @contextlib.contextmanager
    def _off_the_clock(self, run: Run) -> Iterator[None]:
        """Waiting, for others or for the database, is not the actor's time: its time limit begins when it does."""
        limits = [middleware for middleware in self.broker.middleware if isinstance(middleware, TimeLimit)]
        for limit in limits:
            limit.after_process_message(self.broker, run.message)
        try:
            yield
        finally:
            for limit in limits:
                # What the broker swallows from this hook (a limit that is no number), it swallows here too.
                with contextlib.suppress(Exception):
                    limit.before_process_message(self.broker, run.message)

    def postpone(self, run: Run) -> None:
        """*run* could not be started for a reason of our own: it is tried again a little later, and nothing is
        charged.
        """
        run.outcome = Outcome(
            run.id, run.claim, "retry", started=False, delay=POSTPONED, counted=False, reason="not_started"
        )

    def _start_strictly(self, run: Run) -> None:
        """Commit the start before the actor runs; with the lease, which may have run out while the job waited."""
        before = time.monotonic()
        start = [(run.id, run.claim, run.on_lost, int(run.alone))]
        try:
            answer = self.writer.call(lambda: jobs.start(self.db, self.owner, start, self.options.lease), patient=True)
        except Stopping:
            raise SkipMessage(f"Job {run.id} was not started: the database is away and the worker stops.") from None
        if run.id not in answer:
            self.registry.lose(run)
            raise SkipMessage(f"Job {run.id} was taken over by another worker.")
        run.attempt = answer[run.id]
        run.valid_until = before + self.options.lease / 1000

    def end(self, run: Run) -> None:
        """The actor of *run* has returned."""
        RUN.set(None)
        self.registry.leave(run)

    def conclude(self, run: Run) -> None:
        """Let the hooks decide about *run* once more, by what its actor did, after an interrupt broke into them.

        An interrupt (a time limit, a shutdown) may land on any line, also in another middleware's after-hook; Dramatiq
        then runs all hooks again as if the actor had been interrupted, or ends the thread.  A finished job would be
        retried, or its next stage lost.
        """
        message = run.message
        if run.verdict is None:
            run.verdict = (None, message._exception or RuntimeError("The run was interrupted."))
        result, exception = run.verdict
        for _ in range(CONCLUSIONS):
            message.failed = False
            message._exception = exception
            message.options["retries"] = run.retries
            if not run.retries:
                del message.options["retries"]
            try:
                self.broker.emit_after("process_message", message, result=result, exception=exception)
            except BaseException as e:
                self.logger.warning("The hooks of job %s were interrupted: %r", run.id, e)
            if run.outcome is not None or run.lost:
                return
        message.fail()
        run.outcome = Outcome(run.id, run.claim, "failed", ran_for=run.ran_for(), reason="no_outcome")

    def _committed(self, run: Run, accepted: bool) -> None:
        """The outcome of *run* is committed, or was refused.  On the writer's thread."""
        self.registry.forget(run)
        # NOTE: A traceback keeps all that its frames refer to; Dramatiq drops it too when it is done with a message.
        run.verdict = None
        outcome = run.outcome
        if not accepted:
            self.counters.refused += 1
            run.outcome = None
            if run.answer is not None:
                run.answer = "ack"
            self.logger.warning("The outcome of job %s was refused: the job was taken over meanwhile.", run.id)
        elif outcome is not None and (outcome.follow_ups or outcome.kind in ("retry", "interrupted")):
            self.scheduler.wake()
        self.courier.deliver(run)


def _reset_in_children(engine: Engine) -> None:
    if not hasattr(os, "register_at_fork"):
        return
    reference = weakref.ref(engine)

    def reset() -> None:
        engine = reference()
        if engine is not None:
            engine.reset()

    os.register_at_fork(after_in_child=reset)
