"""A StubBroker and a worker in this process, as an application's own tests have them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import CurrentMessage, Middleware
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend

import dramatiq_durable as durable
from dramatiq_durable.store import migrate, reading
from dramatiq_durable.store.database import connect


class Bench:
    """A broker that is equipped, with a results backend, and workers that are stopped at the end."""

    def __init__(
        self, database_url: str, *middleware: Middleware, broker: StubBroker | None = None, **settings: Any
    ) -> None:
        db = connect(database_url)
        migrate.upgrade(db)
        db.close_all()
        self.broker = broker or StubBroker()
        self.backend = StubBackend()
        dramatiq.set_broker(self.broker)
        self.broker.add_middleware(Results(backend=self.backend))
        self.broker.add_middleware(CurrentMessage())
        for each in middleware:
            self.broker.add_middleware(each)
        short = {"lease": 3_000, "heartbeat_interval": 500, "reconcile_interval": 500, "publish_grace": 300}
        self.handle = durable.install(self.broker, database_url=database_url, **{**short, **settings})
        self.db = self.handle.db
        self.engine = self.handle.engine
        self.workers: list[dramatiq.Worker] = []

    def work(self, threads: int = 2) -> dramatiq.Worker:
        worker = dramatiq.Worker(self.broker, worker_timeout=50, worker_threads=threads)
        worker.start()
        self.workers.append(worker)
        return worker

    def join(self, timeout: int = 20_000) -> None:
        self.broker.join("default", timeout=timeout, fail_fast=False)

    def job(self, message: Any) -> reading.JobRow:
        row = reading.get_job(self.db, message.message_id)
        assert row is not None
        return row

    def close(self) -> None:
        for worker in self.workers:
            worker.stop(5_000)
        self.handle.uninstall()


@pytest.fixture
def bench(database_url: str, bench_at: Callable[..., Bench]) -> Callable[..., Bench]:
    """Make a :class:`Bench`."""
    return functools.partial(bench_at, database_url)


@pytest.fixture
def bench_at() -> Iterator[Callable[..., Bench]]:
    """Make a :class:`Bench` on a given database."""
    made: list[Bench] = []

    def make(database_url: str, *middleware: Middleware, **settings: Any) -> Bench:
        made.append(Bench(database_url, *middleware, **settings))
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            each.close()
