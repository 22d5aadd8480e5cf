"""A database, a broker, a journal and a fleet of real workers for each test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dramatiq_durable.store import migrate, reading
from dramatiq_durable.store.database import Database, connect
from tests.harness.journal import Journal
from tests.harness.workers import Fleet
from tests.servers import Valkey, wait_until


class World:
    """Everything that a test needs of its set-up.

    Attributes:
      app: The application, imported in this process: it only sends.
      db(Database): The record.
      fleet(Fleet): The worker processes.
      journal(Journal): What the jobs say.
      valkey(Valkey): The broker's server.
    """

    def __init__(self, app: Any, db: Database, fleet: Fleet, journal: Journal, valkey: Valkey) -> None:
        self.app = app
        self.db = db
        self.fleet = fleet
        self.journal = journal
        self.valkey = valkey

    def job(self, id: str) -> reading.JobRow:
        row = reading.get_job(self.db, id)
        assert row is not None, f"job {id} has no row"
        return row

    def state(self, id: str) -> str:
        return self.job(id).state

    def wait_state(self, id: str, *states: str, timeout: float = 40) -> reading.JobRow:
        wait_until(lambda: self.state(id) in states, timeout, f"job {id} is {states}, not {self.job(id)}")
        return self.job(id)

    def wait_begun(self, id: str, times: int = 1) -> None:
        wait_until(lambda: self.journal.count("begin", id) >= times, 40, f"job {id} has begun {times} times")

    def assert_kept(self) -> None:
        """No job ran twice at once."""
        assert self.journal.concurrent(self.fleet.deaths) == []


@pytest.fixture
def own_valkey(request: pytest.FixtureRequest) -> Iterator[Valkey]:
    """A Valkey server for this test alone, which it may stop and restart; marked ``persist`` for an append-only "
    "file."""
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
def world(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    database_url: str,
    broker_server: Valkey,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    db = connect(database_url)
    migrate.upgrade(db)
    fleet = Fleet(tmp_path, database_url, broker_server.url)
    for name, value in fleet.env.items():
        monkeypatch.setenv(name, value)
    sys.modules.pop("tests.harness.app", None)
    app = importlib.import_module("tests.harness.app")
    world = World(app, db, fleet, Journal(tmp_path / "journal"), broker_server)
    failed_before = request.session.testsfailed
    try:
        yield world
    finally:
        fleet.close()
        if request.session.testsfailed > failed_before:
            print(fleet.logs())
        app.broker.durable.uninstall()
        app.broker.client.close()
        app.broker.client.connection_pool.disconnect()
        app.results.client.close()
        db.close_all()
        sys.modules.pop("tests.harness.app", None)
