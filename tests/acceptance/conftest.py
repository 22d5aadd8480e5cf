"""A database, a broker, a journal and a fleet of real workers for each test."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sqlite3
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker

from dramatiq_durable.runtime import messages
from dramatiq_durable.store import jobs, migrate, reading
from dramatiq_durable.store.database import Database, connect
from dramatiq_durable.store.dialects import Statement
from tests.harness.journal import Journal
from tests.harness.outage import DatabaseLink
from tests.harness.proxy import Proxy
from tests.harness.workers import Fleet, WorkerProcess
from tests.servers import Valkey, wait_until

#: For tests in which the database plays no part.
only_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

_NOW = Statement("look at the clock", "SELECT {now}")
_UNDECODABLE = Statement("look at undecodable messages", "SELECT payload, times FROM {undecodable}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "settings(**values): settings of the application's processes in this test")


class World:
    """Everything that a test needs of its set-up.

    Attributes:
      app: The application, imported in this process: it only sends.
      database_path(str): The file, where the database is one.
      db(Database): The record.
      fleet(Fleet): The worker processes.
      journal(Journal): What the jobs say.
      valkey(Valkey): The broker's server.
    """

    def __init__(self, app: Any, db: Database, fleet: Fleet, journal: Journal, valkey: Valkey, path: str) -> None:
        self.app = app
        self.database_path = path
        self.db = db
        self.fleet = fleet
        self.journal = journal
        self.valkey = valkey
        self._clients: list[Any] = []

    def close(self) -> None:
        for client in (self.app.broker.client, self.app.results.client, *self._clients):
            client.close()
            client.connection_pool.disconnect()

    def job(self, id: str) -> reading.JobRow:
        row = reading.get_job(self.db, id)
        assert row is not None, f"job {id} has no row"
        return row

    def state(self, id: str) -> str:
        return self.job(id).state

    def wait_state(self, id: str, *states: str, timeout: float = 40) -> reading.JobRow:
        wait_until(lambda: self.state(id) in states, timeout, f"job {id} is {states}, not {self.job(id)}")
        return self.job(id)

    def wait_state_of_new(self, id: str, *states: str) -> reading.JobRow:
        """Like :meth:`wait_state`, for a job that has no row yet."""
        wait_until(lambda: reading.get_job(self.db, id) is not None, 40, f"job {id} has a row")
        return self.wait_state(id, *states)

    def wait_looks(self, times: int = 1) -> None:
        """Wait until reconciliation has looked *times* times more, each look begun from now on."""
        for _ in range(times + 1):
            since = time.monotonic()
            wait_until(functools.partial(self._looked_since, since), 40, "reconciliation has looked")

    def _looked_since(self, since: float) -> bool:
        last = reading.last_pass(self.db, "reconcile")
        return last is not None and last.finished_ago < (time.monotonic() - since) * 1000

    def wait_begun(self, id: str, times: int = 1) -> None:
        wait_until(lambda: self.journal.count("begin", id) >= times, 40, f"job {id} has begun {times} times")

    def wait_said(self, worker: WorkerProcess, text: str, times: int = 1) -> None:
        """Wait until *worker* has logged *text*."""
        wait_until(lambda: worker.text().count(text) >= times, 40, f"the worker says {text!r} {times} times")

    def wait_idle(self) -> None:
        """Wait until the workers have answered every message that the broker had."""
        with self.valkey.client() as client:
            wait_until(lambda: not client.hlen("dramatiq:default.msgs"), 40, "all messages are acknowledged")

    def in_broker(self, ref: str, queue: str = "default") -> bool:
        """Return whether the broker still has the copy *ref*, waiting or unacknowledged."""
        with self.valkey.client() as client:
            return bool(client.hexists(f"dramatiq:{queue}.msgs", ref))

    def deliver(self, data: bytes, queue: str = "default", ref: str | None = None, stranded: bool = False) -> str:
        """Put *data* into the broker behind everybody's back, as Dramatiq's own script does; return its reference."""
        ref = ref or str(uuid.uuid4())
        with self.valkey.client() as client:
            client.hset(f"dramatiq:{queue}.msgs", ref, data)
            if stranded:
                workers = wait_until(lambda: client.zrange("dramatiq:__heartbeats__", -1, -1), what="a worker is alive")
                client.sadd(f"dramatiq:__acks__.{workers[0].decode()}.{queue}", ref)
            else:
                client.rpush(f"dramatiq:{queue}", ref)
        return ref

    def deliver_again(self, message: dramatiq.Message[Any]) -> str:
        """Put one more copy of *message* into the broker."""
        ref = str(uuid.uuid4())
        return self.deliver(message.copy(options={"redis_message_id": ref}).encode(), message.queue_name, ref)

    def send_past(self, message: dramatiq.Message[Any], *, stranded: bool = False) -> dramatiq.Message[Any]:
        """Send *message* as another equipped process would, past the link between application and broker.

        Parameters:
          message(Message)
          stranded(bool): Leave it where a fetch leaves it whose reply is lost: in the hands of a living worker.
        """
        message = messages.marked(message)
        ref = str(uuid.uuid4())
        jobs.record(self.db, messages.new_job(self.app.broker, message, max_payload=None, broker_ref=ref))
        self.deliver(message.copy(options={"redis_message_id": ref}).encode(), message.queue_name, ref, stranded)
        return message

    def plain_broker(self) -> RedisBroker:
        """Return the broker of a process that is not equipped."""
        broker = RedisBroker(url=self.valkey.url, middleware=[])
        for actor in self.app.broker.actors.values():
            broker.declare_queue(actor.queue_name)
        self._clients.append(broker.client)
        return broker

    def undecodable(self) -> list[dict[str, Any]]:
        rows = self.db.fetch(_UNDECODABLE)
        return [{"payload": bytes(payload), "times": times} for payload, times in rows]

    def freeze(self, worker: WorkerProcess) -> None:
        """Freeze *worker*, but not in the middle of a transaction.

        SQLite's file would stay locked for everybody, which no takeover can help.
        """
        while True:
            worker.freeze()
            if self.db.dialect.name != "sqlite" or not self._is_locked():
                return
            worker.thaw()
            time.sleep(0.01)

    def _is_locked(self) -> bool:
        with contextlib.closing(sqlite3.connect(self.database_path, timeout=0.2, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return True
            connection.execute("ROLLBACK")
            return False

    def database_time(self) -> int:
        """Return the database's clock, in milliseconds."""
        return int(self.db.fetch(_NOW)[0][0])

    def counts(self) -> dict[str, int]:
        return reading.counts(self.db)

    def assert_kept(self) -> None:
        """No job was lost, and none ran twice at once."""
        assert set(self.counts()) <= {"completed", "failed", "cancelled", "parked", "in_doubt", "denied"}
        assert self.journal.concurrent(self.fleet.deaths) == []


