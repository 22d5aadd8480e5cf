"""The first middleware of the list: the record, the claim and the outcome of every job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dramatiq.middleware import CurrentMessage, SkipMessage
from dramatiq.worker import _WorkerMiddleware

from ..errors import InvalidSettings
from ..runtime.capture import Capture
from ..runtime.current import thread
from ..runtime.held import Run, run_of
from ..runtime.verdict import decide, decide_skipped, evidence_of
from ..store.types import Outcome
from .base import DurableMiddleware, boot

if TYPE_CHECKING:
    from dramatiq import Actor, Broker, Worker
    from dramatiq.broker import MessageProxy
    from dramatiq.worker import ConsumerThread, WorkerThread

__all__ = ["DurableRecord"]

#: What may become of a job whose worker died while its actor ran.
ON_LOST = ("rerun", "hold", "fail")


class DurableRecord(DurableMiddleware):
    """Makes the database the record of every job.

    ``install()`` puts it first in the broker's list, so that its ``before_`` hooks run before all others and its
    ``after_`` hooks after all others, and its counterpart :class:`CaptureOutcome` last: the start is the last thing
    before the actor, the commit the last thing after it.

    Actor options:
      agent(str): Whom the job's spend is charged to; the actor's name by default.
      on_lost(str): What becomes of a job whose worker died while its actor ran: ``"rerun"`` (default), ``"hold"`` (wait
        for a person) or ``"fail"``.
      max_runtime(int): Milliseconds after which the lease of a running job is no longer renewed, so that another worker
        takes a job whose thread hangs.  Twice the actor's time limit by default.
    """

    @property
    def actor_options(self) -> set[str]:
        return {"agent", "on_lost", "max_runtime"}

    def before_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        on_lost = actor.options.get("on_lost", "rerun")
        if on_lost not in ON_LOST:
            raise InvalidSettings(
                f"Actor {actor.actor_name!r}: on_lost must be one of {', '.join(map(repr, ON_LOST))}, not {on_lost!r}."
            )
        max_runtime = actor.options.get("max_runtime")
        if max_runtime is not None and not (isinstance(max_runtime, (int, float)) and max_runtime > 0):
            raise InvalidSettings(
                f"Actor {actor.actor_name!r}: max_runtime must be a positive number of milliseconds, not "
                f"{max_runtime!r}."
            )
        agent = actor.options.get("agent")
        if agent is not None and not (isinstance(agent, str) and agent):
            raise InvalidSettings(f"Actor {actor.actor_name!r}: agent must be a name, not {agent!r}.")

    # The process

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        _forget_stopped(broker)
        with boot():
            self.engine.start(worker)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self.engine.begin_stop()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self.engine.stop()
        _forget_stopped(broker)

    def before_worker_thread_shutdown(self, broker: Broker, thread: WorkerThread) -> None:
        self.engine.db.close_thread()

    def before_consumer_thread_shutdown(self, broker: Broker, thread: ConsumerThread) -> None:
        self.engine.db.close_thread()

    # A job

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        # Also what an earlier message may have left open, if interrupts broke into its hooks.
        thread.settled = thread.capture = None
        run = run_of(message)
        if run is None:
            message.fail()
            raise SkipMessage(f"Message {message.message_id} was not claimed; it is not run.")
        if run.lost:
            raise SkipMessage(f"Job {run.id} was taken over by another worker.")

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        run = run_of(message)
        if run is None or run.outcome is not None:
            return
        capture = self._close(run)
        if run.verdict is not None and run.verdict[1] is not exception:
            # An interrupt broke into the hooks, and they ran as if it had hit the actor.  The actor's own end counts.
            self.engine.conclude(run)
            return
        try:
            run.outcome = decide(broker, run, message, exception, capture)
        except Exception as e:
            self.logger.critical("The outcome of job %s could not be determined.", run.id, exc_info=True)
            message.fail()
            run.outcome = Outcome(
                run.id, run.claim, "failed", ran_for=run.ran_for(), reason="no_outcome", evidence=evidence_of(e)
            )
        finally:
            thread.capture = None

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        run = run_of(message)
        if run is None:
            return
        capture = self._close(run)
        self._reset_current_message(broker, message)
        try:
            # A run that was stopped before its actor is either someone else's, or stays unacknowledged: neither has an
            # outcome.
            if not run.refused:
                run.outcome = decide_skipped(broker, run, message, capture)
        finally:
            thread.capture = None

    def _reset_current_message(self, broker: Broker, message: MessageProxy) -> None:
        """``CurrentMessage`` has no hook for skipped messages: the thread would go on showing this one."""
        for middleware in broker.middleware:
            if isinstance(middleware, CurrentMessage):
                middleware.after_process_message(broker, message)

    def _close(self, run: Run) -> Capture:
        """Return what :class:`CaptureOutcome` began to catch on this thread.

        If its hook was not reached (an interrupt on the way), nothing was caught and nothing is sent on.
        """
        thread.settled = run
        capture = thread.capture
        return capture if capture is not None and capture.run is run else Capture(run)


def _forget_stopped(broker: Broker) -> None:
    """Take out what Dramatiq leaves behind of workers that have stopped, or that ran in the parent of a fork.

    A queue that is declared later would get a consumer that feeds a worker without threads: its jobs would be claimed,
    and held for ever.
    """
    broker.middleware[:] = [
        m
        for m in broker.middleware
        if not isinstance(m, _WorkerMiddleware) or any(thread.is_alive() for thread in m.worker.workers)
    ]
