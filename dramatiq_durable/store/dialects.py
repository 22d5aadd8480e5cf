"""The differences between the databases, in one place.

Statements are written once, as templates, and rendered for every database when their module is imported; nothing is
built per call.  A template has ``?`` for parameters and these marks:

* ``{now}``: the database's own clock, in milliseconds;
* ``{rows:job text, token bigint}``: a sub-select of rows that come in as one parameter group (:meth:`Dialect.rows`);
* ``{held:job text, token bigint}``: the same as a common table expression called ``held``, whose first column names
  jobs; their rows are locked, in the order of their ids;
* ``{free:job text, token bigint}``: the same without the rows that others have locked;
* ``{if:condition}``: a condition that guards rows which are found otherwise: nothing is estimated from it;
* ``{skip}``: lock the selected rows, but pass over those that others have locked;
* ``{share}``: lock them against change only;
* ``{jobs}``, ``{attempts}``, …: table names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

__all__ = ["DIALECTS", "Dialect", "PostgreSQL", "SQLite", "Statement", "storable"]

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
        if name in ("rows", "held", "free"):
            columns = [tuple(column.split()) for column in (argument or "").split(",")]
            return self._rows(columns) if name == "rows" else self._held(columns, skip=name == "free")
        if name == "if":
            return f"CASE WHEN {argument} THEN TRUE ELSE FALSE END"
        if name in ("skip", "share"):
            return self._lock(name)
        if name in ("now", "blob", "expired"):
            return str(getattr(self, name))
        raise ValueError(f"unknown mark {name!r} in a statement")

    def _rows(self, columns: list[tuple[str, ...]]) -> str:
        raise NotImplementedError

    def _held(self, columns: list[tuple[str, ...]], *, skip: bool) -> str:
        raise NotImplementedError

    def _lock(self, kind: str) -> str:
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

    def _held(self, columns: list[tuple[str, ...]], *, skip: bool) -> str:
        return f"held AS ({self._rows(columns)})"

    def _lock(self, kind: str) -> str:
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
        return f"SELECT * FROM {self._unnest(columns)}"

    def _held(self, columns: list[tuple[str, ...]], *, skip: bool) -> str:
        key = columns[0][0]
        return (
            f"held AS (SELECT given.* FROM {self._unnest(columns)} JOIN {PREFIX}jobs j ON j.id = given.{key}"
            f" ORDER BY j.id FOR UPDATE OF j{' SKIP LOCKED' if skip else ''})"
        )

    def _unnest(self, columns: list[tuple[str, ...]]) -> str:
        arrays = ", ".join(f"?::{column[1]}[]" for column in columns)
        names = ", ".join(column[0] for column in columns)
        return f"unnest({arrays}) AS given({names})"

    def _lock(self, kind: str) -> str:
        return {"skip": "FOR UPDATE SKIP LOCKED", "share": "FOR SHARE"}[kind]

    def rows(self, rows: Sequence[Sequence[Any]], width: int) -> tuple[Any, ...]:
        return tuple([row[i] for row in rows] for i in range(width))


DIALECTS: dict[str, Dialect] = {"sqlite": SQLite(), "postgresql": PostgreSQL()}


class Statement:
    """A named statement, rendered for every database.

    NOTE: Statistics lag behind, and PostgreSQL believes them.  A statement that names jobs by id has the rest of its
    guard in ``{if:…}``: otherwise, with statistics of when all jobs were finished, it would walk through all that are
    open now, or compare each of them with each id.  One that looks for jobs by state repeats the predicate of the
    index (``finished_at IS NULL``), and so uses it.  A time to compare an indexed column with stands in a sub-select,
    ``(SELECT {now})``: a clock that moves while the statement runs cannot be looked up in an index.

    Parameters:
      name(str): What it does, for error messages.
      template(str): See the module's description.
    """

    __slots__ = ("name", "texts", "writes")

    def __init__(self, name: str, template: str) -> None:
        self.name = name
        self.writes = not template.lstrip().upper().startswith("SELECT")
        self.texts = {kind: dialect.render(template) for kind, dialect in DIALECTS.items()}


def storable(text: str) -> str:
    """Return *text* without what databases refuse in a text: NUL, and halves of surrogate pairs."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "backslashreplace").decode()
