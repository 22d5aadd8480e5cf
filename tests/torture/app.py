"""The application under torture: every run says in the journal when it began and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO, CurrentMessage
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

import dramatiq_durable as durable
from tests.harness.journal import Journal

ROOM = Path(os.environ["DURABLE_TEST_ROOM"])
journal = Journal(ROOM / "journal")

# Dramatiq gives back what a dead process had fetched after a minute, and looks for it once in a thousand commands.
# Here both happen all the time.
broker = RedisBroker(url=os.environ["DURABLE_TEST_REDIS"], heartbeat_timeout=4_000, maintenance_chance=50_000)
results = RedisBackend(url=os.environ["DURABLE_TEST_REDIS"])
broker.add_middleware(Results(backend=results))
broker.add_middleware(CurrentMessage())
broker.add_middleware(AsyncIO())
durable.install(broker)
dramatiq.set_broker(broker)


def wall() -> int:
    """Return the time as the database tells it, in milliseconds."""
    return int(time.time() * 1000)


def message() -> dramatiq.Message[Any]:
    found = CurrentMessage.get_current_message()
    assert found is not None
    return found


@contextlib.contextmanager
def told() -> Iterator[dramatiq.Message[Any]]:
    """Tell the journal about one run."""
    current, run, how = message(), uuid.uuid4().hex, "ok"
    journal.note("begin", current.message_id, {"run": run, "wall": wall(), "actor": current.actor_name})
    try:
        yield current
    except BaseException as e:
        how = type(e).__name__
        raise
    finally:
        journal.note("end", current.message_id, {"run": run, "wall": wall(), "how": how})


def nap(seconds: float) -> None:
    """Sleep so that an interrupt lands soon."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.02)


QUICKLY = {"max_retries": 12, "min_backoff": 100, "max_backoff": 400}


@dramatiq.actor(store_results=True, **QUICKLY)
def quick(value: Any = None) -> Any:
    with told():
        return value


@dramatiq.actor(queue_name="side", **QUICKLY)
def side(value: Any = None) -> None:
    with told():
        pass


@dramatiq.actor(**QUICKLY)
def slow(seconds: float) -> None:
    with told():
        nap(seconds)


@dramatiq.actor(**QUICKLY)
def flaky(failures: int) -> None:
    with told() as current:
        if current.options.get("retries", 0) < failures:
            raise RuntimeError("flaky on purpose")


@dramatiq.actor(max_retries=1, min_backoff=100, max_backoff=200, store_results=True)
def breaks() -> None:
    with told():
        raise ValueError("broken on purpose")


@dramatiq.actor(store_results=True, **QUICKLY)
def stage(root: str, number: int, before: Any = None) -> int:
    with told():
        if number:
            assert before == number - 1, (root, number, before)
        return number


@dramatiq.actor(**QUICKLY)
def parent(children: int, seconds: float) -> None:
    with told():
        for i in range(children):
            quick.send(i)
            nap(seconds / children)


@dramatiq.actor(store_results=True, **QUICKLY)
async def coroutine(value: Any = None) -> Any:
    with told():
        await asyncio.sleep(0.05)
        quick.send(value)
        await asyncio.sleep(0.05)
        return value


@dramatiq.actor(max_retries=1, min_backoff=100, max_backoff=200, time_limit=600)
def limited() -> None:
    with told():
        nap(5)


@dramatiq.actor(on_lost="hold", **QUICKLY)
def careful(seconds: float) -> None:
    with told():
        nap(seconds)


@dramatiq.actor(on_lost="fail", **QUICKLY)
def once(seconds: float) -> None:
    with told():
        nap(seconds)


@dramatiq.actor(notify_shutdown=True, **QUICKLY)
def interruptible(seconds: float) -> None:
    with told():
        nap(seconds)


@dramatiq.actor(**QUICKLY)
def note_success(message: dict[str, Any], result: Any) -> None:
    with told():
        journal.note("on_success", message["message_id"], result)
