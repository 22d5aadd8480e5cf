"""Driver errors, translated once: what happened and what to do, in a sentence, never with a password."""

from __future__ import annotations

from ..errors import DatabaseFull, DatabaseUnavailable, DriverMissing, NotPermitted, SchemaOutdated, StoreError

__all__ = ["is_conflict", "translate"]

_MIGRATE = "Run `dramatiq-durable migrate` with the same database URL."

#: SQLSTATE classes and codes (PostgreSQL manual, appendix A).
_CONFLICTS = {"40001", "40P01", "55P03"}
_AWAY = ("08", "57", "53")
_MISSING = {"42P01", "42703", "3F000"}
_FORBIDDEN = {"42501", "28000", "28P01"}
_FULL = {"53100", "25006"}


def _sqlstate(error: BaseException) -> str | None:
    for cause in _chain(error):
        state = getattr(cause, "sqlstate", None)
        if isinstance(state, str):
            return state
    return None


def _chain(error: BaseException) -> list[BaseException]:
    """Return *error* and what it was raised from; peewee wraps the driver's errors."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def is_conflict(error: BaseException) -> bool:
    """Return whether the statement was undone because of others and may simply be tried again."""
    state = _sqlstate(error)
    text = str(error).lower()
    return state in _CONFLICTS or "database is locked" in text or "database table is locked" in text


def translate(error: BaseException, action: str) -> StoreError:
    """Return the error to raise for what the driver raised while *action* was done."""
    state = _sqlstate(error) or ""
    detail = " ".join(str(error).split())[:500]
    text = detail.lower()
    if state in _MISSING or "no such table" in text or "no such column" in text or "has no column" in text:
        return SchemaOutdated(f"The tables of the record are missing or old ({action}: {detail}). {_MIGRATE}")
    if state in _FORBIDDEN or "permission denied" in text or "not authorized" in text:
        return NotPermitted(f"The database user may not do this ({action}: {detail}). Grant it the rights it needs.")
    if state in _FULL or "disk is full" in text or "readonly" in text or "disk i/o error" in text:
        return DatabaseFull(f"The database cannot write ({action}: {detail}). Free space or make it writable.")
    if "unable to open database file" in text:
        return DatabaseUnavailable(
            f"The database file cannot be opened ({action}: {detail}). Its directory must be there and be writable."
        )
    if is_conflict(error):
        return DatabaseUnavailable(f"The database is busy ({action}: {detail}). Try again.")
    if isinstance(error, ImportError) or "driver" in text and "not installed" in text:
        return DriverMissing(f"The driver for this database is not installed ({detail}).")
    if state[:2] in _AWAY or not state and _looks_away(error, text):
        return DatabaseUnavailable(f"The database does not answer ({action}: {detail}). Try again when it is back.")
    return StoreError(f"The database refused ({action}: {detail}).")


def _looks_away(error: BaseException, text: str) -> bool:
    names = {kind.__name__ for cause in _chain(error) for kind in type(cause).__mro__}
    return bool(names & {"OperationalError", "InterfaceError", "MaxConnectionsExceeded", "OSError"})
