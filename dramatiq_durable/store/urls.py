"""From a URL to a database: what is understood, what is filled in, and how connections are opened."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .. import greenlets
from ..errors import DatabaseUnavailable, DriverMissing, InvalidDatabaseURL, NotPermitted
from ..redact import safe_url
from .connections import OnePerThread, Pool
from .database import Database
from .dialects import DIALECTS
from .failures import is_conflict

__all__ = ["connect"]

#: The oldest SQLite that has all that the statements use.
SQLITE_VERSION = (3, 38, 0)

#: Unless the URL says otherwise: how long to wait for a connection (seconds), and for a peer that has gone silent
#: (milliseconds).  A worker must notice within a few seconds, it has to stop within five.
CONNECT_TIMEOUT, USER_TIMEOUT = 2, 5_000

#: How long SQLite itself waits for the lock of its file (seconds).  The ``busy_timeout`` is waited for in turns of this
#: length, so that a process that is stopping need not wait to the end.  Among greenlets it does not wait itself: all of
#: them would wait with it.
LOCK_TURN = 0.25

#: How long a thread waits for a connection of the pool (seconds).
POOL_WAIT = 5.0


def connect(url: str, *, pool_size: int, busy_timeout: int) -> Database:
    """See :func:`dramatiq_durable.store.database.connect`."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidDatabaseURL("The database URL cannot be understood. Is its password percent-encoded?") from None
    if parts.scheme == "sqlite":
        return _sqlite(url, parts.path, parts.netloc, busy_timeout)
    if parts.scheme in ("postgresql", "postgres"):
        return _postgresql(url, pool_size)
    scheme = repr(parts.scheme + "://") if parts.scheme else "no scheme"
    raise InvalidDatabaseURL(
        f"The database URL begins with {scheme}. Use sqlite:///path or postgresql://user:password@host/name."
    )


def _sqlite(url: str, path: str, netloc: str, busy_timeout: int) -> Database:
    from peewee import SqliteDatabase

    name = unquote(path[1:])
    if netloc or not name:
        raise InvalidDatabaseURL(
            "A SQLite URL has three slashes and a path: sqlite:///relative/path.db, or four for an absolute one."
        )
    if name == ":memory:":
        raise InvalidDatabaseURL("A database in memory is not a record: give SQLite a file.")
    if sqlite3.sqlite_version_info < SQLITE_VERSION:
        raise DriverMissing(
            f"SQLite {sqlite3.sqlite_version} is too old: {'.'.join(map(str, SQLITE_VERSION))} or newer is needed. It "
            "comes with Python: use a newer one, or PostgreSQL."
        )
    # The process may change its directory before the first connection is opened, or between two.
    name = os.path.abspath(name)
    # FULL: with NORMAL the last commits may be gone after a power cut.
    pragmas = {"journal_mode": "wal", "synchronous": "full", "foreign_keys": 1}

    def opener(timeout: float = busy_timeout / 1000) -> Any:
        return SqliteDatabase(name, pragmas=pragmas, timeout=timeout, check_same_thread=False)

    database = opener(0.0 if greenlets.active() else min(LOCK_TURN, busy_timeout / 1000))

    def open_file() -> Any:
        _check_directory(name)
        deadline = time.monotonic() + busy_timeout / 1000
        while True:
            try:
                return database._connect()
            except sqlite3.OperationalError as e:
                # NOTE: Nobody waits for others while a new file is switched to WAL; it fails at once.
                if not is_conflict(e) or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)

    return Database(DIALECTS["sqlite"], safe_url(url), OnePerThread(open_file), opener, patience=busy_timeout / 1000)


def _check_directory(name: str) -> None:
    """Say what is wrong with the place of a file; SQLite itself only says that it is unable to open it."""
    directory = Path(name).parent
    if Path(name).is_dir():
        raise InvalidDatabaseURL(f"{name} is a directory: give SQLite the path of a file.")
    if not directory.is_dir():
        raise DatabaseUnavailable(f"The directory {str(directory)!r} of the database does not exist. Create it.")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise NotPermitted(f"The directory {str(directory)!r} of the database may not be written to by this user.")


def _postgresql(url: str, pool_size: int) -> Database:
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ImportError:
        raise DriverMissing(
            'PostgreSQL needs its driver: pip install "dramatiq-durable[postgres]" (psycopg 3).'
        ) from None
    from peewee import PostgresqlDatabase

    try:
        given = conninfo_to_dict(re.sub("^postgres:", "postgresql:", url))
    except psycopg.ProgrammingError as e:
        # What the driver quotes may be a part of the password.
        detail = re.sub(r'"[^"]*"?', '"***"', " ".join(str(e).split())).rstrip(".")
        raise InvalidDatabaseURL(f"The database URL cannot be understood: {detail}.") from None
    defaults: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT,
        "tcp_user_timeout": USER_TIMEOUT,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 2,
        "application_name": "dramatiq-durable",
    }
    options = {**defaults, **given}
    name = options.pop("dbname", None)
    if not name:
        raise InvalidDatabaseURL("The database URL names no database: postgresql://user:password@host/name.")

    def opener() -> Any:
        return PostgresqlDatabase(name, prefer_psycopg3=True, **options)

    database = opener()
    pool = Pool(database._connect, size=pool_size, wait=POOL_WAIT)
    return Database(DIALECTS["postgresql"], safe_url(url), pool, opener)
