"""What all commands share: their options, and the record that they look into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

import typer

from ..errors import DurableError
from ..settings import PREFIX, Settings
from ..store import migrate
from ..store.database import Database, connect

__all__ = ["AsJson", "DatabaseUrl", "Refusal", "record"]

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        metavar="URL",
        help=f"The database of the record. By default {PREFIX}DATABASE_URL, from the environment or from .env.",
        show_default=False,
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


class Refusal(DurableError):
    """A command cannot do what was asked; its text says why, for people."""

    def __str__(self) -> str:
        # A code to search for would lead nowhere.
        return str(self.args[0])


@contextmanager
def record(
    url: str | None, *, current: bool = True, absent: Literal["refuse", "pretend", "create"] = "refuse"
) -> Iterator[Database]:
    """The database of the record, closed afterwards.

    Parameters:
      url(str): What ``--database-url`` says.
      current(bool): Refuse unless its tables fit this release.
      absent(str): What to do about a SQLite file that is not there: refuse, look at an empty one elsewhere, or create
        it.
    """
    settings = Settings() if url is None else Settings(database_url=url)
    with ExitStack() as stack:
        place = settings.database_url
        path = _sqlite_file(place)
        if path is not None and not path.exists() and absent != "create":
            if absent == "refuse":
                raise Refusal(
                    f"There is no database at {path.absolute()}. Name the right one with --database-url or "
                    f"{PREFIX}DATABASE_URL, or create it with `dramatiq-durable migrate`."
                )
            place = f"sqlite:///{stack.enter_context(TemporaryDirectory(prefix='dramatiq-durable-'))}/empty"
        db = connect(place, pool_size=settings.pool_size)
        stack.callback(db.close_all)
        if current:
            migrate.require_current(db)
        yield db


def _sqlite_file(url: str) -> Path | None:
    """Where the file of a SQLite database is.  SQLite would create it, and answer from nothing."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    if parts.scheme != "sqlite" or parts.netloc or parts.path[1:] in ("", ":memory:"):
        return None
    return Path(unquote(parts.path[1:]))
