"""How the databases go about the statements: what runs often finds its rows through an index, however long the history.

PostgreSQL is asked with old statistics and with fresh ones, and for the plan that it would keep for a prepared
statement.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from dramatiq_durable.store import jobs, outcomes, reading, recovery
from dramatiq_durable.store.database import Database, connect
from dramatiq_durable.store.dialects import Statement
from tests.store.rows import LEASE, change, new

MODULES: list[ModuleType] = [jobs, outcomes, recovery, reading]
STATEMENTS = {
    f"{module.__name__.rpartition('.')[2]}{name}": value
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, Statement)
}


def rows(db: Database, *given: tuple[Any, ...]) -> tuple[Any, ...]:
    return db.dialect.rows(given, len(given[0]))


def parameters(db: Database, number: int = 8) -> dict[str, tuple[Any, ...]]:
    """For each statement that runs often: its parameters, which name so many jobs."""
    ids = [(f"w-{i:05}",) for i in range(number)]
    return {
        "jobs_CLAIM": (*rows(db, *ids), "w1", LEASE),
        "jobs_CLAIM_AGAIN": (*rows(db, *ids), LEASE, "w1"),
        "jobs_START": (*rows(db, *[(id, 1, "rerun", 0) for (id,) in ids]), LEASE, "w1"),
        "jobs_RENEW": (*rows(db, *[(id, 1, True) for (id,) in ids]), "w1", LEASE, "w1"),
        "jobs_RELEASE": (*rows(db, *[(id, 1) for (id,) in ids]), "x", "w1"),
        "jobs_LOCATE": rows(db, *ids),
        "jobs_LOAD": rows(db, *ids),
        "outcomes_COMPLETE": (*rows(db, *[(id, 1, 5) for (id,) in ids]), "w1"),
        "outcomes_LOCK": rows(db, *ids),
        "recovery_NEXT_DUE": (),
        "recovery_TAKE_DUE": (10,),
        "recovery_UNPUBLISH": (*rows(db, *[(id, "r") for (id,) in ids]), 0),
        "recovery_WAITING": ("w-00500", 100, 0),
        "recovery_PUT_BACK": rows(db, *[(id, "r") for (id,) in ids]),
        "recovery_WATCH": (),
        "recovery_REAP_CLAIMED": rows(db, *[(id, 1, 0) for (id,) in ids]),
        "recovery_REAP_STARTED": (*rows(db, *[(id, 1, 0) for (id,) in ids]), 3),
        "recovery_NOTE_LOST": rows(db, *[(id, 1, 0) for (id,) in ids]),
        "recovery_UNPARK": (*rows(db, ("work",)), 10),
        "reading_LIST_OPEN": ("active", None, None, None, None, None, None, 50),
        "reading_OLDEST": (),
        "reading_UNFINISHED": ("default",),
    }


#: Those that name their jobs, and must not walk through all jobs of a state to find them.
NAMED = {
    name
    for name in STATEMENTS
    if name.startswith(("jobs_C", "jobs_S", "jobs_REL", "jobs_L", "outcomes_C", "outcomes_L"))
    or name in {"recovery_UNPUBLISH", "recovery_PUT_BACK", "recovery_REAP_CLAIMED", "recovery_REAP_STARTED"}
}


@pytest.fixture
def history(db: Database) -> Iterator[Database]:
    """6,000 finished jobs that the database has statistics of, and 2,000 open ones that it has none of."""
    jobs.record_many(db, [new(f"f-{i:05}") for i in range(6_000)])
    change(db, "UPDATE {jobs} SET state = 'completed', finished_at = 1, owner = 'w0', claim = 1")
    if db.dialect.name == "postgresql":
        change(db, "ALTER TABLE {jobs} SET (autovacuum_enabled = off)")
    change(db, "ANALYZE {jobs}")
    jobs.record_many(db, [new(f"w-{i:05}") for i in range(1_500)])
    jobs.record_many(db, [new(f"d-{i:05}", delay=3_600_000) for i in range(500)])
    jobs.claim(db, "w1", [f"w-{i:05}" for i in range(0, 1_500, 10)], LEASE)
    yield db
    if db.dialect.name == "postgresql":
        change(db, "ALTER TABLE {jobs} RESET (autovacuum_enabled)")


@pytest.fixture
def postgres_record(migrated_postgres: str) -> Iterator[Database]:
    db = connect(migrated_postgres)
    change(db, "TRUNCATE {jobs}")
    yield db
    db.close_all()


def plan(db: Database, statement: Statement, given: tuple[Any, ...]) -> str:
    text = statement.texts[db.dialect.name]
    if db.dialect.name == "sqlite":
        with db._connection() as connection:
            return "\n".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {text}", given))
    with db._connection() as connection:
        return "\n".join(row[0] for row in connection.execute(f"EXPLAIN {text}", given, prepare=False))


def kept_plan(db: Database, statement: Statement, count: int) -> str:
    """The plan that PostgreSQL keeps for any parameters."""
    text = statement.texts[db.dialect.name]
    for i in range(count):
        text = text.replace("%s", f"${i + 1}", 1)
    nulls = f"({', '.join(['NULL'] * count)})" if count else ""
    with db._connection() as connection:
        connection.execute("SET plan_cache_mode = force_generic_plan")
        connection.execute(f"PREPARE kept AS {text.replace('%%', '%')}")
        found = "\n".join(row[0] for row in connection.execute(f"EXPLAIN EXECUTE kept{nulls}"))
        connection.execute("DEALLOCATE kept")
        connection.execute("RESET plan_cache_mode")
    return found


def walks(plan: str) -> list[str]:
    """The steps that read the whole table."""
    return re.findall(r"Seq Scan on durable_jobs.*|SCAN (?:durable_jobs|j)\b(?! USING).*", plan)


@pytest.mark.parametrize("statistics", ["old", "fresh"])
def test_what_runs_often_reads_no_table_from_end_to_end(history: Database, statistics: str) -> None:
    if statistics == "fresh":
        change(history, "ANALYZE {jobs}")

    for name, given in parameters(history).items():
        found = plan(history, STATEMENTS[name], given)
        assert not walks(found), f"{name}\n{found}"
        if name in NAMED:
            # Old statistics say that there is no open job: a walk through all of them would seem to cost nothing
            assert "durable_jobs_open" not in found, f"{name}\n{found}"


def test_many_named_jobs_are_not_compared_with_every_row_one_by_one(postgres_record: Database) -> None:
    # Given a table that has grown faster than the statistics about it, and so many ids that it is read as a whole
    db = postgres_record
    change(db, "DELETE FROM pg_statistic WHERE starelid = 'durable_jobs'::regclass")
    jobs.record_many(db, [new(f"w-{i:05}") for i in range(2_000)])
    for way in ("indexscan", "indexonlyscan", "bitmapscan", "mergejoin"):
        change(db, f"SET enable_{way} = off")

    # Then it does not believe that hardly a row is left when it begins to compare
    given = parameters(db, 1_500)
    for name in NAMED & given.keys() - {"outcomes_LOCK"}:
        found = plan(db, STATEMENTS[name], given[name])
        estimates = [int(rows) for rows in re.findall(r"Seq Scan on durable_jobs  ?\(.* rows=(\d+)", found)]
        assert estimates and min(estimates) > 50, f"{name}\n{found}"


def test_the_plans_that_are_kept_are_good_too(history: Database) -> None:
    if history.dialect.name == "sqlite":
        # It knows no values when it plans: the other test has seen what it keeps
        return
    for name, given in parameters(history).items():
        # How many will be taken is not known then; PostgreSQL compares, and prefers the plan for the real number
        if name not in ("recovery_TAKE_DUE", "recovery_UNPARK"):
            found = kept_plan(history, STATEMENTS[name], len(given))
            assert not walks(found), f"{name}\n{found}"
            assert name not in NAMED or "durable_jobs_open" not in found, f"{name}\n{found}"


def test_looking_for_what_is_due_does_not_look_at_what_is_not(history: Database) -> None:
    for name in ("recovery_TAKE_DUE", "recovery_NEXT_DUE"):
        found = plan(history, STATEMENTS[name], parameters(history)[name])
        assert "durable_jobs_publish_at" in found, f"{name}\n{found}"
        if name == "recovery_TAKE_DUE":
            assert "Index Cond: (publish_at <=" in found or "publish_at<?" in found, found


@pytest.mark.parametrize("name", STATEMENTS)
def test_every_statement_is_understood(db: Database, name: str) -> None:
    text = STATEMENTS[name].texts[db.dialect.name]
    if db.dialect.name == "sqlite":
        with db._connection() as connection:
            assert isinstance(connection, sqlite3.Connection)
            connection.execute(f"EXPLAIN {text}", [None] * text.count("?")).fetchall()
    else:
        assert kept_plan(db, STATEMENTS[name], text.count("%s"))
