"""What we look for in Redis, and what we put right there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker

import dramatiq_durable as durable
from dramatiq_durable.runtime.sweeper import look
from dramatiq_durable.store import recovery
from tests.servers import Valkey

QUEUE, DATA = "dramatiq:default", "dramatiq:default.msgs"


class Bench:
    def __init__(self, valkey: Valkey, database_url: str) -> None:
        self.broker = RedisBroker(url=valkey.url)
        self.handle = durable.install(self.broker, database_url=database_url)
        self.view: Any = self.handle.engine.view
        self.client = self.broker.client

        @dramatiq.actor(broker=self.broker)
        def job() -> None: ...

        self.job = job

    def look(self) -> Any:
        return look(self.handle.db, self.view, grace=0, stranded_after=0, strandings={})


@pytest.fixture
def bench(valkey: Valkey, tmp_path: Path) -> Iterator[Callable[[], Bench]]:
    made: list[Bench] = []

    def make() -> Bench:
        made.append(Bench(valkey, f"sqlite:///{tmp_path}/record.sqlite3"))
        return made[-1]

    yield make
    for each in made:
        each.handle.uninstall()


def test_copies_that_lost_their_place_get_it_back(bench: Callable[[], Bench]) -> None:
    """Their data is there, but nobody would ever fetch them: of jobs that wait, and of messages without a row."""
    # Given three jobs whose list is gone, of which one has its place again, and a foreign message
    b = bench()
    for _ in range(3):
        b.job.send()
    first = b.client.lindex(QUEUE, 0)
    b.client.delete(QUEUE)
    b.client.rpush(QUEUE, first)
    foreign = b.job.message_with_options(redis_message_id="foreign")
    b.client.hset(DATA, "foreign", foreign.encode())
    # When we look
    found = b.look()
    # Then all have their place, once
    assert (found.looked, found.put_back) == (3, 3)
    assert sorted(b.client.lrange(QUEUE, 0, -1)) == sorted(b.client.hkeys(DATA))
    # And the next look finds nothing, without reading the list
    b.client.config_resetstat()
    assert b.look() == (3, 0)
    assert "cmdstat_lrange" not in b.client.info("commandstats")


def test_copies_in_the_hands_of_consumers_have_a_place(bench: Callable[[], Bench]) -> None:
    b = bench()
    for _ in range(2):
        b.job.send()
    b.broker.do_fetch("default", 1)
    b.client.hset(DATA, "lost", b.job.message().encode())
    assert b.view.misplaced(set()) == [("default", "lost")]


def test_a_copy_that_went_back_to_its_queue_meanwhile_keeps_its_data(
    bench: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the removal of a stranded copy, its consumer, or the broker, may have given it back."""
    b = bench()
    b.job.send()
    b.broker.do_fetch("default", 1)
    row = recovery.waiting_page(b.handle.db, "", 10, 0)[0]
    fetched = b.view._fetched

    def late(queue: str) -> dict[str, str]:
        held: dict[str, str] = fetched(queue)
        b.broker.do_requeue("default", *held)
        return held

    monkeypatch.setattr(b.view, "_fetched", late)
    b.view.discard([row])
    assert b.client.lrange(QUEUE, 0, -1) == b.client.hkeys(DATA) == [str(row.broker_ref).encode()]


def test_many_dead_consumers_cost_one_round_trip(bench: Callable[[], Bench]) -> None:
    """Every process that ever sent has a heartbeat until the broker's own maintenance comes by."""
    b = bench()
    b.job.send()
    b.client.zadd("dramatiq:__heartbeats__", {f"dead-{i}": i for i in range(2_000)})
    b.broker.do_fetch("default", 1)
    row = recovery.waiting_page(b.handle.db, "", 10, 0)[0]
    asked = b.client.info("stats")["total_reads_processed"]
    assert b.view.stranded([row]) == {row.id}
    assert b.client.info("stats")["total_reads_processed"] - asked < 50


@pytest.mark.parametrize("id", [7, ["a"], "a\x00b"], ids=repr)
def test_a_flawed_copy_in_hand_does_not_end_the_look(bench: Callable[[], Bench], id: Any) -> None:
    """Whoever fetches it next keeps it aside."""
    b = bench()
    flawed = {**b.job.message().asdict(), "message_id": id, "options": {"redis_message_id": "flawed"}}
    b.client.hset(DATA, "flawed", json.dumps(flawed).encode())
    b.client.rpush(QUEUE, "flawed")
    b.broker.do_fetch("default", 1)
    assert b.look() == (0, 0)
    assert b.client.lrange(QUEUE, 0, -1) == [b"flawed"]
