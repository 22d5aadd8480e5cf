"""The places at which a process may die, by name; for tests, and at no cost when none is armed.

Every write to the record and every word to the broker is one call, and a process can be lost before or after each.  So
the points are those calls: nothing stands in the code for them, and arming one wraps the call.  A test of this package
fails when a statement that moves a job belongs to no point.  (The idea of naming the points is that of DBOS's debug
triggers and SQLite's test suite; that they need no code of their own is ours.)
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from dramatiq.brokers.redis import _RedisConsumer
from dramatiq.errors import ConnectionClosed

from .brokers.redis import RedisView
from .errors import DatabaseUnavailable
from .runtime import capture
from .store import jobs, outcomes, recovery

__all__ = ["ACTIONS", "POINTS", "arm"]

#: Each point: where its call lives, and whether it speaks to the database or to the broker.
POINTS: dict[str, tuple[Any, str, str]] = {
    "record": (jobs, "record", "database"),
    "record_many": (jobs, "record_many", "database"),
    "claim": (jobs, "claim", "database"),
    "start": (jobs, "start", "database"),
    "renew": (jobs, "renew", "database"),
    "release": (jobs, "release", "database"),
    "settle": (outcomes, "settle", "database"),
    "mark_stored": (outcomes, "mark_stored", "database"),
    "take_due": (recovery, "take_due", "database"),
    "unpublish": (recovery, "unpublish", "database"),
    "put_back": (recovery, "put_back", "database"),
    "reap": (recovery, "reap", "database"),
    "unpark": (recovery, "unpark", "database"),
    "keep_undecodable": (recovery, "keep_undecodable", "database"),
    "publish": (RedisView, "publish", "broker"),
    "store_result": (capture, "store_result", "broker"),
    "ack": (_RedisConsumer, "ack", "broker"),
    "nack": (_RedisConsumer, "nack", "broker"),
    "requeue": (_RedisConsumer, "requeue", "broker"),
}


def _kill(point: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _freeze(point: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _refuse(point: str) -> None:
    if POINTS[point][2] == "database":
        raise DatabaseUnavailable(f"The database refuses at the point {point!r}: a test asked for it.")
    raise ConnectionClosed(ConnectionError(f"The broker refuses at the point {point!r}: a test asked for it."))


ACTIONS: dict[str, Callable[[str], None]] = {"kill": _kill, "freeze": _freeze, "refuse": _refuse}


def arm(
    point: str, when: str, action: str, *, times: int = 1, told: Callable[[str], None] = lambda point: None
) -> None:
    """Have something happen at *point*, the next *times* that this process gets there.

    Parameters:
      point(str): A name out of :data:`POINTS`.
      when(str): ``"before"`` the call or ``"after"`` it, when it is done and its answer is about to be lost.
      action(str): ``"kill"`` (SIGKILL to this process), ``"freeze"`` (SIGSTOP) or ``"refuse"`` (the call raises).
      times(int): How often.
      told(Callable): Called with the point's name right before the action.

    Raises:
      ValueError: If there is no such point, moment or action.
    """
    if point not in POINTS or when not in ("before", "after") or action not in ACTIONS:
        raise ValueError(f"there is no crash point {when} {point!r} with the action {action!r}")
    home, name, _ = POINTS[point]
    call = getattr(home, name)
    left = times

    def happen() -> None:
        nonlocal left
        if left > 0:
            left -= 1
            told(point)
            ACTIONS[action](point)

    @functools.wraps(call)
    def armed(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            happen()
            return call(*args, **kwargs)
        answer = call(*args, **kwargs)
        happen()
        return answer

    setattr(home, name, armed)
