"""A database that answers, but takes nothing: a standby after a failover, a full disk, a right that was revoked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import dramatiq
import psycopg
from psycopg import sql

from tests.inprocess.conftest import Bench


def only_readable(url: str, value: bool) -> None:
    """Make the database of *url* a read-only one, as a demoted primary is, or a normal one again."""
    with psycopg.connect(url, autocommit=True, options="-c default_transaction_read_only=off") as connection:
        row = connection.execute("SELECT current_database()").fetchone()
        assert row is not None
        name = sql.Identifier(row[0])
        setting = sql.SQL("on" if value else "off")
        connection.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = {}").format(name, setting))
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()",
            row,
        )


def test_an_outcome_waits_for_a_database_that_only_reads(bench_at: Callable[..., Bench], postgres_url: str) -> None:
    """P4, P10: a failover to a standby drops no outcome: a finished job is not failed, and does not run again."""
    b = bench_at(postgres_url)
    runs: list[int] = []
    go_on = threading.Event()

    @dramatiq.actor(broker=b.broker)
    def pays() -> None:
        runs.append(1)
        go_on.wait(10)

    message = pays.send()
    b.work(threads=1)
    wait(lambda: bool(runs))
    # Given a database that is made read-only while the job runs
    only_readable(postgres_url, True)
    go_on.set()
    # When the outcome has been tried in vain, and the database takes writes again
    time.sleep(1)
    assert len(b.engine.registry.runs()) == 1
    only_readable(postgres_url, False)
    b.join()
    # Then the job is completed, by its one run
    row = b.job(message)
    assert (row.state, row.attempt, row.lost, row.lost_claims) == ("completed", 1, 0, 0)
    assert runs == [1]


def test_a_strict_start_waits_for_a_database_that_only_reads(bench_at: Callable[..., Bench], postgres_url: str) -> None:
    """P10: the job neither runs unrecorded nor is given up."""
    b = bench_at(postgres_url)
    runs: list[str] = []
    go_on = threading.Event()

    @dramatiq.actor(broker=b.broker)
    def first() -> None:
        runs.append("first")
        go_on.wait(10)

    @dramatiq.actor(broker=b.broker, on_lost="hold")
    def strict() -> None:
        runs.append("strict")

    first.send()
    message = strict.send()
    b.work(threads=1)
    wait(lambda: len(b.engine.registry.runs()) == 2 and runs == ["first"])
    only_readable(postgres_url, True)
    go_on.set()
    time.sleep(1)
    assert runs == ["first"]
    only_readable(postgres_url, False)
    b.join()
    row = b.job(message)
    assert (row.state, row.attempt) == ("completed", 1)
    assert runs == ["first", "strict"]


def wait(condition: Callable[[], bool], timeout: float = 10) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
