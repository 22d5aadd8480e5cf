"""A database as the verbs see it: statements, transactions, and errors in words.

peewee opens, pools and closes the connections; statements go straight to the driver.  Building a query with a query
builder costs more than running it.
"""

from __future__ import annotations

import contextlib
import random
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from ..errors import DriverMissing, InvalidDatabaseURL, StoreError
from ..redact import safe_url
from .dialects import DIALECTS, Dialect, Statement
from .failures import is_conflict, translate

__all__ = ["Database", "connect"]

T = TypeVar("T")

#: How often a statement that was undone because of others is tried, and the first pause between (seconds).
ATTEMPTS, PAUSE = 6, 0.02

#: Unless the URL says otherwise: how long to wait for a connection (seconds), and for a peer that has gone silent
#: (milliseconds).  A worker must notice within a few seconds, it has to stop within five.
CONNECT_TIMEOUT, USER_TIMEOUT = 3, 5_000


def connect(url: str, *, pool_size: int = 10, busy_timeout: int = 5_000) -> Database:
    """Describe the database at *url*.  Nothing is opened yet.

    Parameters:
      url(str): ``sqlite:///path`` or ``postgresql://user:password@host:port/name?option=value``.
      pool_size(int): How many connections this process may have open at a time (PostgreSQL).
      busy_timeout(int): How long a statement waits for another process's lock (SQLite, milliseconds).

    Raises:
      InvalidDatabaseURL: If the URL cannot be understood.
      DriverMissing: If the driver is not installed.
    """
    try:
        parts = urlsplit(url)
    except ValueError as e:
        raise InvalidDatabaseURL(f"The database URL cannot be understood: {e}.") from None
    if parts.scheme == "sqlite":
        return Database(_sqlite(parts.path, parts.netloc, busy_timeout), DIALECTS["sqlite"], safe_url(url))
    if parts.scheme in ("postgresql", "postgres"):
        return Database(_postgresql(url, pool_size), DIALECTS["postgresql"], safe_url(url))
    raise InvalidDatabaseURL(
        f"The database URL begins with {repr(parts.scheme + '://') if parts.scheme else 'no scheme'}. Use "
        f"sqlite:///path or "
        "postgresql://user:password@host/name."
    )


def _sqlite(path: str, netloc: str, busy_timeout: int) -> Any:
    from peewee import SqliteDatabase

    name = unquote(path[1:])
    if netloc or not name:
        raise InvalidDatabaseURL(
            "A SQLite URL has three slashes and a path: sqlite:///relative/path.db, or four for an absolute one."
        )
    if name == ":memory:":
        raise InvalidDatabaseURL("A database in memory is not a record: give SQLite a file.")
    pragmas = {"journal_mode": "wal", "synchronous": "full", "foreign_keys": 1}
    return SqliteDatabase(name, pragmas=pragmas, timeout=busy_timeout / 1000, check_same_thread=False)


def _postgresql(url: str, pool_size: int) -> Any:
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ImportError:
        raise DriverMissing(
            'PostgreSQL needs its driver: pip install "dramatiq-durable[postgres]" (psycopg 3).'
        ) from None
    from playhouse.pool import PooledPostgresqlDatabase

    class Pool(PooledPostgresqlDatabase):  # type: ignore[misc]
        def _is_closed(self, conn: Any) -> bool:
            # peewee asks the server before it hands out a connection: a round trip for every statement.  A connection
            # that died while it was idle has something to read, its end; only then the server is asked.
            if conn.closed or _readable(conn.fileno()):
                return bool(super()._is_closed(conn))
            return False

    try:
        options = conninfo_to_dict(url.replace("postgres://", "postgresql://", 1))
    except psycopg.ProgrammingError as e:
        raise InvalidDatabaseURL(f"The database URL cannot be understood: {safe_url(str(e))}") from None
    defaults: dict[str, str | int | None] = {
        "connect_timeout": CONNECT_TIMEOUT,
        "tcp_user_timeout": USER_TIMEOUT,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 2,
        "application_name": "dramatiq-durable",
    }
    options = {**defaults, **options}
    name = options.pop("dbname", None)
    return Pool(name, max_connections=pool_size, timeout=5, stale_timeout=300, prefer_psycopg3=True, **options)


def _readable(fileno: int) -> bool:
    poll = select.poll()
    poll.register(fileno, select.POLLIN)
    return bool(poll.poll(0))


class _Local(threading.local):
    connection: Any = None
    in_transaction: bool = False


