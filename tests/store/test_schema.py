"""The tables: what they allow, how they come to be, and how releases of different age share them."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dramatiq_durable.errors import SchemaOutdated, SchemaTooNew, StoreError
from dramatiq_durable.states import FINAL, JobState
from dramatiq_durable.store import jobs, migrate, reading
from dramatiq_durable.store.database import Database, connect
from dramatiq_durable.store.dialects import Statement
from tests.store.rows import change, claimed, new, started

FIRST = "0001_initial"

_CHECKS = {
    "sqlite": Statement("read the schema", "SELECT sql FROM sqlite_master WHERE name = 'durable_jobs'"),
    "postgresql": Statement(
        "read the checks",
        "SELECT conname || ' ' || pg_get_constraintdef(oid) FROM pg_constraint"
        " WHERE conrelid = 'durable_jobs'::regclass",
    ),
}
_INDEXES = {
    "sqlite": Statement("list indexes", "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"),
    "postgresql": Statement(
        "list indexes", "SELECT indexname FROM pg_indexes WHERE schemaname = 'public' AND indexname NOT LIKE '%pkey'"
    ),
}


def words_of(db: Database, constraint: str) -> set[str]:
    """The quoted words of a CHECK."""
    text = "\n".join(row[0] for row in db.fetch(_CHECKS[db.dialect.name]))
    found = re.search(rf"{constraint} CHECK (.*?)(?=CONSTRAINT|durable_jobs_|\Z)", text, re.DOTALL)
    assert found, text
    return set(re.findall(r"'(\w+)'", found[1]))


def test_the_database_knows_the_same_states_as_the_table_of_transitions(db: Database) -> None:
    assert words_of(db, "durable_jobs_state") == {state.value for state in JobState}
    assert words_of(db, "durable_jobs_final") == {state.value for state in FINAL}


@pytest.mark.parametrize(
    ("id", "setting"),
    [
        ("queued", "state = 'running'"),
        ("queued", "state = 'completed'"),
        ("queued", "finished_at = 1"),
        ("queued", "state = 'active'"),
        ("queued", "owner = 'w1'"),
        ("queued", "lease_until = 1"),
        ("queued", "started_at = 1"),
        ("queued", "on_lost = 'whatever'"),
        ("queued", "state = 'scheduled', publish_at = NULL"),
        ("queued", "state = 'parked', publish_at = 1"),
        ("queued", "attempt = -1"),
        ("queued", "retries = -1"),
        ("queued", "revision = 0"),
        ("queued", "payload = NULL"),
        ("active", "owner = NULL"),
        ("active", "lease_until = NULL"),
        ("active", "claimed_at = NULL"),
        ("active", "publish_at = 1"),
        ("active", "state = 'queued'"),
        ("active", "claim = -1"),
        ("started", "state = 'completed', finished_at = 1"),
        ("started", "state = 'scheduled', owner = NULL, lease_until = NULL, publish_at = 1"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused(db: Database, id: str, setting: str) -> None:
    jobs.record(db, new("queued"))
    claimed(db, "active")
    started(db, "started")

    with pytest.raises(StoreError, match="refused"):
        change(db, f"UPDATE {{jobs}} SET {setting} WHERE id = ?", id)


def test_there_are_no_more_indexes_than_were_paid_for(db: Database) -> None:
    ours = {name for (name,) in db.fetch(_INDEXES[db.dialect.name]) if not name.startswith("durable_migrations")}

    assert ours == {"durable_jobs_open", "durable_jobs_publish_at", "durable_results_pending"}


# Up and down


def test_tables_are_made_once_undone_and_made_again(database_url: str) -> None:
    db = connect(database_url)
    all = migrate.check(db)
    assert all[0] == FIRST
    with pytest.raises(SchemaOutdated, match=r"0001_initial.*dramatiq-durable migrate"):
        migrate.require_current(db)

    assert migrate.upgrade(db) == all == migrate.applied(db)
    assert migrate.upgrade(db) == migrate.check(db) == []
    migrate.require_current(db)

    assert migrate.downgrade(db, FIRST) == all[::-1]
    assert migrate.check(db) == all
    assert [name for name in tables(db) if name != migrate.HISTORY] == []

    assert migrate.upgrade(db, FIRST) == [FIRST]
    migrate.upgrade(db)
    jobs.record(db, new("a"))
    db.close_all()


def test_targets_that_do_not_exist_are_refused_in_words(database_url: str) -> None:
    db = connect(database_url)
    with pytest.raises(StoreError, match=r"unknown migration \"0999_future\""):
        migrate.upgrade(db, "0999_future")
    migrate.upgrade(db)
    with pytest.raises(StoreError, match="not an applied migration"):
        migrate.downgrade(db, "0999_future")
    migrate.require_current(db)
    db.close_all()


def test_the_sql_can_be_run_by_hand_and_is_known_to_have_been(database_url: str) -> None:
    # Given the SQL of what is pending
    db = connect(database_url)
    text = migrate.sql(db)

    # When an administrator runs it
    if db.dialect.name == "sqlite":
        with sqlite3.connect(database_url.removeprefix("sqlite:///")) as connection:
            connection.executescript(text)
        connection.close()
    else:
        import psycopg

        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(text)

    # Then nothing is pending, and the tool goes on from there
    assert (migrate.check(db), migrate.sql(db), migrate.upgrade(db)) == ([], "", [])
    jobs.record(db, new("a"))
    assert migrate.downgrade(db, FIRST)[-1] == FIRST
    assert migrate.upgrade(db)[0] == FIRST
    db.close_all()


def test_a_migration_that_breaks_leaves_nothing_behind(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a release whose second migration is wrong
    directory = with_migrations(
        tmp_path, monkeypatch, **{"0900_wrong": ["CREATE TABLE durable_half (id TEXT)", "OOPS"]}
    )
    db = connect(database_url)

    # When it is applied
    with pytest.raises(StoreError, match="migrate: .*OOPS"):
        migrate.upgrade(db)

    # Then its first half is not there, nobody is locked out, and a corrected one can be applied
    assert "durable_half" not in tables(db) and "0900_wrong" in migrate.check(db)
    write(directory, "0900_wrong", ["CREATE TABLE durable_half (id TEXT)"])
    assert migrate.upgrade(db)[-1] == "0900_wrong"
    db.close_all()


def test_an_older_release_works_on_newer_tables_unless_they_say_that_it_cannot(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = connect(database_url)

    # Given a newer release that has added a column
    with monkeypatch.context() as newer:
        with_migrations(tmp_path, newer, **{"0900_more": ["ALTER TABLE {jobs} ADD COLUMN colour TEXT"]})
        migrate.upgrade(db)

    # Then this one goes on
    migrate.require_current(db)
    jobs.record(db, new("a"))
    assert reading.counts(db) == {"queued": 1}

    # Given one that has broken with it
    with monkeypatch.context() as newest:
        with_migrations(
            tmp_path,
            newest,
            **{
                "0900_more": ["ALTER TABLE {jobs} ADD COLUMN colour TEXT"],
                "0901_other_breaking": ["ALTER TABLE {jobs} ADD COLUMN size TEXT"],
            },
        )
        migrate.upgrade(db)

    # Then it refuses
    with pytest.raises(SchemaTooNew, match="Upgrade dramatiq-durable"):
        migrate.require_current(db)
    db.close_all()


def test_what_needs_no_tables_can_be_asked_without_them(database_url: str) -> None:
    db = connect(database_url)

    assert migrate.applied(db) == []
    assert reading.now(db) > 0
    db.close_all()


def tables(db: Database) -> list[str]:
    texts: dict[str, Any] = {
        "sqlite": "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'durable%'",
        "postgresql": "SELECT tablename FROM pg_tables WHERE tablename LIKE 'durable%'",
    }
    return sorted(name for (name,) in db.fetch(Statement("list tables", texts[db.dialect.name])))


def with_migrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: list[str]) -> Path:
    """Have the package find *more* migrations after its own, as if it were a later release."""
    directory = tmp_path / "migrations"
    directory.mkdir(exist_ok=True)
    for path in migrate._DIRECTORY.glob("[0-9]*.py"):
        (directory / path.name).write_text(path.read_text())
    for name, statements in more.items():
        write(directory, name, statements)
    monkeypatch.setattr(migrate, "_DIRECTORY", directory)
    return directory


def write(directory: Path, name: str, statements: list[str]) -> None:
    (directory / f"{name}.py").write_text(
        f"from dramatiq_durable.store.migrate import apply\nUP = {statements!r}\n"
        "def up(migrator, db):\n    apply(db, UP)\n"
    )
