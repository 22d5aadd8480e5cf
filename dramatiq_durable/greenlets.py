"""gevent: "threads" are greenlets there, all on one native thread, which a job that computes keeps to itself.

Everything of ours runs in greenlets as it does in threads, but for the heartbeat: a lease must be renewed while a job
computes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["NativeThread", "active", "current", "interrupt", "let_others_run"]


def active() -> bool:
    """Return whether gevent has replaced this process's threads.  It is not imported to find out."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.saved)


def current() -> Any:
    """Return the greenlet that runs."""
    import gevent

    return gevent.getcurrent()


def interrupt(greenlet: Any, exception: type[BaseException]) -> None:
    """Have *exception* raised in *greenlet* as soon as it waits for something."""
    greenlet.kill(exception, block=False)


def let_others_run() -> None:
    """Give up the processor once; an interrupt that is under way arrives here."""
    import gevent

    gevent.sleep(0)


class NativeThread:
    """A real thread beside the one of the greenlets.

    NOTE: What it calls must not share locks with greenlets, Python's logging included: gevent's locks are made for
    greenlets of one thread.  So a turn does its own work and returns what greenlets are to do then.

    Parameters:
      turn(Callable): What to do at each interval; returns what a greenlet is to call then, or ``None``.
      interval(float): Seconds.
      finish(Callable): What to do at the end, on this thread.
    """

    def __init__(
        self, turn: Callable[[], Callable[[], None] | None], interval: float, finish: Callable[[], None]
    ) -> None:
        self._turn = turn
        self._interval = interval
        self._finish = finish
        self._alive = False
        self._until: Any = None
        self._loop: Any = None

    def start(self) -> None:
        from gevent import get_hub, monkey

        self._loop = get_hub().loop
        # Locked until the end.
        self._until = monkey.get_original("_thread", "allocate_lock")()
        self._until.acquire()
        self._alive = True
        monkey.get_original("_thread", "start_new_thread")(self._run, ())

    def stop(self, timeout: float) -> None:
        if self._until is not None and self._until.locked():
            self._until.release()
        deadline = time.monotonic() + timeout
        while self._alive and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        import gevent

        try:
            while not self._until.acquire(True, self._interval):
                then = self._turn()
                if then is not None:
                    self._loop.run_callback_threadsafe(gevent.spawn, then)
            self._finish()
        finally:
            self._alive = False
