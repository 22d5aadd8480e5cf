"""How commands speak: tables and sentences for people, one JSON object for programs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = [
    "STYLES",
    "Column",
    "age",
    "console",
    "count",
    "emit",
    "moment",
    "plain",
    "say",
    "short",
    "span",
    "table",
    "title",
]

#: How wide lines may be where nobody looks: wide enough that nothing is cut that a program may search for.
UNSEEN_WIDTH = 200

#: How each state of a job looks.
STYLES = {
    "scheduled": "cyan",
    "queued": "cyan",
    "active": "blue",
    "in_doubt": "bold yellow",
    "denied": "bold yellow",
    "parked": "bold yellow",
    "completed": "green",
    "failed": "red",
    "cancelled": "dim",
}

# Everything that could move the cursor or change colours, but not the ends of lines and tabs.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

Column = tuple[str, dict[str, Any]]


def console(*, stderr: bool = False) -> Console:
    """A console that shows text as it is: no markup, no emoji, no guessed colours."""
    stream = sys.stderr if stderr else sys.stdout
    unseen = not stream.isatty() and "COLUMNS" not in os.environ
    return Console(
        file=stream, markup=False, emoji=False, highlight=False, soft_wrap=False, width=UNSEEN_WIDTH if unseen else None
    )


def emit(data: dict[str, Any]) -> None:
    """Print *data* as one JSON object."""
    print(json.dumps(data, indent=2, default=str))


def say(text: str = "", style: str = "") -> None:
    """Print a sentence."""
    console().print(Text(plain(text), style=style))


def title(text: str) -> None:
    """Print the title of what follows, with an empty line before it."""
    console().print(Text("\n" + plain(text), style="bold"))


def table(columns: Sequence[Column], rows: Iterable[Sequence[str | Text]], *, header: bool = True) -> None:
    """Print a table that fits the terminal.

    Parameters:
      columns(Sequence): Headers, each with rich's options for its column.
      rows(Iterable): Cells, as text.
      header(bool): Whether the headers are shown.
    """
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=header)
    for name, options in columns:
        grid.add_column(name, **options)
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in row))
    console().print(grid)


def span(milliseconds: int) -> str:
    """A duration, as one would say it: ``45 s``, ``3 min``, ``5 h``, ``12 days``."""
    seconds = max(0, milliseconds) / 1000
    for unit, size, limit in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < limit * size:
            return f"{int(seconds / size)} {unit}"
    return f"{int(seconds / 86400)} days"


def age(since: int | None, now: int) -> str:
    """How long ago a time was, or how far ahead it is; by the database's clock."""
    if since is None:
        return ""
    return f"in {span(since - now)}" if since > now + 999 else span(now - since)


def moment(milliseconds: int) -> str:
    """A time where this terminal stands, to the second: ``2026-11-03 14:05:09+01:00``."""
    return datetime.fromtimestamp(milliseconds / 1000).astimezone().isoformat(sep=" ", timespec="seconds")


def count(number: int, one: str, many: str = "") -> str:
    """A number with its noun: ``1 job``, ``1,200 jobs``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def short(owner: str | None) -> str:
    """Enough of a worker's id to tell it from others."""
    return (owner or "")[:8]


def plain(text: str) -> str:
    """Text that does nothing to a terminal but appear on it."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
