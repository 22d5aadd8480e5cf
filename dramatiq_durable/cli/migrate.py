"""``dramatiq-durable migrate``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..store import migrate as migrations
from ..store.database import Database
from .common import AsJson, DatabaseUrl, Refusal, record
from .render import emit, say

__all__ = ["migrate"]


def migrate(
    check: Annotated[bool, typer.Option("--check", help="Only say what is pending; exit 1 if anything is.")] = False,
    sql: Annotated[bool, typer.Option("--sql", help="Only print the SQL of what is pending.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    down: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="Undo migrations, from the last one back to this one. What their tables hold is lost.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --down: do not ask.")] = False,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Create the tables of the record, or bring them up to date."""
    if check + sql + (dry_run or down is not None) > 1:
        raise Refusal("Ask for one thing at a time: --check, --sql, or --dry-run and --down.")
    looks = check or sql or dry_run
    with record(database_url, current=False, absent="pretend" if looks else "create") as db:
        if down is not None:
            _go_down(db, down, dry_run=dry_run, yes=yes, as_json=as_json)
        elif sql:
            text = migrations.sql(db)
            emit({"sql": text}) if as_json else print(text, end="")
        elif looks:
            pending = migrations.check(db)
            _tell(as_json, "pending", pending, "Pending: {}.", "The tables are up to date.")
            raise typer.Exit(1 if check and pending else 0)
        else:
            _tell(as_json, "applied", migrations.upgrade(db), "Applied {}.", "The tables were up to date.")


def _go_down(db: Database, target: str, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    applied = migrations.applied(db)
    if target not in applied:
        raise Refusal(f"{target} is not applied. Applied are: {', '.join(applied) or 'none'}.")
    names = sorted((name for name in applied if name >= target), reverse=True)
    if dry_run:
        _tell(as_json, "would_undo", names, "Would undo {}. What their tables hold would be lost.", "")
        return
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise Refusal(f"This undoes {', '.join(names)}; what their tables hold is lost. Say so with --yes.")
        typer.confirm(
            f"Undo {', '.join(names)} at {db.safe_url}? What their tables hold is lost.", abort=True, err=True
        )
    _tell(as_json, "undone", migrations.downgrade(db, target), "Undid {}.", "Nothing was undone.")


def _tell(as_json: bool, key: str, names: list[str], some: str, none: str) -> None:
    if as_json:
        emit({key: names})
    else:
        say(some.format(", ".join(names)) if names else none)
