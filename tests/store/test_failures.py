"""What goes wrong is said in a sentence: what happened, what to do, and nothing that is secret."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from dramatiq_durable.errors import (
    DatabaseFull,
    DatabaseUnavailable,
    InvalidDatabaseURL,
    NotPermitted,
    SchemaOutdated,
    StoreError,
)
from dramatiq_durable.store import jobs, outcomes, reading
from dramatiq_durable.store.database import Database, connect
from dramatiq_durable.store.dialects import Statement
from dramatiq_durable.store.types import Outcome
from tests.servers import Postgres, free_port
from tests.store.rows import change, claimed, new

# URLs


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "no scheme"),
        ("record.sqlite3", "no scheme"),
        ("mysql://u:hunter2@host/db", "'mysql://'"),
        ("postgresql+psycopg2://u:hunter2@host/db", "'postgresql+psycopg2://'"),
        ("sqlite://record.sqlite3", "three slashes"),
        ("sqlite://", "three slashes"),
        ("sqlite:///:memory:", "in memory"),
        ("postgresql://u:hunter2@host", "names no database"),
        ("postgresql://u:hunter2@host/db?colour=red", "cannot be understood"),
        ("postgresql://u:hun%ter2@host/db", "cannot be understood"),
        ("postgresql://u:hun[ter2@host/db", "cannot be understood"),
    ],
)
def test_a_url_that_cannot_be_understood_is_refused_at_once(url: str, says: str) -> None:
    with pytest.raises(InvalidDatabaseURL) as caught:
        connect(url)

    assert says in str(caught.value) and str(caught.value).endswith((".", "?"))
    assert "hunter2" not in str(caught.value) and "ter2" not in str(caught.value)


def test_what_a_url_says_goes_before_what_is_filled_in(migrated_postgres: str) -> None:
    db = connect(migrated_postgres.replace("postgresql:", "postgres:") + "?application_name=mine&connect_timeout=9")

    assert db.fetch(Statement("ask", "SELECT current_setting('application_name')")) == [("mine",)]
    db.close_all()


def test_a_description_of_a_database_opens_nothing(tmp_path: Path) -> None:
    connect(f"sqlite:///{tmp_path}/record.sqlite3")
    connect(f"postgresql://u:p@127.0.0.1:{free_port()}/db")

    assert list(tmp_path.iterdir()) == []


def test_a_url_without_its_password_can_be_shown() -> None:
    shown = connect("postgresql://scott:hunter2@db.example.com:5432/jobs").safe_url

    assert "hunter2" not in shown and "db.example.com:5432/jobs" in shown


# Servers


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    db = connect(f"postgresql://u:hunter2@127.0.0.1:{free_port()}/db")

    with pytest.raises(
        DatabaseUnavailable, match=r"does not answer \(connect: .*refused.*Try again when it is back"
    ) as e:
        reading.counts(db)
    assert "hunter2" not in str(e.value)


def test_a_host_that_is_none_shows_nothing_of_a_password_that_was_not_encoded() -> None:
    db = connect("postgresql://u:hunter2@more@host.invalid/db")

    with pytest.raises(StoreError) as e:
        reading.counts(db)
    assert "hunter2" not in str(e.value) and "more" not in str(e.value)


def test_a_database_that_does_not_exist(postgres: Postgres) -> None:
    with pytest.raises(InvalidDatabaseURL, match=r"no such database .*nowhere"):
        reading.counts(connect(postgres.url("nowhere")))


def test_a_user_who_does_not_exist(postgres: Postgres) -> None:
    with pytest.raises(NotPermitted, match="nobody_here"):
        reading.counts(connect(postgres.url().replace("postgres@", "nobody_here:hunter2@")))


def test_tables_that_are_missing(database_url: str) -> None:
    db = connect(database_url)

    with pytest.raises(SchemaOutdated, match=r"dramatiq-durable migrate"):
        reading.counts(db)
    with pytest.raises(SchemaOutdated):
        outcomes.settle(db, "w1", [Outcome("a", 1, "failed")])
    db.close_all()


def test_a_column_that_is_missing(database_url: str) -> None:
    db = connect(database_url)
    change(db, "CREATE TABLE durable_jobs (id TEXT)")

    for call in (lambda: reading.counts(db), lambda: jobs.record(db, new("a"))):
        with pytest.raises(SchemaOutdated):
            call()
    db.close_all()


def test_a_user_without_rights(migrated_postgres: str) -> None:
    # Given a user who may read and no more
    db = connect(migrated_postgres, pool_size=1)
    role = f"reader_{uuid.uuid4().hex}"
    for text in (
        f"CREATE ROLE {role}",
        f"GRANT USAGE ON SCHEMA public TO {role}",
        f"GRANT SELECT ON {{jobs}} TO {role}",
    ):
        change(db, text)
    change(db, f"SET ROLE {role}")

    # Then reading is what this user may do
    assert reading.counts(db) is not None
    with pytest.raises(NotPermitted, match=r"record a job: permission denied .*Grant"):
        jobs.record(db, new("a"))

    change(db, "RESET ROLE")
    change(db, f"DROP OWNED BY {role}")
    change(db, f"DROP ROLE {role}")
    db.close_all()


def test_a_server_that_only_reads_is_left_for_one_that_writes(migrated_postgres: str) -> None:
    # Given a connection to a server that has become a standby
    db = connect(migrated_postgres)
    change(db, "SET default_transaction_read_only = on")

    with pytest.raises(DatabaseFull, match="can only be read"):
        jobs.record(db, new("read-only"))

    # Then the next statement goes over another connection, which leads to the new primary
    assert jobs.record(db, new("read-only")) == "recorded"
    db.close_all()


def test_a_statement_that_takes_too_long_is_no_lost_connection(migrated_postgres: str) -> None:
    db = connect(migrated_postgres)
    with pytest.raises(DatabaseUnavailable, match="statement timeout"), db.transaction():
        change(db, "SET LOCAL statement_timeout = 20")
        db.fetch(Statement("sleep", "SELECT pg_sleep(5)"))
    db.close_all()


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("53100", DatabaseFull),
        ("25006", DatabaseFull),
        ("42501", NotPermitted),
        ("42P01", SchemaOutdated),
        ("57P01", DatabaseUnavailable),
        ("53300", DatabaseUnavailable),
        ("08006", DatabaseUnavailable),
        ("58030", DatabaseUnavailable),
        ("40001", DatabaseUnavailable),
        ("40P01", DatabaseUnavailable),
        ("XX001", StoreError),
        ("23514", StoreError),
    ],
)
def test_a_servers_error_is_known_by_its_code_whatever_its_language(
    migrated_postgres: str, state: str, kind: type[StoreError]
) -> None:
    db = connect(migrated_postgres)
    text = f"DO $$ BEGIN RAISE EXCEPTION 'etwas ist schiefgegangen' USING ERRCODE = '{state}'; END $$"

    with pytest.raises(StoreError, match=r"\(try something: etwas ist schiefgegangen\)") as e:
        db.execute(Statement("try something", text))

    assert type(e.value) is kind
    db.close_all()


def test_what_was_undone_because_of_others_is_tried_again(migrated_postgres: str) -> None:
    # Given a statement that fails, but not the third time
    db = connect(migrated_postgres)
    change(db, "CREATE SEQUENCE IF NOT EXISTS tries")
    text = "DO $$ BEGIN IF nextval('tries') % 3 > 0 THEN RAISE EXCEPTION 'x' USING ERRCODE = '40P01'; END IF; END $$"
    stumble = Statement("stumble", text)

    # Then it is tried again, alone or with the transaction around it
    db.execute(stumble)
    assert db.run(lambda: (db.execute(stumble), jobs.record(db, new("stumbled")))[1]) == "recorded"
    with pytest.raises(DatabaseUnavailable, match="busy"), db.transaction():
        db.execute(stumble)

    change(db, "DROP SEQUENCE tries")
    db.close_all()


# Files


def test_a_full_disk(migrated_file: Path, tmp_path: Path) -> None:
    db = connect(f"sqlite:///{shutil.copy(migrated_file, tmp_path)}")
    change(db, "PRAGMA max_page_count = 1")

    for call in (jobs.record, lambda db, job: jobs.record_many(db, [job])):
        with pytest.raises(DatabaseFull, match=r"cannot write \(record a job: .*full"):
            call(db, new("a", payload=b"x" * 1_000_000))
    assert reading.counts(db) == {}
    db.close_all()


def test_a_file_that_may_not_be_written(migrated_file: Path) -> None:
    # As a user who is not root: root may write everything
    script = (
        "import os, sys\n"
        "from dramatiq_durable.store import jobs\n"
        "from dramatiq_durable.store.database import connect\n"
        "from dramatiq_durable.store.types import NewJob\n"
        "db = connect(sys.argv[1])\n"
        "os.getuid() == 0 and os.setuid(65534)\n"
        "try: jobs.record(db, NewJob('a', 'q', 'a', 'a', b''))\n"
        "except Exception as e: print(type(e).__name__, e)\n"
    )

    def attempt() -> str:
        arguments = [sys.executable, "-c", script, f"sqlite:///{path}"]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True).stdout

    with tempfile.TemporaryDirectory() as name:
        directory, path = Path(name), Path(name, "record.sqlite3")
        shutil.copy(migrated_file, path)
        path.chmod(0o444)
        directory.chmod(0o777)
        assert attempt().startswith("DatabaseFull [DD207] The database can only be read")
        directory.chmod(0o555)
        assert attempt().startswith("NotPermitted [DD206] The directory")
        directory.chmod(0o700)
        assert os.getuid() != 0 or attempt().startswith("NotPermitted [DD206] The ")


def test_a_file_that_another_program_has_damaged(migrated_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "record.sqlite3"
    path.write_bytes(migrated_file.read_bytes()[:4096] + b"\xff" * 40_960)

    with pytest.raises(StoreError, match="damaged"):
        reading.counts(connect(f"sqlite:///{path}"))


# Values


def test_what_the_database_refuses_is_not_quoted(db: Database) -> None:
    # Given a row that breaks a rule; PostgreSQL's details quote the whole row
    jobs.record(db, new("a", payload=b"hunter2", agent="hunter2"))

    with pytest.raises(StoreError) as e:
        change(db, "UPDATE {jobs} SET state = 'nonsense' WHERE id = 'a'")

    assert "hunter2" not in str(e.value) and "durable_jobs_state" in str(e.value)


@pytest.mark.parametrize("id", ["lone \udcff surrogate", "nul \x00"])
def test_ids_that_cannot_be_stored_are_refused_in_words(db: Database, id: str) -> None:
    if db.dialect.name == "sqlite" and "\x00" in id:
        assert jobs.record(db, new(id)) == "recorded"
        return
    with pytest.raises(StoreError, match="record a job"):
        jobs.record(db, new(id))
    assert reading.counts(db) == {}


def test_the_drivers_error_is_the_cause(db: Database) -> None:
    claimed(db, "a")

    with pytest.raises(StoreError) as e:
        change(db, "UPDATE {jobs} SET claim = -1")

    assert isinstance(e.value.__cause__, sqlite3.Error) or hasattr(e.value.__cause__, "sqlstate")


@pytest.mark.parametrize("words", [["status"], ["migrate", "--check"]])
def test_a_driver_that_is_not_installed_is_named_in_a_sentence(words: list[str]) -> None:
    """Bad input of the record: no traceback, what to install, and no password."""
    program = "import sys; sys.modules['psycopg'] = None; from dramatiq_durable.cli import main; main()"
    url = "postgresql://app:hunter2@127.0.0.1/app"
    done = subprocess.run(
        [sys.executable, "-c", program, *words, "--database-url", url], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "DD204" in done.stderr and "dramatiq-durable[postgres]" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr and "hunter2" not in done.stderr + done.stdout
