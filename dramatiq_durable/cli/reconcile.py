"""``dramatiq-durable reconcile``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from dramatiq.cli import import_broker
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import DurableError
from ..redact import describe, safe_url
from ..runtime.sweeper import Sweeper
from ..settings import PREFIX
from ..store import migrate, reading
from .common import AsJson, DatabaseUrl, Refusal
from .render import console, count, emit, plain, say

if TYPE_CHECKING:
    from ..equip import Durable

__all__ = ["reconcile"]


def reconcile(
    app: Annotated[
        str, typer.Argument(metavar="APP", help="The app, as for the dramatiq command: module or module:broker.")
    ],
    path: Annotated[
        list[str] | None, typer.Option("--path", "-p", help="Where to look for the app, before everything else.")
    ] = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Compare the waiting jobs with the broker now, and put back those that it lost.  Workers do the same at intervals.

    Running workers publish what is put back.
    """
    handle = _load(app, path or [], database_url)
    migrate.require_current(handle.db)
    sweeper = Sweeper(handle.engine, interval=handle.engine.options.reconcile_interval)
    with _progress(reading.counts(handle.db).get("queued", 0), shown=not as_json) as step:
        found = sweeper.look_once(step)
    handle.db.close_all()
    if found is None:
        raise Refusal("Nothing was compared: the broker did not answer.")
    if as_json:
        emit({"looked": found.looked, "put_back": found.put_back, "database": handle.db.safe_url})
        return
    say(f"{count(found.looked, 'waiting job')} compared with the broker, {found.put_back:,} put back.")
    if found.put_back:
        say("Running workers begin to publish them within a second.")


def _load(app: str, path: list[str], database_url: str | None) -> Durable:
    """Import the app, which equips its broker."""
    if database_url is not None:
        os.environ[f"{PREFIX}DATABASE_URL"] = database_url
    sys.path[:0] = [*path, os.getcwd()]
    try:
        # What an app prints while it is imported is no answer of ours.
        with contextlib.redirect_stdout(sys.stderr):
            _, broker = import_broker(app)
    except DurableError:
        raise
    except ImportError as e:
        raise Refusal(f"The app {app!r} could not be imported: {str(e).rstrip('.')}.") from None
    except Exception as e:
        print(plain(describe(e)[2]), file=sys.stderr, end="")
        raise Refusal(f"The app {app!r} could not be imported.") from None
    handle: Durable | None = broker.__dict__.get("durable")
    if handle is None:
        raise Refusal(f"The broker of {app!r} is not equipped: call dramatiq_durable.install(broker) in the app.")
    if database_url is not None and handle.db.safe_url != safe_url(database_url):
        raise Refusal(f"The app {app!r} names its own database, {handle.db.safe_url}; leave --database-url out.")
    return handle


@contextlib.contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("Comparing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = not (shown and sys.stderr.isatty())
    with Progress(*columns, console=console(stderr=True), transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.update(task, completed=done, total=max(total, done))
