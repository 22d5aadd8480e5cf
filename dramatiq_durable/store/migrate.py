"""Create and upgrade the tables.

The files under ``migrations/`` are run by peewee's runner, under a lock of the database, so that any number of
processes may try at once and one does it.  A release works with tables that are one release newer (expand first,
contract a release later); the name of a migration that breaks older releases ends in ``_breaking``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import SchemaOutdated, SchemaTooNew, StoreError
from .database import Database
from .dialects import DIALECTS, Statement
from .failures import is_conflict, translate

__all__ = ["applied", "apply", "check", "downgrade", "require_current", "sql", "upgrade"]

#: Where the applied migrations are recorded.
HISTORY = "durable_migrations"

_DIRECTORY = Path(__file__).with_name("migrations")

#: Any number nobody else is likely to use; PostgreSQL's advisory locks are shared by a whole database.
_LOCK_KEY = 7_361_920_144

#: How long to wait for another process that migrates the same file (seconds).
LOCK_WAIT = 60.0

_APPLIED = Statement("read the applied migrations", f"SELECT name FROM {HISTORY} ORDER BY name")


def apply(peewee: Any, templates: Sequence[str]) -> None:
    """Run the statements of one migration.  Called by the migration files."""
    dialect = DIALECTS["sqlite" if "Sqlite" in type(peewee).__name__ else "postgresql"]
    for template in templates:
        peewee.execute_sql(dialect.render(template))


def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_DIRECTORY.glob("[0-9]*.py"))}


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{__package__}.migrations.{name}", _files()[name])
    if spec is None or spec.loader is None:
        raise StoreError(f"Migration {name} cannot be read.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def applied(db: Database) -> list[str]:
    """Return the names of the migrations that were applied, those of newer releases included.

    Raises:
      StoreError: If the database does not answer.
    """
    try:
        return [row[0] for row in db.fetch(_APPLIED)]
    except SchemaOutdated:
        return []


def check(db: Database) -> list[str]:
    """Return the names of the migrations that are pending.

    Raises:
      StoreError: If the database does not answer.
    """
    there = set(applied(db))
    return [name for name in _files() if name not in there]


def require_current(db: Database) -> None:
    """Raise unless the tables fit this release.

    Raises:
      SchemaOutdated: If migrations are pending.
      SchemaTooNew: If a migration of a newer release broke with this one.
      DatabaseUnavailable: If the database does not answer.
    """
    pending = check(db)
    if pending:
        raise SchemaOutdated(
            f"The tables of the record at {db.safe_url} are missing or old ({', '.join(pending)} pending). Nothing was "
            "started. Run `dramatiq-durable migrate` with the same database URL, then start again."
        )
    foreign = [name for name in applied(db) if name not in _files()]
    if any(name.endswith("_breaking") for name in foreign):
        raise SchemaTooNew(
            f"The tables of the record at {db.safe_url} are too new for this release ({', '.join(foreign)}). "
            "Nothing was started. Upgrade dramatiq-durable."
        )


def sql(db: Database) -> str:
    """Return the SQL of the pending migrations, to be read or run by hand; it notes that they are applied."""
    pending = check(db)
    if not pending:
        return ""
    parts = ["BEGIN;", *_history(db.dialect.name)]
    for name in pending:
        parts.append(f"-- {name}")
        parts += [db.dialect.render(template).replace("%%", "%").strip() + ";" for template in _load(name).UP]
        parts.append(f"INSERT INTO {HISTORY} (name, applied) VALUES ('{name}', CURRENT_TIMESTAMP);")
    return "\n\n".join([*parts, "COMMIT;"]) + "\n"


def _history(kind: str) -> list[str]:
    """Return the statements that make the table of applied migrations, as peewee's runner makes it."""
    id, time = ("INTEGER", "DATETIME") if kind == "sqlite" else ("SERIAL", "TIMESTAMP")
    return [
        f"CREATE TABLE IF NOT EXISTS {HISTORY} (id {id} NOT NULL PRIMARY KEY, name VARCHAR(255) NOT NULL, "
        f"applied {time} NOT NULL);",
        f"CREATE UNIQUE INDEX IF NOT EXISTS {HISTORY}_name ON {HISTORY} (name);",
    ]


def upgrade(db: Database, target: str | None = None) -> list[str]:
    """Apply the pending migrations, up to *target*; return their names.  Safe from many processes at once.

    Raises:
      StoreError: If the database refuses.
    """
    if target is None and not check(db):
        return []
    with _locked(db) as runner:
        return list(runner.up(target))


def downgrade(db: Database, target: str | None = None) -> list[str]:
    """Undo migrations down to and including *target*, or the last one; return their names.  Their data is lost.

    Raises:
      StoreError: If the database refuses.
    """
    with _locked(db) as runner:
        return list(runner.down(target))


@contextlib.contextmanager
def _locked(db: Database) -> Iterator[Any]:
    """Give out peewee's runner, on a connection of its own, while no other process migrates."""
    from playhouse.migrations import MigrationError, Runner

    peewee = db.opener()
    try:
        with _exclusive(peewee) if db.dialect.name == "sqlite" else _advisory(peewee):
            yield Runner(peewee, str(_DIRECTORY), table_name=HISTORY)
    except StoreError:
        raise
    except MigrationError as e:
        raise StoreError(f"The tables cannot be brought there: {str(e).rstrip('.')}.") from e
    except Exception as e:
        raise translate(e, "migrate") from e
    finally:
        # Also gives back the lock: it belongs to the connection.
        with contextlib.suppress(Exception):
            peewee.close()


@contextlib.contextmanager
def _advisory(peewee: Any) -> Iterator[None]:
    peewee.connect()
    peewee.execute_sql("SELECT pg_advisory_lock(%s)", (_LOCK_KEY,))
    yield


@contextlib.contextmanager
def _exclusive(peewee: Any) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_WAIT
    while True:
        try:
            peewee.connect(reuse_if_open=True)
            # A table cannot be rebuilt while foreign keys are checked, and the pragma does nothing in a transaction.
            peewee.execute_sql("PRAGMA foreign_keys = 0")
            context = peewee.atomic("EXCLUSIVE")
            context.__enter__()
            break
        except Exception as e:
            if time.monotonic() > deadline or not is_conflict(e):
                raise
        time.sleep(0.02)
    with _entered(context):
        yield


@contextlib.contextmanager
def _entered(context: Any) -> Iterator[None]:
    try:
        yield
    except BaseException as e:
        context.__exit__(type(e), e, e.__traceback__)
        raise
    context.__exit__(None, None, None)
