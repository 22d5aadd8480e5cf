"""The differences between the databases, in one place.

Statements are written once, as templates, and rendered for every database when their module is imported; nothing is
built per call.  A template has ``?`` for parameters and these marks:

* ``{now}``: the database's own clock, in milliseconds;
* ``{rows:id text, claim bigint}``: a sub-select of rows that come in as one parameter group (see :meth:`Dialect.rows`);
* ``{lock}``, ``{lock:alias}``, ``{skip}``: lock the selected rows; skip those that others have locked;
* ``{share}``: lock them against change only;
* ``{state}``: the state, as a guard of rows that are found by their ids.  The planner cannot use an index for it: with
old
  statistics it would otherwise look through all jobs of that state instead of the few that are named;
* ``{jobs}``, ``{attempts}``, …: table names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

__all__ = ["DIALECTS", "Dialect", "PostgreSQL", "SQLite", "Statement"]

#: Every table of the record carries this prefix, so that it can live beside an application's own tables.
PREFIX = "durable_"

_TABLES = ("jobs", "attempts", "results", "undecodable", "leaders", "workers", "passes")
_MARK = re.compile(r"\{(\w+)(?::([^}]*))?\}")


class Dialect:
    """How one kind of database says what the statements need."""

    name: str
    now: str
    blob: str
    #: What the reaper may add to its guard: a lease has run out by the database's clock.
    expired: str

    def render(self, template: str) -> str:
        """Return the text of a template."""
        return _MARK.sub(lambda match: self._mark(match[1], match[2]), template)

    def _mark(self, name: str, argument: str | None) -> str:
        if name in _TABLES:
            return PREFIX + name
        if name == "rows":
            return self._rows([tuple(column.split()) for column in (argument or "").split(",")])
        if name == "state":
            return f"COALESCE({PREFIX}jobs.state, '')"
        if name in ("lock", "skip", "share"):
            return self._lock(name, argument)
        if name in ("now", "blob", "expired"):
            return str(getattr(self, name))
        raise ValueError(f"unknown mark {name!r} in a statement")

    def _rows(self, columns: list[tuple[str, ...]]) -> str:
        raise NotImplementedError

    def _lock(self, kind: str, alias: str | None) -> str:
        raise NotImplementedError

    def rows(self, rows: Sequence[Sequence[Any]], width: int) -> tuple[Any, ...]:
        """Return the parameters of a ``{rows:…}`` mark with *width* columns."""
        raise NotImplementedError


class SQLite(Dialect):
    """SQLite 3.38 or newer (``UPDATE … FROM``, ``RETURNING``, JSON)."""

    name = "sqlite"
    now = "CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER)"
    blob = "BLOB"
    # There is no server and so no clock of its own: the reaper's memory of the renewal counter decides instead.
    expired = "1 = 1"

    def _rows(self, columns: list[tuple[str, ...]]) -> str:
        picked = ", ".join(f"json_extract(value, '$[{i}]') AS {column[0]}" for i, column in enumerate(columns))
        return f"SELECT {picked} FROM json_each(?)"

    def _lock(self, kind: str, alias: str | None) -> str:
        # A write transaction has the whole database.
        return ""

    def rows(self, rows: Sequence[Sequence[Any]], width: int) -> tuple[Any, ...]:
        return (json.dumps(rows),)


class PostgreSQL(Dialect):
    """PostgreSQL 13 or newer."""

    name = "postgresql"
    # Not now(), which stands still inside a transaction.
    now = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
    blob = "BYTEA"
    expired = "lease_until < (extract(epoch FROM clock_timestamp()) * 1000)::bigint"

    def render(self, template: str) -> str:
        return super().render(template).replace("%", "%%").replace("?", "%s")

    def _rows(self, columns: list[tuple[str, ...]]) -> str:
        arrays = ", ".join(f"?::{column[1]}[]" for column in columns)
        names = ", ".join(column[0] for column in columns)
        return f"SELECT * FROM unnest({arrays}) AS given_rows({names})"

    def _lock(self, kind: str, alias: str | None) -> str:
        of = f" OF {alias}" if alias else ""
        return {"lock": f"FOR UPDATE{of}", "skip": f"FOR UPDATE{of} SKIP LOCKED", "share": f"FOR SHARE{of}"}[kind]

    def rows(self, rows: Sequence[Sequence[Any]], width: int) -> tuple[Any, ...]:
        return tuple([row[i] for row in rows] for i in range(width))


DIALECTS: dict[str, Dialect] = {"sqlite": SQLite(), "postgresql": PostgreSQL()}


class Statement:
    """A named statement, rendered for every database.

    Parameters:
      name(str): What it does, for error messages.
      template(str): See the module's description.
    """

    __slots__ = ("name", "texts", "writes")

    def __init__(self, name: str, template: str) -> None:
        self.name = name
        self.writes = not template.lstrip().upper().startswith("SELECT")
        self.texts = {kind: dialect.render(template) for kind, dialect in DIALECTS.items()}