class Database:
    """One database; safe to use from many threads.

    Parameters:
      peewee(peewee.Database): Opens and keeps the connections.
      dialect(Dialect): How this kind of database says things.
      safe_url(str): The URL without its password, for people.
    """

    def __init__(self, peewee: Any, dialect: Dialect, safe_url: str) -> None:
        self.dialect = dialect
        self.safe_url = safe_url
        self.peewee = peewee
        self._local = _Local()
        self._embedded = dialect.name == "sqlite"
        # One writer at a time inside the process: SQLite's own waiting is unfair and slower.
        self._writing = threading.RLock()

    # Statements

    def fetch(self, statement: Statement, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run *statement* and return its rows; outside a transaction it is one of its own.

        Raises:
          StoreError: Whatever went wrong, in words.
        """
        return self._guarded(statement, lambda c: self._all(c.execute(statement.texts[self.dialect.name], params)))

    def execute(self, statement: Statement, params: Sequence[Any] = ()) -> int:
        """Run *statement* and return how many rows it changed; see :meth:`fetch`."""
        return self._guarded(statement, lambda c: int(c.execute(statement.texts[self.dialect.name], params).rowcount))

    def execute_many(self, statement: Statement, rows: Sequence[Sequence[Any]]) -> None:
        """Run *statement* for each of *rows*, inside the current transaction or in one of its own."""
        text = statement.texts[self.dialect.name]

        def run(connection: Any) -> None:
            connection.cursor().executemany(text, rows)

        if self._local.in_transaction:
            self._guarded(statement, run)
        else:
            self.run(lambda: self._guarded(statement, run))

    @staticmethod
    def _all(cursor: Any) -> list[tuple[Any, ...]]:
        return cursor.fetchall() if cursor.description is not None else []

    def _guarded(self, statement: Statement, run: Callable[[Any], T]) -> T:
        """Run something on a connection, in words if it fails; repeat it when others were in the way."""
        pause = PAUSE
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self._turn(statement), self._connection() as connection:
                    return run(connection)
            except StoreError:
                raise
            except Exception as e:
                # Inside a transaction everything before it is undone too: the whole of it must be repeated, by run().
                if self._local.in_transaction or attempt == ATTEMPTS or not is_conflict(e):
                    raise translate(e, statement.name) from e
            time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311
            pause *= 2
        raise AssertionError("unreachable")

    def _turn(self, statement: Statement) -> contextlib.AbstractContextManager[Any]:
        return self._writing if self._embedded and statement.writes else contextlib.nullcontext()

    # Transactions

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside is committed together, or not at all.

        Raises:
          StoreError: Whatever went wrong, in words.
        """
        if self._local.in_transaction:
            raise RuntimeError("transactions of the record do not nest")
        with self._writing if self._embedded else contextlib.nullcontext(), self._connection() as connection:
            self._begin(connection)
            self._local.in_transaction = True
            try:
                yield
                self._local.in_transaction = False
                try:
                    connection.execute("COMMIT")
                except Exception as e:
                    raise translate(e, "commit") from e
            except BaseException:
                self._local.in_transaction = False
                self._roll_back(connection)
                raise

    def run(self, work: Callable[[], T]) -> T:
        """Run *work* in a transaction, and again when it was undone because of others.

        *work* must be safe to repeat: it only runs statements.
        """
        pause = PAUSE
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self.transaction():
                    return work()
            except StoreError as e:
                if attempt == ATTEMPTS or not is_conflict(e.__cause__ or e):
                    raise
            time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311
            pause *= 2
        raise AssertionError("unreachable")

    def _begin(self, connection: Any) -> None:
        try:
            # IMMEDIATE: a deferred transaction that begins with a read fails at once when it wants to write later.
            connection.execute("BEGIN IMMEDIATE" if self._embedded else "BEGIN")
        except Exception as e:
            raise translate(e, "begin a transaction") from e

    def _roll_back(self, connection: Any) -> None:
        try:
            connection.execute("ROLLBACK")
        except Exception:
            # Nothing half-open may survive on this thread.
            self._discard(connection)

    # Connections

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Any]:
        held = self._local.connection
        if held is not None:
            yield held
            return
        try:
            self.peewee.connect(reuse_if_open=True)
            connection = self.peewee.connection()
        except Exception as e:
            raise translate(e, "connect") from e
        self._local.connection = connection
        try:
            yield connection
        except BaseException as e:
            if self._is_broken(connection, e):
                self._discard(connection)
            raise
        finally:
            self._local.connection = None
            if not self._embedded and not self.peewee.is_closed():
                self.peewee.close()

    def _is_broken(self, connection: Any, error: BaseException) -> bool:
        """Return whether *connection* must not be used again: an interrupt may have left anything half-done."""
        if not isinstance(error, Exception):
            return True
        if self._embedded:
            return False
        return bool(connection.closed or connection.broken)

    def _discard(self, connection: Any) -> None:
        with contextlib.suppress(Exception):
            connection.close()
        with contextlib.suppress(Exception):
            if self._embedded:
                self.peewee.close()
            else:
                self.peewee.manual_close()

    def close_thread(self) -> None:
        """Close the connection that this thread keeps open, if it does."""
        if self._embedded and self._local.connection is None and not self.peewee.is_closed():
            with contextlib.suppress(Exception):
                self.peewee.close()

    def close_all(self) -> None:
        """Close this thread's connection and those that nobody is using."""
        self.close_thread()
        if not self._embedded:
            with contextlib.suppress(Exception):
                self.peewee.close_idle()

    def reset_after_fork(self) -> None:
        """Forget, in the child of a fork, the connections of the parent.  They are not closed: the parent uses them."""
        self._local = _Local()
        self._writing = threading.RLock()
        fresh = self.peewee._state
        fresh.reset()
        if not self._embedded:
            self.peewee._abandoned = (list(self.peewee._connections), dict(self.peewee._in_use))
            self.peewee._connections, self.peewee._in_use = [], {}
            self.peewee._pool_lock = threading.RLock()
            self.peewee._pool_available = threading.Condition(self.peewee._pool_lock)
