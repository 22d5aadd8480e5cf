"""A record that is away: refused, or silent."""

from __future__ import annotations

import sqlite3
from urllib.parse import urlsplit

from tests.harness.proxy import Proxy

__all__ = ["DatabaseLink"]


class DatabaseLink:
    """Stands between the application and its database.

    PostgreSQL is reached through a proxy.  SQLite is a file: there "away" is another process that keeps it locked, the
    only outage that a file has and from which it comes back.

    Parameters:
      url(str): The database itself.

    Attributes:
      url(str): What the application is given.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._proxy: Proxy | None = None
        self._path = ""
        self._lock: sqlite3.Connection | None = None
        if parts.scheme == "sqlite":
            self._path, self.url = parts.path, url
        else:
            assert parts.port is not None
            self._proxy = Proxy(parts.port)
            self.url = url.replace(f":{parts.port}/", f":{self._proxy.port}/")

    def cut(self) -> None:
        """Refuse everything from now on."""
        if self._proxy is not None:
            self._proxy.cut()
        else:
            self._hold()

    def silence(self) -> None:
        """Answer nothing from now on, and say nothing about it."""
        if self._proxy is not None:
            self._proxy.swallow()
        else:
            self._hold()

    def restore(self) -> None:
        if self._proxy is not None:
            self._proxy.restore()
        elif self._lock is not None:
            self._lock.execute("ROLLBACK")
            self._lock.close()
            self._lock = None

    def close(self) -> None:
        self.restore()
        if self._proxy is not None:
            self._proxy.close()

    def _hold(self) -> None:
        if self._lock is None:
            self._lock = sqlite3.connect(self._path, timeout=30, isolation_level=None, check_same_thread=False)
            self._lock.execute("BEGIN EXCLUSIVE")
