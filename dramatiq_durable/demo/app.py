"""The app of the demo: what the worker processes import, and the process that sends.

Everything comes from the environment, as in any app.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage, Middleware
from redis import Redis

import dramatiq_durable as durable

from .journal import Journal

__all__ = ["ATTEMPTS", "broker", "flaky", "later", "long", "quick", "stage"]

#: A job that is killed every time must still come through: the demo kills without mercy.
ATTEMPTS = 1_000

room = Path(os.environ["DURABLE_DEMO_ROOM"])
redis_url = os.environ["DURABLE_DEMO_REDIS"]
journal = Journal(room / "journal")


class Guest(Middleware):
    """Tells the supervisor which process this is, and goes when the supervisor is gone, however it went."""

    def before_worker_boot(self, broker: dramatiq.Broker, worker: dramatiq.Worker) -> None:
        threading.Thread(target=self._watch, name="demo-guest", daemon=True).start()

    def after_worker_boot(self, broker: dramatiq.Broker, worker: dramatiq.Worker) -> None:
        journal.boot(os.environ["DURABLE_DEMO_LAUNCH"])

    def _watch(self) -> None:
        host = int(os.environ["DURABLE_DEMO_HOST"])
        try:
            while True:
                os.kill(host, 0)
                time.sleep(1)
        except ProcessLookupError:
            self._clear_away()

    def _clear_away(self) -> None:
        """Nobody else will: stop the server, remove the files, and end at once."""
        try:
            Redis.from_url(redis_url).shutdown(nosave=True)
        finally:
            if os.environ.get("DURABLE_DEMO_KEEP") != "1":
                shutil.rmtree(room, ignore_errors=True)
            os.kill(os.getpid(), signal.SIGKILL)


broker = RedisBroker(url=redis_url)
broker.add_middleware(CurrentMessage())
broker.add_middleware(Guest())
# The lease is short, so that one can watch: a minute is the default.
durable.install(
    broker,
    database_url=f"sqlite:///{room / 'jobs.sqlite3'}",
    lease=3_000,
    heartbeat_interval=700,
    reconcile_interval=1_000,
    scheduler_interval=200,
    publish_grace=500,
    max_lost=ATTEMPTS,
    max_interruptions=ATTEMPTS,
    shutdown_timeout=2_000,
    on_publish_error="warn",
    profile="development",
)
dramatiq.set_broker(broker)


def journaled(work: Callable[..., Any]) -> Callable[..., Any]:
    """Have *work* say when it begins and how it ends."""

    @functools.wraps(work)
    def run(*args: Any) -> Any:
        message = CurrentMessage.get_current_message()
        assert message is not None  # noqa: S101
        token = journal.begin(message.message_id)
        done = False
        try:
            result = work(*args)
            done = True
            return result
        finally:
            journal.end(token, done=done)

    return run


@dramatiq.actor(max_retries=ATTEMPTS)
@journaled
def quick(seconds: float) -> None:
    """A job like most: short."""
    time.sleep(seconds)


@dramatiq.actor(max_retries=ATTEMPTS)
@journaled
def later(seconds: float) -> None:
    """A job that is sent with a delay."""
    time.sleep(seconds)


@dramatiq.actor(max_retries=ATTEMPTS)
@journaled
def long(seconds: float) -> None:
    """A job that runs for longer than its lease."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)


@dramatiq.actor(max_retries=ATTEMPTS, min_backoff=300, max_backoff=1_000)
@journaled
def flaky(failures: int) -> None:
    """A job that fails a few times before it succeeds."""
    time.sleep(0.05)
    message = CurrentMessage.get_current_message()
    assert message is not None  # noqa: S101
    if message.options.get("retries", 0) < failures:
        raise ConnectionError("flaky on purpose")


@dramatiq.actor(max_retries=ATTEMPTS)
@journaled
def stage(number: int) -> int:
    """A stage of a pipeline; sends its result on to the next one."""
    time.sleep(0.1)
    return number + 1
