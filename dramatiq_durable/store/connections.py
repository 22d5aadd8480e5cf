"""Connections: who has which, for how long, and what becomes of those that died.

peewee knows how to open them.  Lending them out is done here because its pool connects and probes while it holds the
lock of the whole process: with a server that does not answer, eight threads would wait one after the other, and every
statement would pay for a probe.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import DatabaseUnavailable

__all__ = ["Connections", "OnePerThread", "Pool"]

#: Seconds after which a connection of the pool is replaced.  PostgreSQL keeps the plan of a prepared statement as long
#: as the connection; one that was made while the tables were all but empty must not live on.
MAX_AGE = 60.0


class Connections(Protocol):
    """What a database needs of its connections.  A thread has one at a time."""

    def take(self) -> Any:
        """Return a connection for this thread."""

    def give(self, connection: Any, *, broken: bool) -> None:
        """Take back the connection of this thread; a *broken* one is closed."""

    def close_thread(self) -> None:
        """Close what this thread keeps open."""

    def close_idle(self) -> None:
        """Close what no thread is using."""

    def break_off(self, longer_than: float) -> None:
        """Break connections that have been lent for more than *longer_than* seconds, under those who wait on them."""

    def forget(self) -> None:
        """Forget everything, in the child of a fork, and close nothing: the parent uses it."""


class _Slot(threading.local):
    connection: Any = None


class OnePerThread:
    """SQLite: each thread keeps its connection open, because opening it costs more than most statements.

    Parameters:
      open(Callable): Opens one.
    """

    def __init__(self, open: Callable[[], Any]) -> None:
        self._open = open
        self._forgotten: list[Any] = []
        self._reset()

    def _reset(self) -> None:
        self._slot = _Slot()
        self._lock = threading.Lock()
        self._all: list[tuple[threading.Thread, Any]] = []

    def take(self) -> Any:
        if self._slot.connection is None:
            self.close_idle()
            connection = self._open()
            with self._lock:
                self._all.append((threading.current_thread(), connection))
            self._slot.connection = connection
        return self._slot.connection

    def give(self, connection: Any, *, broken: bool) -> None:
        if broken or not _is_clean(connection):
            self.close_thread()

    def close_thread(self) -> None:
        connection, self._slot.connection = self._slot.connection, None
        if connection is not None:
            self._close([connection])

    def close_idle(self) -> None:
        with self._lock:
            left = [connection for thread, connection in self._all if not thread.is_alive()]
        self._close(left)

    def _close(self, connections: list[Any]) -> None:
        for connection in connections:
            with contextlib.suppress(Exception):
                connection.close()
        with self._lock:
            self._all = [entry for entry in self._all if entry[1] not in connections]

    def break_off(self, longer_than: float) -> None:
        """Nothing: a file answers."""

    def forget(self) -> None:
        # NOTE: SQLite forbids even to close, in a child, what its parent has opened; so they are kept for ever.
        self._forgotten.append(self._all)
        self._reset()


class Pool:
    """PostgreSQL: a bounded number of connections, each lent for one operation.

    Parameters:
      open(Callable): Opens one.
      size(int): How many there may be.
      wait(float): How long a thread waits for one (seconds).
    """

    def __init__(self, open: Callable[[], Any], *, size: int, wait: float) -> None:
        self._open = open
        self._size = size
        self._wait = wait
        self._forgotten: list[Any] = []
        self._reset()

    def _reset(self) -> None:
        # NOTE: The lock is entered itself, never through the condition: an interrupt between acquiring it and entering
        # the block would leave it locked for ever.
        self._lock = threading.Lock()
        self._given_back = threading.Condition(self._lock)
        #: When each was opened, and the connection; the one used last is at the end and is lent first.
        self._idle: list[tuple[float, Any]] = []
        #: Who has one; ``None`` while it is being opened.
        self._lent: dict[threading.Thread, tuple[float, Any] | None] = {}
        #: Since when.
        self._since: dict[threading.Thread, float] = {}

    def take(self) -> Any:
        me = threading.current_thread()
        entry = self._find(me)
        if entry is None:
            try:
                entry = (time.monotonic(), self._open())
            except BaseException:
                with self._lock:
                    self._lent.pop(me, None)
                    self._given_back.notify()
                raise
            self._lent[me] = entry
        self._since[me] = time.monotonic()
        return entry[1]

    def _find(self, me: threading.Thread) -> tuple[float, Any] | None:
        """Reserve a place for this thread; return an idle connection to use, or ``None`` when it is to open one."""
        deadline = time.monotonic() + self._wait
        dead: list[Any] = []
        try:
            with self._lock:
                # An interrupt may have hit this thread between taking and giving.
                dead += self._reclaim([me])
                while True:
                    while self._idle:
                        entry = self._idle.pop()
                        if time.monotonic() - entry[0] < MAX_AGE and _is_usable(entry[1]):
                            self._lent[me] = entry
                            return entry
                        dead.append(entry[1])
                    if len(self._lent) >= self._size:
                        dead += self._reclaim([thread for thread in self._lent if not thread.is_alive()])
                    if len(self._lent) < self._size:
                        self._lent[me] = None
                        return None
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise DatabaseUnavailable(
                            f"All {self._size} database connections of this process have been busy for "
                            f"{self._wait:g} seconds. Give it a larger pool, or fewer threads."
                        )
                    self._given_back.wait(left)
        finally:
            _close_all(dead)

    def _reclaim(self, threads: list[threading.Thread]) -> list[Any]:
        return [entry[1] for entry in self._take_back(threads) if entry is not None]

    def _take_back(self, threads: list[threading.Thread]) -> list[tuple[float, Any] | None]:
        for thread in threads:
            self._since.pop(thread, None)
        return [self._lent.pop(thread, None) for thread in threads]

    def give(self, connection: Any, *, broken: bool) -> None:
        dead: list[Any] = []
        with self._lock:
            (entry,) = self._take_back([threading.current_thread()])
            if broken or entry is None or not _is_idle(connection):
                dead.append(connection)
                if connection.broken:
                    # The server is gone or another one now; the others would find out one by one.
                    dead += [idle for _, idle in self._idle]
                    self._idle.clear()
            else:
                self._idle.append(entry)
            self._given_back.notify()
        _close_all(dead)

    def close_thread(self) -> None:
        """Nothing: a thread keeps none."""

    def close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        _close_all([connection for _, connection in idle])

    def break_off(self, longer_than: float) -> None:
        before = time.monotonic() - longer_than
        with self._lock:
            for thread, entry in self._lent.items():
                if entry is not None and self._since.get(thread, before) < before:
                    _shut_down(entry[1])

    def forget(self) -> None:
        self._forgotten.append((self._idle, self._lent))
        self._reset()


def _close_all(connections: list[Any]) -> None:
    for connection in connections:
        with contextlib.suppress(Exception):
            connection.close()


def _shut_down(connection: Any) -> None:
    """End the transport of *connection*: whoever waits for an answer on it gets an error at once."""
    with contextlib.suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _is_clean(connection: Any) -> bool:
    """Whether SQLite's *connection* is open and outside a transaction."""
    try:
        return not connection.in_transaction
    except Exception:
        return False


def _is_idle(connection: Any) -> bool:
    """Whether PostgreSQL's *connection* is open and outside a transaction."""
    return not connection.closed and connection.pgconn.transaction_status == 0


def _is_usable(connection: Any) -> bool:
    """Whether *connection* can be lent.  Nothing arrives on an idle one but the news that the server has ended it."""
    try:
        return _is_idle(connection) and not _has_news(connection.fileno())
    except Exception:
        return False


def _has_news(descriptor: int) -> bool:
    if not hasattr(select, "poll"):
        return bool(select.select([descriptor], [], [], 0)[0])
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
