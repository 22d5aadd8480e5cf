"""Reconciliation as a middleware."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.sweeper import Sweeper
from .base import DurableMiddleware, boot

if TYPE_CHECKING:
    from dramatiq import Broker, Worker

__all__ = ["Reconciler"]


class Reconciler(DurableMiddleware):
    """Puts right, from rows, what the queue lost and what dead workers left behind.

    It runs on a thread of every worker process; a leader lease lets one of them act at a time.  It is neither a job of
    the queue that it repairs nor a fork that nobody watches.

    Parameters:
      interval(int): Milliseconds between two looks at the broker; the setting ``reconcile_interval`` by default.
    """

    def __init__(self, *, interval: int | None = None) -> None:
        super().__init__()
        self.interval = interval
        self._sweeper: Sweeper | None = None

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        # NOTE: Not in after_process_boot, which comes before the app's modules are imported and never under a plain
        # Worker.
        if self._sweeper is not None:
            self._sweeper.stop()
        interval = self.interval or self.engine.options.reconcile_interval
        self._sweeper = Sweeper(self.engine, interval=interval)
        with boot():
            self._sweeper.start()

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        # Its thread may be waiting for a database that is away; the stop waits for it later.
        if self._sweeper is not None:
            self._sweeper.stop(0)

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        if self._sweeper is not None:
            self._sweeper.stop()
            self._sweeper = None
