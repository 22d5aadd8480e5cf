"""How many connections a worker process has, and what becomes of them (B41, B46)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.acceptance.conftest import World, only_sqlite
from tests.servers import wait_until

only_postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)

#: What a worker process of eight threads may have: its consumers, and one for each of its own threads.
ENOUGH = 8


class Connections:
    """Those of the worker process, seen from the server."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}?application_name=the-worker"
        self._admin = psycopg.connect(url, autocommit=True)

    def count(self) -> int:
        return len(self._pids())

    def _pids(self) -> list[int]:
        found = self._admin.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'the-worker'")
        return [pid for (pid,) in found.fetchall()]

    def kill_all(self) -> int:
        pids = self._pids()
        for pid in pids:
            self._admin.execute("SELECT pg_terminate_backend(%s)", (pid,))
        return len(pids)

    def close(self) -> None:
        self._admin.close()


@pytest.fixture
def connections(database_url: str) -> Iterator[Connections]:
    connections = Connections(database_url)
    yield connections
    connections.close()


def start(world: World, connections: Connections, *options: str, **env: str) -> Any:
    world.fleet.env["DRAMATIQ_DURABLE_DATABASE_URL"] = connections.url
    world.fleet.env.update(env)
    return world.fleet.run("lives_on", *options)


@only_postgresql
def test_connections_stay_few_and_a_stopped_worker_has_none(world: World, connections: Connections) -> None:
    """B41: after a thousand jobs a worker has no more connections than after ten, and 0 after ``stop()``."""
    # Given a worker, and a thousand jobs
    worker = start(world, connections, "stop", "leave")
    most = 0
    jobs = [world.app.quick.send(i) for i in range(1_000)]

    # When they have run
    def all_done() -> bool:
        nonlocal most
        most = max(most, connections.count())
        return world.counts() == {"completed": len(jobs)}

    wait_until(all_done, 90, "all jobs are completed", interval=0.1)
    # Then there were never many connections
    assert 0 < most <= ENOUGH
    # And when the worker stops, there is none, although its process lives on
    world.fleet.touch("stop")
    wait_until(lambda: world.journal.count("stopped"), 30, worker.text())
    wait_until(lambda: connections.count() == 0, 5, "no connection is left")
    assert not worker.dead()
    world.fleet.touch("leave")
    assert worker.wait(30) == 0


@only_sqlite
def test_a_stopped_worker_keeps_no_database_file_open(world: World) -> None:
    """B41 for SQLite: every thread closes what it opened."""
    worker = world.fleet.run("lives_on", "stop", "leave")
    jobs = [world.app.quick.send(i) for i in range(30)]
    for job in jobs:
        world.wait_state(job.message_id, "completed")

    def open_files() -> list[str]:
        folder = Path(f"/proc/{worker.process.pid}/fd")
        names = []
        for entry in folder.iterdir():
            try:
                names.append(os.readlink(entry))
            except FileNotFoundError:
                continue
        return [name for name in names if "record.sqlite3" in name]

    assert open_files()
    world.fleet.touch("stop")
    wait_until(lambda: world.journal.count("stopped"), 30, worker.text())
    wait_until(lambda: open_files() == [], 5, "no file is open")
    world.fleet.touch("leave")
    assert worker.wait(30) == 0


@only_postgresql
def test_when_the_server_ends_all_connections_the_next_job_works(world: World, connections: Connections) -> None:
    """B41: as a failover, or an idle timeout of a proxy, does between two jobs."""
    worker = start(world, connections, "stop", "leave")
    for i in range(5):
        job = world.app.quick.send(i)
        row = world.wait_state(job.message_id, "completed", timeout=15)
        assert (row.attempt, row.lost, row.lost_claims) == (1, 0, 0)
        assert world.journal.count("begin", job.message_id) == 1
        assert connections.kill_all() > 0
    # And while one runs
    held = world.app.held.send("go")
    world.wait_begun(held.message_id)
    connections.kill_all()
    world.fleet.touch("go")
    row = world.wait_state(held.message_id, "completed")
    assert (row.attempt, row.lost) == (1, 0)
    world.fleet.touch("stop")
    world.fleet.touch("leave")
    assert worker.wait(30) == 0


@only_postgresql
def test_with_one_connection_for_all_everything_waits_its_turn(world: World, connections: Connections) -> None:
    """B46: claims, starts, outcomes, heartbeats and looks share one connection; nothing fails, nothing runs twice."""
    start(world, connections, "stop", "leave", DRAMATIQ_DURABLE_POOL_SIZE="1")
    held = [world.app.slow.send(4) for _ in range(3)]
    jobs = [world.app.quick.send(i) for i in range(100)] + [world.app.flaky.send(1)]
    for job in [*jobs, *held]:
        world.wait_state(job.message_id, "completed", timeout=60)
    assert connections.count() == 1
    assert all(world.journal.count("begin", job.message_id) == 1 for job in [*held, *jobs[:-1]])
    world.assert_kept()
