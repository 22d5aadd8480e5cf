"""The commands, put together; and the one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .. import __version__
from ..errors import DurableError
from ..redact import describe, redact_text
from . import demo, jobs, migrate, reconcile, status
from .render import plain

__all__ = ["app", "run"]

app = typer.Typer(
    name="dramatiq-durable",
    help="Durable jobs for Dramatiq: the database is the record of every job, the queue only runs the work.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("migrate")(migrate.migrate)
app.command("status")(status.status)
app.add_typer(jobs.app, name="jobs")
app.command("reconcile")(reconcile.reconcile)


def _version(asked: bool) -> None:
    if asked:
        print(f"dramatiq-durable {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def run() -> int:
    """Run the command that the arguments ask for.

    Returns:
      int: The exit code.
    """
    try:
        app(prog_name="dramatiq-durable")
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except DurableError as e:
        print(plain(redact_text(str(e).strip())), file=sys.stderr)
    except Exception as e:
        # A bug: whoever reports it needs the traceback, and nobody needs what is secret in it.
        print(plain(describe(e)[2]), file=sys.stderr, end="")
        print("This is a bug in dramatiq-durable; please report it.", file=sys.stderr)
    return 2
