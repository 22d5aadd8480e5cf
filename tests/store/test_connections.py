"""Connections that die, run out, are shared with a child process, or are interrupted half-way."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dramatiq_durable.errors import DatabaseUnavailable, InvalidDatabaseURL, StoreError
from dramatiq_durable.store import connections, jobs, migrate, outcomes, reading, urls
from dramatiq_durable.store.database import Database, connect
from dramatiq_durable.store.dialects import Statement
from dramatiq_durable.store.types import Outcome
from tests.harness.proxy import Proxy
from tests.servers import Postgres, wait_until
from tests.store.rows import LEASE, claimed, new, row

_OURS = "FROM pg_stat_activity WHERE application_name = 'dramatiq-durable' AND datname = current_database()"
_SESSIONS = Statement("count sessions", f"SELECT COUNT(*) {_OURS}")
_KILL = Statement("end sessions", f"SELECT pg_terminate_backend(pid) {_OURS} AND pid <> pg_backend_pid()")
_KILL_MYSELF = Statement("end this session", "SELECT pg_terminate_backend(pg_backend_pid())")


def in_threads(number: int, work: Callable[[int], Any]) -> list[Any]:
    """Run *work* in threads side by side; return what each returned, or raised."""
    answers: list[Any] = [None] * number

    def run(i: int) -> None:
        try:
            answers[i] = work(i)
        except BaseException as e:
            answers[i] = e

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


@pytest.fixture
def postgres_db(migrated_postgres: str) -> Iterator[Database]:
    db = connect(migrated_postgres, pool_size=4)
    db.execute(Statement("empty", "TRUNCATE {jobs}"))
    yield db
    db.close_all()


@pytest.fixture
def near(postgres: Postgres) -> Iterator[str]:
    """A record on a server of this machine, which a proxy can stand before."""
    url = postgres.create()
    db = connect(url)
    migrate.upgrade(db)
    db.close_all()
    yield url
    postgres.drop(url)


@pytest.fixture
def proxy(near: str) -> Iterator[Proxy]:
    proxy = Proxy(urlsplit(near).port or 5432)
    yield proxy
    proxy.close()


def through(proxy: Proxy, url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{parts.username}@127.0.0.1:{proxy.port}").geturl()


# The server ends them


def test_connections_that_died_while_they_were_idle_are_replaced_unnoticed(
    postgres_db: Database, migrated_postgres: str
) -> None:
    # Given four idle connections, which the server has ended
    together = threading.Barrier(4)
    in_threads(4, lambda i: (together.wait(), postgres_db.fetch(Statement("take a while", "SELECT pg_sleep(0.1)"))))
    outside = connect(migrated_postgres + "?application_name=outside")
    assert outside.fetch(_SESSIONS) == [(4,)]
    outside.fetch(_KILL)
    wait_until(lambda: outside.fetch(_SESSIONS) == [(0,)], 10, "no session is left")
    outside.close_all()

    # Then the process goes on as if nothing had happened
    assert in_threads(4, lambda i: jobs.record(postgres_db, new(f"job-{i}"))) == ["recorded"] * 4


def test_a_connection_that_dies_in_a_statement_costs_that_statement(postgres_db: Database) -> None:
    with pytest.raises(DatabaseUnavailable, match="end this session"):
        postgres_db.fetch(_KILL_MYSELF)

    assert jobs.record(postgres_db, new("a")) == "recorded"


def test_a_connection_that_dies_in_a_transaction_costs_that_transaction(postgres_db: Database) -> None:
    with pytest.raises(DatabaseUnavailable), postgres_db.transaction():
        jobs.record(postgres_db, new("a"))
        postgres_db.fetch(_KILL_MYSELF)

    assert reading.get_job(postgres_db, "a") is None
    assert jobs.record(postgres_db, new("a")) == "recorded"


def test_a_server_that_restarts_is_used_again_as_soon_as_it_is_there() -> None:
    server = Postgres()
    try:
        server.start()
        db = connect(server.create())
        migrate.upgrade(db)
        jobs.record(db, new("a"))
        server.stop()

        # While it is away, it is said so, quickly
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailable, match="does not answer"):
            jobs.record(db, new("b"))
        assert time.monotonic() - began < 2

        server.start()
        assert jobs.record(db, new("b")) == "recorded"
        db.close_all()
    finally:
        server.close()


def test_threads_do_not_wait_for_a_silent_server_one_after_the_other(proxy: Proxy, near: str) -> None:
    # Given a server that takes connections and says nothing
    proxy.swallow()
    db = connect(through(proxy, near))

    # When eight threads want something of it
    began = time.monotonic()
    answers = in_threads(8, lambda i: reading.counts(db))

    # Then all of them know after one timeout
    assert [type(answer) for answer in answers] == [DatabaseUnavailable] * 8
    assert time.monotonic() - began < 2 * urls.CONNECT_TIMEOUT

    # And the first that asks again when it answers is answered
    proxy.restore()
    assert reading.counts(db) is not None
    db.close_all()


def test_a_network_that_is_cut_and_mended_is_used_again(proxy: Proxy, near: str) -> None:
    db = connect(through(proxy, near))
    in_threads(4, lambda i: reading.now(db))

    for _ in range(3):
        proxy.cut()
        with pytest.raises(DatabaseUnavailable):
            reading.now(db)
        proxy.restore()
        assert reading.now(db)
    db.close_all()


def test_an_outcome_whose_commit_got_no_answer_is_told_the_truth_when_it_is_repeated(proxy: Proxy, near: str) -> None:
    # Given a run whose outcome reaches the database, and the reply does not come back
    db = connect(through(proxy, near))
    claim = claimed(db, "a")
    outcome = Outcome("a", claim.claim, "completed")
    proxy.swallow("replies")
    failed: list[BaseException] = []

    def settle() -> None:
        try:
            outcomes.settle(db, "w1", [outcome])
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=settle)
    thread.start()
    direct = connect(near)
    wait_until(lambda: row(direct, "a").state == "completed", 10, "the outcome is written")
    proxy.restore()
    thread.join(10)

    # Then the call fails, and its repetition does not
    assert [type(e) for e in failed] == [DatabaseUnavailable]
    assert outcomes.settle(db, "w1", [outcome]) == {"a"}
    db.close_all()
    direct.close_all()


# How many there are


def test_there_are_never_more_connections_than_the_pool_has(postgres_db: Database, migrated_postgres: str) -> None:
    # Given a pool of four, and twelve threads
    seen = in_threads(12, lambda i: max(postgres_db.fetch(_SESSIONS)[0][0] for _ in range(80)))

    # Then each got its turn, and nobody saw more than the four
    assert all(isinstance(count, int) and count <= 4 for count in seen), seen

    # And none is left when they are closed
    postgres_db.close_all()
    outside = connect(migrated_postgres + "?application_name=outside")
    wait_until(lambda: outside.fetch(_SESSIONS) == [(0,)], 10, "no session is left")
    outside.close_all()


def test_a_pool_that_is_exhausted_says_so(monkeypatch: pytest.MonkeyPatch, migrated_postgres: str) -> None:
    monkeypatch.setattr(urls, "POOL_WAIT", 0.2)
    db = connect(migrated_postgres, pool_size=1)
    with db.transaction():
        (answer,) = in_threads(1, lambda i: reading.now(db))

    assert isinstance(answer, DatabaseUnavailable) and "All 1 database connections" in str(answer)
    assert reading.now(db)
    db.close_all()


def test_a_thread_waits_for_a_connection_that_is_given_back(migrated_postgres: str) -> None:
    db = connect(migrated_postgres, pool_size=1)
    with db.transaction():
        thread = threading.Thread(target=lambda: reading.now(db))
        thread.start()
        time.sleep(0.1)
        assert thread.is_alive()
    thread.join(4)
    assert not thread.is_alive()
    db.close_all()


def test_connections_are_replaced_when_they_are_old(monkeypatch: pytest.MonkeyPatch, postgres_db: Database) -> None:
    pid = Statement("name the session", "SELECT pg_backend_pid()")
    assert postgres_db.fetch(pid) == postgres_db.fetch(pid)

    monkeypatch.setattr(connections, "MAX_AGE", 0.0)
    assert postgres_db.fetch(pid) != postgres_db.fetch(pid)


def test_a_file_is_closed_by_the_thread_or_after_its_death(tmp_path: Path, migrated_file: Path) -> None:
    db = connect(f"sqlite:///{migrated_file}")

    def files() -> int:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sum(1 for link in links if _target(link) == str(migrated_file))

    # Given threads that forget to close theirs
    together = threading.Barrier(6)
    in_threads(6, lambda i: (reading.counts(db), together.wait()))
    assert files() == 6

    # Then the next one that opens the file closes them
    reading.counts(db)
    assert files() == 1
    db.close_thread()
    assert files() == 0


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(link)
    return ""


# A child process


def test_a_child_process_uses_connections_of_its_own(db: Database) -> None:
    # Given a parent with open connections, in other threads too
    jobs.record(db, new("parent"))
    release, held = threading.Event(), threading.Event()

    def hold() -> None:
        with db.transaction():
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    release_soon = threading.Timer(0.5, release.set)
    release_soon.start()

    # When it forks while one of them is in a transaction
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer: Any
        try:
            jobs.record(db, new("child"))
            answer = sorted(reading.counts(db).items())
            db.close_all()
        except BaseException as e:
            answer = repr(e)
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)

    # Then the child can work, and so can the parent
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert json.loads(pipe.read()) == [["queued", 2]]
    os.waitpid(child, 0)
    thread.join(10)
    assert jobs.record(db, new("again")) == "recorded"
    assert reading.counts(db) == {"queued": 3}


# Half-way


class Halt(BaseException):
    """Like the interrupts that Dramatiq throws into threads."""


def test_an_interrupt_inside_a_transaction_undoes_it_and_frees_the_record(db: Database, other: Database) -> None:
    with pytest.raises(Halt), db.transaction():
        jobs.record(db, new("a"))
        raise Halt

    assert reading.counts(other) == {}
    assert jobs.record(other, new("b")) == "recorded"
    assert in_threads(1, lambda i: jobs.record(db, new("c"))) == ["recorded"]
    assert jobs.record(db, new("a")) == "recorded"
    assert reading.counts(other) == {"queued": 3}


def test_an_error_inside_a_transaction_undoes_it(db: Database) -> None:
    with pytest.raises(ZeroDivisionError), db.transaction():
        jobs.record(db, new("a"))
        raise ZeroDivisionError

    assert reading.counts(db) == {}
    assert jobs.record(db, new("a")) == "recorded"


def test_a_failure_that_is_swallowed_inside_a_transaction_is_not_taken_for_a_commit(db: Database) -> None:
    broken = Statement("do what cannot be done", "SELECT nonsense FROM {jobs}")
    if db.dialect.name == "sqlite":
        # There the statement alone is undone
        with db.transaction():
            jobs.record(db, new("a"))
            with contextlib.suppress(StoreError):
                db.fetch(broken)
        assert reading.counts(db) == {"queued": 1}
        return
    with pytest.raises(StoreError, match="rolled back"), db.transaction():
        jobs.record(db, new("a"))
        with contextlib.suppress(StoreError):
            db.fetch(broken)
    assert reading.counts(db) == {}


def test_transactions_do_not_nest(db: Database) -> None:
    with db.transaction(), pytest.raises(RuntimeError, match="nest"), db.transaction():
        pass
    assert jobs.record(db, new("a")) == "recorded"


# One that was interrupted while it was opened is closed by the garbage collector, with a warning.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
# An interrupt that lands while the driver connects leaves the connection to the garbage collector, which says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_on_any_line_leave_nothing_half_done(db: Database, other: Database) -> None:
    # Given threads that write two rows at a time, claim and settle, and are interrupted wherever they are
    stop = time.monotonic() + 4
    interrupted: list[int] = []

    def work(name: str) -> None:
        turn = 0
        while time.monotonic() < stop:
            turn += 1
            try:
                a, b = f"{name}-{turn}-a", f"{name}-{turn}-b"
                db.run(lambda a=a, b=b: [jobs.insert(db, [new(a)]), jobs.insert(db, [new(b)])])  # type: ignore[misc]
                for claim in jobs.claim(db, name, [a], LEASE):
                    outcomes.settle(db, name, [Outcome(claim.id, claim.claim, "retry", evidence=None)])
            except Halt:
                interrupted.append(turn)
            except StoreError:
                # psycopg, interrupted inside a pipeline, reports the trouble that it has with leaving it instead.
                interrupted.append(turn)
            except RuntimeError as e:
                # An interrupt of an interrupt: the interpreter's own locks are not made for that
                assert "un-acquired" in str(e)

    def run(name: str) -> None:
        while time.monotonic() < stop:
            with contextlib.suppress(Halt):
                work(name)

    threads = [threading.Thread(target=run, args=(f"w{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    while time.monotonic() < stop - 0.5:
        for thread in threads:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Halt))
        time.sleep(0.004)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()

    # Then of each pair there are both or none
    assert len(interrupted) > 50
    found = {id for (id,) in other.fetch(Statement("list", "SELECT id FROM {jobs}"))}
    assert found and {id[:-1] for id in found if id.endswith("a")} == {id[:-1] for id in found if id.endswith("b")}

    # And the record is free
    assert in_threads(4, lambda i: jobs.record(db, new(f"after-{i}"))) == ["recorded"] * 4
    assert jobs.record(other, new("outside")) == "recorded"
    if db.dialect.name == "postgresql":
        lingering = Statement("count", f"SELECT COUNT(*) {_OURS} AND state LIKE 'idle in transaction%'")
        assert other.fetch(lingering) == [(0,)]
    gc.collect()


# SQLite's own


def test_a_writer_of_another_process_is_waited_for(tmp_path: Path, migrated_file: Path) -> None:
    path = shutil.copy(migrated_file, tmp_path / "record.sqlite3")
    db, slow = connect(f"sqlite:///{path}"), connect(f"sqlite:///{path}")
    with slow.transaction():
        jobs.record(slow, new("a"))
        thread = threading.Thread(target=lambda: jobs.record(db, new("b")))
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive()
    thread.join(10)
    assert reading.counts(db) == {"queued": 2}


def test_a_writer_of_another_process_that_never_ends_is_reported(tmp_path: Path, migrated_file: Path) -> None:
    path = shutil.copy(migrated_file, tmp_path / "record.sqlite3")
    db, slow = connect(f"sqlite:///{path}", busy_timeout=50), connect(f"sqlite:///{path}")
    with slow.transaction():
        for call in (lambda: jobs.record(db, new("b")), lambda: jobs.record_many(db, [new("b")])):
            with pytest.raises(DatabaseUnavailable, match="busy"):
                call()
        # Readers are not kept waiting
        assert reading.counts(db) == {}
    assert jobs.record(db, new("b")) == "recorded"


def test_a_relative_path_stays_where_it_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    db = connect("sqlite:///record.sqlite3")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    migrate.upgrade(db)

    assert (tmp_path / "record.sqlite3").exists() and not (tmp_path / "elsewhere" / "record.sqlite3").exists()
    db.close_all()


def test_a_place_that_cannot_hold_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidDatabaseURL, match="is a directory"):
        reading.now(connect(f"sqlite:///{tmp_path}"))
    with pytest.raises(DatabaseUnavailable, match="does not exist"):
        reading.now(connect(f"sqlite:///{tmp_path}/nowhere/record.sqlite3"))
    (tmp_path / "text").write_text("This is no database, but long enough to be taken for one. " * 20)
    with pytest.raises(StoreError, match="no SQLite database"):
        reading.now(connect(f"sqlite:///{tmp_path}/text"))
