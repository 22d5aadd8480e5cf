"""The application that the acceptance tests run in real worker processes: everything comes from the environment."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO, CurrentMessage, GroupCallbacks, Middleware, SkipMessage
from dramatiq.rate_limits.backends import RedisBackend as RateLimiterBackend
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

import dramatiq_durable as durable
from tests.harness.journal import Journal

ROOM = Path(os.environ["DURABLE_TEST_ROOM"])
journal = Journal(ROOM / "journal")


class Gate(Middleware):
    """Holds jobs between the fetch and the start for as long as a file is there."""

    def before_process_message(self, broker: dramatiq.Broker, message: dramatiq.broker.MessageProxy) -> None:
        if (ROOM / "gate").exists():
            journal.note("gated", message.message_id)
            while (ROOM / "gate").exists():
                time.sleep(0.02)


class Skipper(Middleware):
    """Skips messages that ask for it."""

    def before_process_message(self, broker: dramatiq.Broker, message: dramatiq.broker.MessageProxy) -> None:
        if message.options.get("skip_me"):
            raise SkipMessage("as asked")


broker = RedisBroker(
    url=os.environ["DURABLE_TEST_REDIS"],
    heartbeat_timeout=int(os.environ.get("DURABLE_TEST_HEARTBEAT_TIMEOUT", 60_000)),
)
results = RedisBackend(url=os.environ["DURABLE_TEST_REDIS"])
broker.add_middleware(Results(backend=results))
broker.add_middleware(CurrentMessage())
broker.add_middleware(AsyncIO())
broker.add_middleware(GroupCallbacks(RateLimiterBackend(url=os.environ["DURABLE_TEST_REDIS"])))
broker.add_middleware(Gate())
broker.add_middleware(Skipper())
if os.environ.get("DURABLE_TEST_PROMETHEUS") == "1":
    from dramatiq.middleware.prometheus import Prometheus

    broker.add_middleware(Prometheus())
if os.environ.get("DURABLE_TEST_PLAIN") != "1":
    durable.install(broker)
dramatiq.set_broker(broker)

if os.environ.get("DURABLE_TEST_CRASH"):
    # "after settle kill": at the first time this process gets there.
    from dramatiq_durable import crashpoints

    _when, _point, _action = os.environ["DURABLE_TEST_CRASH"].split()
    crashpoints.arm(_point, _when, _action, told=lambda point: journal.note("crash", point))


def me() -> str:
    message = CurrentMessage.get_current_message()
    assert message is not None
    return message.message_id


def wait_for(name: str) -> None:
    while not (ROOM / name).exists():
        time.sleep(0.02)


@dramatiq.actor(store_results=True)
def quick(value: Any = None) -> Any:
    journal.note("begin", me())
    journal.note("end", me(), value)
    return value


@dramatiq.actor(store_results=True)
def add(x: int, y: int) -> int:
    journal.note("begin", me())
    journal.note("end", me())
    return x + y


@dramatiq.actor(store_results=True)
def current() -> list[Any]:
    """Says which message it finds itself to be, and with which options."""
    message = CurrentMessage.get_current_message()
    assert message is not None
    journal.note("begin", message.message_id)
    journal.note("end", message.message_id)
    return [message.message_id, message.actor_name, message.queue_name]


@dramatiq.actor(store_results=True)
async def coroutine(value: Any) -> Any:
    journal.note("begin", me())
    await asyncio.sleep(0.01)
    sent = quick.send(value)
    journal.note("end", me(), sent.message_id)
    return value


@dramatiq.actor
async def async_parent(children: int, name: str) -> None:
    journal.note("begin", me())
    for i in range(children):
        quick.send(i)
    journal.note("sent", me())
    while not (ROOM / name).exists():
        await asyncio.sleep(0.02)
    journal.note("end", me())


@dramatiq.actor
async def async_threads(children: int) -> None:
    """Sends from many threads at once."""
    journal.note("begin", me())
    await asyncio.gather(*(asyncio.to_thread(quick.send, i) for i in range(children)))
    journal.note("end", me())


@dramatiq.actor(max_retries=0, notify_shutdown=True)
async def async_waits(name: str) -> None:
    """Waits for a file, and sends when it is there, or when it is cancelled."""
    journal.note("begin", me())
    try:
        while not (ROOM / name).exists():
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        journal.note("cancelled", me())
        raise
    finally:
        try:
            quick.send("on its way out")
        except Exception as e:
            journal.note("raised", me(), type(e).__name__)
        journal.note("end", me())


@dramatiq.actor(
    max_retries=0, time_limit=1_000, notify_shutdown=True, min_backoff=10, max_backoff=20, store_results=True
)
async def async_stubborn(name: str) -> str:
    """Resists its cancellation, and goes on until a file is there."""
    id = me()
    journal.note("begin", id)
    while not (ROOM / name).exists():
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            journal.note("resisted", id)
    try:
        quick.send("from a run that has ended")
    except Exception as e:
        journal.note("raised", id, type(e).__name__)
    journal.note("end", id)
    return "late"


@dramatiq.actor(store_results=True, max_retries=0)
def breaks(text: str = "broken on purpose") -> None:
    journal.note("begin", me())
    journal.note("end", me())
    raise ValueError(text)


@dramatiq.actor
def slow(seconds: float) -> None:
    journal.note("begin", me())
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.02)
    journal.note("end", me())


@dramatiq.actor
def ticks(name: str) -> None:
    """Says all the time that it is there, until a file is."""
    journal.note("begin", me())
    while not (ROOM / name).exists():
        journal.note("tick", me())
        time.sleep(0.05)
    journal.note("end", me())


@dramatiq.actor
def computes(seconds: float) -> None:
    """Never waits for anything."""
    journal.note("begin", me())
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass
    journal.note("end", me())


@dramatiq.actor
def held(name: str) -> None:
    """Runs until a file appears."""
    journal.note("begin", me())
    wait_for(name)
    journal.note("end", me())


@dramatiq.actor(store_results=True)
def held_result(name: str, value: Any) -> Any:
    journal.note("begin", me())
    wait_for(name)
    journal.note("end", me())
    return value


@dramatiq.actor(max_retries=3, min_backoff=100, max_backoff=200)
def flaky(failures: int) -> None:
    journal.note("begin", me())
    message = CurrentMessage.get_current_message()
    assert message is not None
    journal.note("end", me())
    if message.options.get("retries", 0) < failures:
        raise RuntimeError("flaky on purpose")


@dramatiq.actor(max_retries=3, min_backoff=100, max_backoff=200)
def held_flaky(name: str) -> None:
    """Its first attempt waits for a file and fails; its second succeeds."""
    journal.note("begin", me())
    first = journal.count("begin", me()) == 1
    if first:
        wait_for(name)
    journal.note("end", me())
    if first:
        raise RuntimeError("failed while the broker was away")


@dramatiq.actor(store_results=True)
def held_pid(name: str) -> int:
    journal.note("begin", me())
    wait_for(name)
    journal.note("end", me())
    return os.getpid()


@dramatiq.actor
def stubborn(name: str, children: int) -> None:
    """Takes no notice of interrupts, and sends its children all the same."""
    id = me()
    journal.note("begin", id)
    while not (ROOM / name).exists():
        try:
            time.sleep(0.02)
        except BaseException as e:
            journal.note("swallowed", id, type(e).__name__)
    for i in range(children):
        try:
            quick.send(i)
        except Exception as e:
            journal.note("raised", id, type(e).__name__)
    journal.note("end", id)


@dramatiq.actor(max_runtime=1_500)
def hangs_once() -> None:
    """Hangs for as long as the process lives, the first time."""
    journal.note("begin", me())
    while journal.count("begin", me()) == 1:
        time.sleep(0.02)
    journal.note("end", me())


@dramatiq.actor
def again(times: int) -> None:
    """Enqueues its own message until it has run *times* times."""
    journal.note("begin", me())
    message = CurrentMessage.get_current_message()
    assert message is not None
    runs = journal.count("begin", me())
    journal.note("end", me())
    if runs < times:
        broker.enqueue(message._message, delay=100)


@dramatiq.actor(max_retries=3)
def poison() -> None:
    journal.note("begin", me())
    os.kill(os.getpid(), signal.SIGKILL)


@dramatiq.actor(max_retries=0, notify_shutdown=True)
def interruptible(name: str) -> None:
    journal.note("begin", me())
    try:
        wait_for(name)
    finally:
        journal.note("end", me())


@dramatiq.actor(on_lost="fail")
def once(name: str) -> None:
    journal.note("begin", me())
    wait_for(name)
    journal.note("end", me())


@dramatiq.actor(on_lost="hold")
def careful(name: str) -> None:
    journal.note("begin", me())
    wait_for(name)
    journal.note("end", me())


@dramatiq.actor
def parent(children: int, name: str) -> None:
    journal.note("begin", me())
    for i in range(children):
        quick.send(i)
    journal.note("sent", me())
    wait_for(name)
    journal.note("end", me())


@dramatiq.actor(max_retries=3, min_backoff=100, max_backoff=200)
def late_parent(children: int, name: str) -> None:
    """Sends its children when a file appears."""
    journal.note("begin", me())
    wait_for(name)
    try:
        for i in range(children):
            quick.send(i)
    except Exception as e:
        journal.note("raised", me(), type(e).__name__)
        raise
    finally:
        journal.note("end", me())


@dramatiq.actor
def note_success(message: dict[str, Any], result: Any) -> None:
    journal.note("on_success", message["message_id"], result)


@dramatiq.actor
def note_exhausted(message: dict[str, Any], retries: dict[str, Any]) -> None:
    journal.note("exhausted", message["message_id"], retries)


@dramatiq.actor(max_retries=0)
def forks() -> None:
    """Sends from a child process."""
    journal.note("begin", me())
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            journal.note("sent by child", quick.send("from a child").message_id)
        os._exit(0)
    os.waitpid(pid, 0)
    journal.note("end", me())


@dramatiq.actor(queue_name="elsewhere", priority=5)
def elsewhere(value: Any) -> None:
    journal.note("begin", me())
    journal.note("end", me(), value)


@dramatiq.actor
def note_failure(message: dict[str, Any], error: dict[str, Any]) -> None:
    journal.note("on_failure", message["message_id"], error)


if os.environ.get("DURABLE_TEST_NEWER") == "1":

    @dramatiq.actor
    def newcomer() -> None:
        journal.note("begin", me())
        journal.note("end", me())


@dramatiq.actor
def grip(seconds: float) -> None:
    """Holds the interpreter's lock, as C code that does not let go of it does: no other thread of the process runs."""
    journal.note("begin", me())
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
    journal.note("end", me())


if os.environ.get("DURABLE_TEST_CLOCK_SHIFT"):
    # A host whose clock is wrong.
    _shift, _time = float(os.environ["DURABLE_TEST_CLOCK_SHIFT"]), time.time
    time.time = lambda: _time() + _shift
    dramatiq.common.time = time.time
