"""Messages of other programs that are not what a message should be: they hold up nobody else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest

from dramatiq_durable.errors import NotEncodable
from dramatiq_durable.store import reading
from dramatiq_durable.store.dialects import Statement
from tests.inprocess.conftest import Bench

_KEPT = Statement("look at what was kept", "SELECT queue, error FROM {undecodable}")

GOOD: dict[str, Any] = {
    "queue_name": "default",
    "actor_name": "job",
    "args": [],
    "kwargs": {},
    "options": {},
    "message_id": "flawed",
    "message_timestamp": 1,
}


@pytest.mark.parametrize(
    "flaw",
    [
        {"message_id": 7},
        {"message_id": None},
        {"message_id": ""},
        {"message_id": "a\x00b"},
        {"message_id": "half \ud800"},
        {"message_id": "long" * 1000},
        {"actor_name": ["job"]},
        {"options": None},
        {"options": {"agent": "a\x00b"}},
    ],
    ids=repr,
)
def test_a_message_that_cannot_be_recorded_is_kept_aside(
    bench_at: Callable[..., Bench], database_url: str, flaw: dict[str, Any]
) -> None:
    b = bench_at(database_url)
    runs: list[int] = []

    @dramatiq.actor(broker=b.broker)
    def job() -> None:
        runs.append(1)

    b.broker.queues["default"].put(json.dumps({**GOOD, **flaw}).encode())
    job.send()
    b.work(threads=1)
    wait(lambda: runs == [1])
    wait(lambda: len(b.db.fetch(_KEPT)) == 1)
    assert sum(reading.counts(b.db).values()) == 1


@pytest.mark.parametrize(
    "options",
    [{"time_limit": "5m"}, {"time_limit": [1]}, {"time_limit": -5}, {"retries": "many"}],
    ids=repr,
)
def test_a_message_with_senseless_options_runs(
    bench_at: Callable[..., Bench], database_url: str, options: dict[str, Any]
) -> None:
    """Dramatiq ignores them, or its middlewares fail over them; the queue goes on."""
    b = bench_at(database_url)
    runs: list[int] = []

    @dramatiq.actor(broker=b.broker)
    def job() -> None:
        runs.append(1)

    job.send_with_options(**options)
    job.send()
    b.work(threads=1)
    b.join()
    assert runs == [1, 1]


@pytest.mark.parametrize("eta", [float("nan"), float("inf"), 1e300, -1e300, True])
def test_a_delayed_message_with_a_senseless_time_holds_up_nobody(
    bench_at: Callable[..., Bench], database_url: str, eta: float
) -> None:
    """Messages of before the installation wait in the delay queue, which is emptied into rows."""
    b = bench_at(database_url)
    runs: list[str] = []

    @dramatiq.actor(broker=b.broker)
    def job(name: str) -> None:
        runs.append(name)

    for name, time_ in (("flawed", eta), ("good", int(time.time() * 1000))):
        flawed = {**GOOD, "message_id": name, "queue_name": "default.DQ", "args": [name], "options": {"eta": time_}}
        b.broker.queues["default.DQ"].put(json.dumps(flawed).encode())
    b.work(threads=1)
    wait(lambda: "good" in runs)
    wait(lambda: sum(reading.counts(b.db).values()) == 2)


def test_a_name_that_no_database_takes_is_refused_at_the_send(bench: Callable[..., Bench]) -> None:
    """SQLite would take it, and never find it again."""
    b = bench()

    @dramatiq.actor(broker=b.broker)
    def job() -> None: ...

    with pytest.raises(NotEncodable):
        b.broker.enqueue(job.message()._replace(message_id="a\x00b"))
    assert b.broker.queues["default"].empty()


def wait(condition: Callable[[], bool], timeout: float = 8) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
