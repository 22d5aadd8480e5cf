"""A database as the verbs see it: statements, transactions, and errors in words.

peewee opens the connections; statements go straight to the driver.  Building a query with a query builder costs more
than running it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ..errors import DatabaseUnavailable, StoreError
from .connections import Connections
from .dialects import Dialect, Statement
from .failures import is_conflict, is_lost, translate

__all__ = ["Database", "connect"]

T = TypeVar("T")

#: How often a statement that was undone because of others is tried on a server, and the first and the longest pause
#: between (seconds).  SQLite's file is waited for instead, as long as its ``busy_timeout`` says.
ATTEMPTS, PAUSE, MAX_PAUSE = 6, 0.02, 0.5

#: In a process that is stopping: how long SQLite's file is waited for, and for how long after a failure nothing is
#: tried again (seconds).
HURRIED_PATIENCE, HURRIED_PAUSE = 0.5, 1.0

#: How long a fork waits for the transaction of another thread (seconds).
FORK_WAIT = 10.0


def connect(url: str, *, pool_size: int = 20, busy_timeout: int = 5_000) -> Database:
    """Describe the database at *url*.  Nothing is opened yet.

    Parameters:
      url(str): ``sqlite:///path`` or ``postgresql://user:password@host:port/name?option=value``.
      pool_size(int): How many connections this process may have open at a time (PostgreSQL).
      busy_timeout(int): How long a statement waits for another process's lock (SQLite, milliseconds).

    Raises:
      InvalidDatabaseURL: If the URL cannot be understood.
      DriverMissing: If the driver is not installed, or too old.
    """
    from . import urls

    return urls.connect(url, pool_size=pool_size, busy_timeout=busy_timeout)


#: A process that is frozen inside a transaction holds the rows that it has locked.  The server ends such a
#: transaction, and lets nobody inside one wait for a lock for ever.  SET LOCAL: nothing is left behind on a pooled
#: connection.
_BEGIN = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '15s'; SET LOCAL lock_timeout = '5s'"


class _Local(threading.local):
    connection: Any = None
    in_transaction: bool = False


class Database:
    """One database; safe to use from many threads.

    Parameters:
      dialect(Dialect): How this kind of database says things.
      safe_url(str): The URL without its password, for people.
      connections(Connections): Lends a connection to each thread.
      opener(Callable): Returns a peewee database of its own, for what needs one: migrations.
      patience(float): How long a statement waits for another process's lock (SQLite, seconds).

    Attributes:
      away(bool): Whether the last that was heard of it is that it does not answer.
    """

    def __init__(
        self,
        dialect: Dialect,
        safe_url: str,
        connections: Connections,
        opener: Callable[[], Any],
        *,
        patience: float = 5.0,
    ) -> None:
        self.dialect = dialect
        self.safe_url = safe_url
        self.opener = opener
        self._connections = connections
        self._embedded = dialect.name == "sqlite"
        self._patience = patience
        self.away = False
        self._hurried = False
        self._failed_at = float("-inf")
        self._local = _Local()
        # One writer at a time inside the process: SQLite's own waiting is unfair and slower.
        self._writing = threading.RLock()
        _databases.add(self)

    # Statements

    def fetch(self, statement: Statement, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run *statement* and return its rows; outside a transaction it is one of its own.

        It is repeated when it was undone because of others.  When the connection is lost, nobody knows whether it was
        done, and it is not repeated.

        Raises:
          StoreError: Whatever went wrong, in words.
        """
        text = statement.texts[self.dialect.name]
        return self._guarded(statement, lambda connection: _rows(connection.execute(text, params)))

    def execute(self, statement: Statement, params: Sequence[Any] = ()) -> int:
        """Run *statement* and return how many rows it changed; see :meth:`fetch`."""
        text = statement.texts[self.dialect.name]
        return self._guarded(statement, lambda connection: int(connection.execute(text, params).rowcount))

    def execute_many(self, statement: Statement, rows: Sequence[Sequence[Any]]) -> None:
        """Run *statement* for each of *rows*, inside the current transaction or in one of its own."""
        text = statement.texts[self.dialect.name]
        self._many(statement, lambda connection: connection.cursor().executemany(text, rows))

    def fetch_many(self, statement: Statement, rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Like :meth:`execute_many`; return all their rows together."""
        text = statement.texts[self.dialect.name]
        each = _each_of_sqlite if self._embedded else _each_of_postgresql
        return self._many(statement, lambda connection: each(connection, text, rows))

    def _many(self, statement: Statement, run: Callable[[Any], T]) -> T:
        if self._local.in_transaction:
            return self._guarded(statement, run)
        return self.run(lambda: self._guarded(statement, run))

    def _guarded(self, statement: Statement, run: Callable[[Any], T]) -> T:
        """Run something on a connection, in words if it fails; repeat it when others were in the way."""
        began = time.monotonic()
        for attempt in itertools.count(1):
            try:
                with self._turn(statement), self._connection() as connection:
                    result = run(connection)
                self.away = False
                return result
            except StoreError:
                raise
            except Exception as e:
                # Inside a transaction everything before it is undone too: the whole of it must be repeated, by run().
                if self._local.in_transaction or not is_conflict(e) or self._has_waited(began, attempt):
                    raise self._failure(e, statement.name) from e
            self._pause(attempt)
        raise AssertionError("unreachable")

    def _has_waited(self, began: float, attempt: int) -> bool:
        """Return whether others have been in the way for long enough."""
        if not self._embedded:
            return attempt >= ATTEMPTS
        return time.monotonic() - began >= (HURRIED_PATIENCE if self._hurried else self._patience)

    def _pause(self, attempt: int) -> None:
        # SQLite has waited by itself already.
        longest = PAUSE if self._embedded else MAX_PAUSE
        time.sleep(min(longest, PAUSE * 2 ** min(attempt - 1, 10)) * random.uniform(0.5, 1.5))  # noqa: S311

    def _failure(self, error: Exception, action: str) -> StoreError:
        failure = translate(error, action)
        if isinstance(failure, DatabaseUnavailable):
            self._failed_at = time.monotonic()
            self.away = True
        return failure

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
            try:
                self._begin(connection)
                self._local.in_transaction = True
                yield
                self._commit(connection)
            except BaseException:
                _roll_back(connection)
                raise
            finally:
                self._local.in_transaction = False

    def run(self, work: Callable[[], T]) -> T:
        """Run *work* in a transaction, and again when it was undone because of others.

        *work* must be safe to repeat: it only runs statements.
        """
        began = time.monotonic()
        for attempt in itertools.count(1):
            try:
                with self.transaction():
                    return work()
            except StoreError as e:
                if e.__cause__ is None or not is_conflict(e.__cause__) or self._has_waited(began, attempt):
                    raise
            self._pause(attempt)
        raise AssertionError("unreachable")

    def _begin(self, connection: Any) -> None:
        try:
            if self._embedded:
                # A deferred transaction that begins with a read fails at once when it wants to write later.
                connection.execute("BEGIN IMMEDIATE")
            else:
                connection.execute(_BEGIN, prepare=False)
        except Exception as e:
            raise self._failure(e, "begin a transaction") from e

    def _commit(self, connection: Any) -> None:
        try:
            cursor = connection.execute("COMMIT")
        except Exception as e:
            raise self._failure(e, "commit") from e
        # NOTE: PostgreSQL answers the COMMIT of a transaction that has failed with a rollback, not with an error.
        if not self._embedded and cursor.statusmessage != "COMMIT":
            raise StoreError("The transaction was rolled back: a statement in it had failed.")

    # Connections

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Any]:
        held = self._local.connection
        if held is not None:
            yield held
            return
        if self._hurried and time.monotonic() - self._failed_at < HURRIED_PAUSE:
            raise DatabaseUnavailable("The database was away a moment ago, and this process is stopping.")
        try:
            connection = self._connections.take()
        except StoreError:
            raise
        except Exception as e:
            raise self._failure(e, "connect") from e
        broken = True
        try:
            self._local.connection = connection
            yield connection
            broken = False
        except Exception as e:
            # Anything but an ordinary error is an interrupt, which may have left anything half-done.
            broken = is_lost(e)
            raise
        finally:
            self._local.connection = None
            self._connections.give(connection, broken=broken)

    def hurry(self, hurried: bool = True) -> None:
        """Let nothing wait for long from here on: the process is stopping, and must not hang on a database that is
        away.
        """
        self._hurried = hurried

    def break_off(self, longer_than: float) -> None:
        """Break off statements that have been waiting for an answer for more than *longer_than* seconds."""
        self._connections.break_off(longer_than)

    def close_thread(self) -> None:
        """Close the connection that this thread keeps open, if it does."""
        if self._local.connection is None:
            self._connections.close_thread()

    def close_all(self) -> None:
        """Close this thread's connection and those that nobody is using."""
        self.close_thread()
        self._connections.close_idle()

    def pause(self) -> bool:
        """Let nobody begin to write before :meth:`go_on`; called right before a fork.

        NOTE: SQLite keeps its locks in memory too.  A child that inherits those of a transaction could never write.
        """
        return self._embedded and self._writing.acquire(timeout=FORK_WAIT)

    def go_on(self) -> None:
        """The fork is over."""
        self._writing.release()

    def reset_after_fork(self) -> None:
        """Forget, in the child of a fork, the connections of the parent.  They are not closed: the parent uses them."""
        self._local = _Local()
        self._writing = threading.RLock()
        self._connections.forget()


def _rows(cursor: Any) -> list[tuple[Any, ...]]:
    return cursor.fetchall() if cursor.description is not None else []


def _each_of_sqlite(connection: Any, text: str, rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    return [found for row in rows for found in connection.execute(text, row).fetchall()]


def _each_of_postgresql(connection: Any, text: str, rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    cursor = connection.cursor()
    cursor.executemany(text, rows, returning=True)
    found: list[tuple[Any, ...]] = cursor.fetchall()
    while cursor.nextset():
        found += cursor.fetchall()
    return found


def _roll_back(connection: Any) -> None:
    try:
        # SQLite has rolled back by itself after some errors, and complains about being asked to do it again.
        if getattr(connection, "in_transaction", True):
            connection.execute("ROLLBACK")
    except Exception:
        # Nothing half-open may survive.
        with contextlib.suppress(Exception):
            connection.close()


_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_paused: list[Database] = []


def _before_fork() -> None:
    _paused.extend(database for database in list(_databases) if database.pause())


def _after_fork_in_parent() -> None:
    while _paused:
        _paused.pop().go_on()


def _after_fork_in_child() -> None:
    _paused.clear()
    for database in list(_databases):
        database.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
