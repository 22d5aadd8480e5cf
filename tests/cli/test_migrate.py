from __future__ import annotations

import sqlite3
from pathlib import Path

from dramatiq_durable.store import migrate
from dramatiq_durable.store.database import connect
from tests.cli.conftest import Command
from tests.servers import Postgres

FIRST = "0001_initial"


def test_the_tables_are_created_once_and_then_up_to_date(command: Command, database_url: str) -> None:
    # Given an empty database: something is pending
    pending = command("migrate", "--check", "--json", "--database-url", database_url)
    assert (pending.code, pending.json()["pending"][0]) == (1, FIRST)

    # When it is migrated, twice
    first = command("migrate", "--json", "--database-url", database_url)
    second = command("migrate", "--json", "--database-url", database_url)

    # Then the second time there is nothing left to do
    assert (first.code, first.json()) == (0, {"applied": pending.json()["pending"]})
    assert (second.code, second.json()) == (0, {"applied": []})
    assert command("migrate", "--check", "--database-url", database_url).code == 0
    assert command("status", "--database-url", database_url).code == 0


def test_looking_changes_nothing(command: Command, database_url: str) -> None:
    for option in ("--check", "--sql", "--dry-run"):
        command("migrate", option, "--database-url", database_url)

    db = connect(database_url)
    assert migrate.applied(db) == []
    db.close_all()


def test_looking_at_a_file_that_is_not_there_does_not_create_it(command: Command, tmp_path: Path) -> None:
    assert command("migrate", "--check").code == 1
    assert command("migrate", "--dry-run").code == 0
    assert "CREATE TABLE durable_jobs" in command("migrate", "--sql").out
    assert command("status").code == 2

    assert list(tmp_path.iterdir()) == []


def test_the_sql_can_be_run_by_hand(command: Command, tmp_path: Path) -> None:
    sql = command("migrate", "--sql", "--json").json()["sql"]

    with sqlite3.connect(tmp_path / "by-hand.sqlite3") as connection:
        connection.executescript(sql)
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    connection.close()
    assert {"durable_jobs", "durable_attempts"} <= tables


def test_the_way_down_asks_first(command: Command, database_url: str) -> None:
    command("migrate", "--database-url", database_url)

    # When nobody can be asked and nobody has said yes
    refused = command("migrate", "--down", FIRST, "--database-url", database_url)
    looked = command("migrate", "--down", FIRST, "--dry-run", "--json", "--database-url", database_url)

    # Then nothing happens
    assert refused.code == 2 and "--yes" in refused.err
    assert looked.json()["would_undo"][-1] == FIRST
    assert command("migrate", "--check", "--database-url", database_url).code == 0

    # When somebody has
    done = command("migrate", "--down", FIRST, "--yes", "--json", "--database-url", database_url)

    # Then the tables are gone
    assert (done.code, done.json()["undone"]) == (0, looked.json()["would_undo"])
    assert command("migrate", "--check", "--database-url", database_url).code == 1


def test_an_unknown_target_and_two_questions_at_once_are_refused(command: Command, url: str) -> None:
    command("migrate", "--database-url", url)

    unknown = command("migrate", "--down", "0999_future", "--yes", "--database-url", url)
    both = command("migrate", "--check", "--sql", "--database-url", url)

    assert (unknown.code, both.code) == (2, 2)
    assert FIRST in unknown.err and "one thing at a time" in both.err


def test_a_user_without_rights_is_told_so(command: Command, postgres: Postgres) -> None:
    # Given a user who may connect and do nothing else
    url = postgres.create()
    name = url.rpartition("/")[2]
    with postgres.connect(name) as connection:
        connection.execute("DROP ROLE IF EXISTS guest")
        connection.execute("CREATE ROLE guest LOGIN PASSWORD 'hunter2'")
    guest = url.replace("postgres@", "guest:hunter2@")

    # When the user migrates, or reads tables that are there
    refused = command("migrate", "--database-url", guest)
    command("migrate", "--database-url", url)
    unseen = command("status", "--database-url", guest)

    # Then both are refused in a sentence
    for answer in (refused, unseen):
        assert (answer.code, answer.out) == (2, "")
        assert "may not do this" in answer.err and "permission denied" in answer.err
        assert "Traceback" not in answer.err and "hunter2" not in answer.err
