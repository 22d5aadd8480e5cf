"""Driver errors, translated once: what happened and what to do, in a sentence.

Never with a password, and never with the values of a row: PostgreSQL's details quote them.
"""

from __future__ import annotations

import re

from ..errors import (
    DatabaseFull,
    DatabaseUnavailable,
    InvalidDatabaseURL,
    NotPermitted,
    SchemaOutdated,
    StoreError,
)
from ..redact import redact_text

__all__ = ["is_conflict", "is_lost", "translate"]

_MIGRATE = "Run `dramatiq-durable migrate` with the same database URL."

# SQLSTATEs, exact or by class (PostgreSQL manual, appendix A), and SQLite's primary result codes.
_CONFLICTS = {"40001", "40P01", "55P03", 5, 6}
_MISSING = {"42P01", "42703", "3F000"}
_FORBIDDEN = {"42501", "28000", "28P01", 3, 23}
_READ_ONLY = {"25006", 8}
_FULL = {"53100", 13}
# 25P03: the server ended a transaction that did nothing for too long; with it went the connection.
_AWAY_CLASSES = ("08", "53", "57", "58", "25P03")
_AWAY = {10, 14, 15, 17}
_NO_DATABASE = {11, 26}

#: Extended codes of SQLite for "the disk did not take it": writing, syncing, and growing the shared memory.
_DISK = {778, 1034, 1290, 4874}

# What PostgreSQL says when it refuses a connection: those errors carry no SQLSTATE.
_REFUSED = re.compile(
    r"password authentication failed|no password supplied|no pg_hba\.conf entry|role \".*\" (?:does not exist|is not)"
    r"|permission denied|authentication failed"
)
_NO_SUCH_DATABASE = re.compile(r"database \".*\" does not exist")


def is_conflict(error: BaseException) -> bool:
    """Return whether the statement was undone because of others and may simply be tried again."""
    return _code(_driver_error(error)) in _CONFLICTS


def is_lost(error: BaseException) -> bool:
    """Return whether another connection may fare better: this one is broken, or leads to a server that only reads."""
    driver_error = _driver_error(error)
    code = _code(driver_error)
    if isinstance(code, int):
        return code in _AWAY | _READ_ONLY | _NO_DATABASE
    return code in _READ_ONLY or (code or "").startswith(_AWAY_CLASSES)


def translate(error: BaseException, action: str) -> StoreError:
    """Return the error to raise for what the driver raised while *action* was done."""
    error = _driver_error(error)
    if isinstance(error, StoreError):
        return error
    code = _code(error)
    what = f"{action}: {_detail(error)}"
    if code in _MISSING or _is_missing_in_sqlite(error):
        return SchemaOutdated(f"The tables of the record are missing or old ({what}). {_MIGRATE}")
    if code in _FORBIDDEN or isinstance(error, PermissionError):
        return NotPermitted(f"The database user may not do this ({what}). Grant it the rights it needs.")
    if code in _READ_ONLY:
        return DatabaseFull(f"The database can only be read ({what}). Make it writable, or name the server that is.")
    if code in _FULL or getattr(error, "sqlite_errorcode", None) in _DISK:
        return DatabaseFull(f"The database cannot write ({what}). Free space on its disk.")
    if code in _CONFLICTS:
        return DatabaseUnavailable(f"The database is busy ({what}). Try again.")
    if code in _NO_DATABASE:
        return StoreError(f"The file is no SQLite database, or damaged ({what}). Restore it from a backup.")
    if isinstance(code, str):
        if code.startswith(_AWAY_CLASSES):
            return DatabaseUnavailable(f"The database does not serve this ({what}). Try again when it does.")
        return StoreError(f"The database refused ({what}).")
    if code == 14:
        return DatabaseUnavailable(
            f"The database file cannot be opened ({what}). Can this user write to its directory?"
        )
    if code in _AWAY or code is None and _looks_away(error):
        return _unreachable(what)
    return StoreError(f"The database refused ({what}).")


def _unreachable(what: str) -> StoreError:
    if _NO_SUCH_DATABASE.search(what):
        return InvalidDatabaseURL(f"The server has no such database ({what}). Create it, or correct the URL.")
    if _REFUSED.search(what):
        return NotPermitted(f"The database refused the connection ({what}). Check user, password and rights.")
    return DatabaseUnavailable(f"The database does not answer ({what}). Try again when it is back.")


def _driver_error(error: BaseException) -> BaseException:
    """Return what the driver raised: ours are raised from it, and peewee's carry it."""
    while True:
        inner = error.__cause__ if isinstance(error, StoreError) else None
        if type(error).__module__ == "peewee":
            inner = getattr(error, "orig", None)
        if not isinstance(inner, BaseException):
            return error
        error = inner


def _code(error: BaseException) -> str | int | None:
    """Return the SQLSTATE of PostgreSQL, or the primary result code of SQLite."""
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str):
        return state
    number = getattr(error, "sqlite_errorcode", None)
    return number & 0xFF if isinstance(number, int) else None


def _detail(error: BaseException) -> str:
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    text = " ".join(str(primary or error or type(error).__name__).split())
    # NOTE: An "@" in a host's name is the rest of a password that was not encoded.
    text = re.sub(r"""(["'])[^"'\s]*@[^"'\s]*\1""", '"***"', redact_text(text))
    return text[:500].rstrip(".") or type(error).__name__


def _is_missing_in_sqlite(error: BaseException) -> bool:
    text = str(error)
    return getattr(error, "sqlite_errorcode", None) == 1 and (
        "no such table" in text or "no such column" in text or "has no column" in text
    )


def _looks_away(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"OperationalError", "InterfaceError", "OSError"})