@pytest.fixture
def own_valkey(request: pytest.FixtureRequest) -> Iterator[Valkey]:
    """A Valkey server for this test alone, which it may stop and restart; marked ``persist``, it keeps its data."""
    server = Valkey(persist=request.node.get_closest_marker("persist") is not None)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def broker_server(request: pytest.FixtureRequest) -> Valkey:
    """The broker's server: the shared one, or the test's own when it is marked ``own_valkey``."""
    own = request.node.get_closest_marker("own_valkey") is not None
    server: Valkey = request.getfixturevalue("own_valkey" if own else "valkey")
    return server


@pytest.fixture
def database_link(database_url: str) -> Iterator[DatabaseLink]:
    """What the application's processes reach their database through, when a test asks for it."""
    link = DatabaseLink(database_url)
    yield link
    link.close()


@pytest.fixture
def broker_link(broker_server: Valkey) -> Iterator[Proxy]:
    """What the application's processes reach their broker through, when a test asks for it."""
    proxy = Proxy(broker_server.port)
    yield proxy
    proxy.close()


def _urls(request: pytest.FixtureRequest, database_url: str, broker_server: Valkey) -> tuple[str, str]:
    redis_url = broker_server.url
    if "database_link" in request.fixturenames:
        database_url = request.getfixturevalue("database_link").url
    if "broker_link" in request.fixturenames:
        redis_url = f"redis://127.0.0.1:{request.getfixturevalue('broker_link').port}/0"
    return database_url, redis_url


@pytest.fixture
def world(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    database_url: str,
    broker_server: Valkey,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    db = connect(database_url)
    migrate.upgrade(db)
    fleet = Fleet(tmp_path, *_urls(request, database_url, broker_server))
    for mark in request.node.iter_markers("settings"):
        fleet.env.update({f"DRAMATIQ_DURABLE_{name}": value for name, value in mark.kwargs.items()})
    for name, value in fleet.env.items():
        monkeypatch.setenv(name, value)
    sys.modules.pop("tests.harness.app", None)
    app = importlib.import_module("tests.harness.app")
    world = World(app, db, fleet, Journal(tmp_path / "journal"), broker_server, urlsplit(database_url).path)
    failed_before = request.session.testsfailed
    try:
        yield world
    finally:
        fleet.close()
        if request.session.testsfailed > failed_before:
            print(fleet.logs())
        app.broker.durable.uninstall()
        world.close()
        db.close_all()
        sys.modules.pop("tests.harness.app", None)
