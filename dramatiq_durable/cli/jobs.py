"""``dramatiq-durable jobs``: find a job, and see where it stands and why."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

import typer
from rich.text import Text

from ..errors import JobNotFound
from ..states import JobState
from ..store import jobs as store_jobs
from ..store import reading
from . import timeline
from .common import AsJson, DatabaseUrl, Refusal, record
from .render import STYLES, Column, age, console, count, emit, moment, say, short, table, title

__all__ = ["app"]

#: Workers that are long gone tell where an attempt ran (milliseconds; a year).
ALL_TIME = 365 * 86_400_000

app = typer.Typer(no_args_is_help=True, help="Find a job, and see where it stands and why.")


@app.command("list")
def list_(
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.", show_default=False)] = None,
    queue: Annotated[str | None, typer.Option(help="Only jobs of this queue.", show_default=False)] = None,
    actor: Annotated[str | None, typer.Option(help="Only jobs of this actor.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="How many to show.")] = 50,
    after: Annotated[
        str | None, typer.Option(metavar="ID", help="Go on after this job, the last one shown.", show_default=False)
    ] = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """List jobs."""
    if state is not None:
        _check_state(state)
    with record(database_url) as db:
        now = reading.now(db)
        if after is not None and reading.get_job(db, after) is None:
            raise JobNotFound(f"There is no job {after!r} in the record at {db.safe_url}.")
        rows = reading.list_jobs(db, state=state, queue=queue, actor=actor, limit=limit + 1, after=after)
    more, rows = len(rows) > limit, rows[:limit]
    if as_json:
        emit({"jobs": [timeline.as_json(row) for row in rows], "next": rows[-1].id if more else None, "now": now})
    else:
        _show_list(rows, now, more=more)


def _show_list(rows: list[reading.JobRow], now: int, *, more: bool) -> None:
    if not rows:
        say("No job matches.")
        return
    wide = console().width >= 110
    columns: list[Column] = [
        ("ID", {"min_width": min(36, max(len(row.id) for row in rows)), "no_wrap": True, "overflow": "fold"}),
        ("STATE", {"no_wrap": True, "min_width": 9}),
        ("ACTOR", {"overflow": "ellipsis"}),
        *([("QUEUE", {"overflow": "ellipsis"})] if wide else []),
        ("TRIES", {"justify": "right", "no_wrap": True, "min_width": 5}),
        ("AGE", {"justify": "right", "no_wrap": True, "min_width": 7}),
    ]
    table(
        columns,
        [
            (
                row.id,
                Text(row.state, STYLES.get(row.state, "")),
                row.actor,
                *((row.queue,) if wide else ()),
                str(row.attempt),
                age(row.created_at, now),
            )
            for row in rows
        ],
    )
    if more:
        say(f"There are more: --after {rows[-1].id}", "dim")


def _check_state(state: str) -> None:
    states = [each.value for each in JobState]
    if state not in states:
        close = difflib.get_close_matches(state, states, n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise Refusal(f"There is no state {state!r}.{meant} The states are: {', '.join(states)}.")


@app.command("show")
def show(
    job_id: Annotated[str, typer.Argument(metavar="ID", help="The id of the job: its message id.", show_default=False)],
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show one job: where it stands and why, what happened to it, and its input with secrets hidden."""
    with record(database_url) as db:
        now = reading.now(db)
        row = reading.get_job(db, job_id)
        if row is None:
            raise JobNotFound(f"There is no job {job_id!r} in the record at {db.safe_url}.")
        attempts = reading.attempts(db, job_id)
        stored = store_jobs.load(db, [job_id]).get(job_id)
        workers = reading.workers(db, ALL_TIME)
    seen = {worker.owner: worker for worker in workers}
    found = {
        "job": timeline.as_json(row),
        "why": timeline.why(row, workers, now),
        "timeline": timeline.events(row, attempts, seen),
        "attempts": [timeline.attempt_as_json(attempt) for attempt in attempts],
        "input": timeline.decode(stored.payload) if stored is not None else None,
        "now": now,
    }
    if as_json:
        emit(found)
    else:
        _show(row, found, now)


def _show(row: reading.JobRow, found: dict[str, Any], now: int) -> None:
    say(row.id, "bold")
    console().print(Text.assemble((row.state, STYLES.get(row.state, "")), f"  {found['why']}"))
    title("Job")
    facts = [
        ("actor", row.actor),
        ("queue", row.queue),
        ("agent", row.agent if row.agent != row.actor else ""),
        ("origin", row.origin + (f", by job {row.parent_id}" if row.parent_id else "")),
        ("worker", short(row.owner)),
        ("attempts", _counters(row)),
    ]
    table([("", {"style": "dim"}), ("", {"overflow": "fold"})], [fact for fact in facts if fact[1]], header=False)
    title("Timeline")
    table(
        [("WHEN", {"no_wrap": True}), ("AGO", {"justify": "right", "no_wrap": True}), ("WHAT", {"overflow": "fold"})],
        [(moment(event["at"]), age(event["at"], now), event["what"]) for event in found["timeline"]],
    )
    last = found["attempts"][-1] if found["attempts"] else None
    if last is not None and last["traceback"]:
        title(f"Traceback of attempt {last['attempt']}")
        say(last["traceback"].rstrip())
    title("Input, secrets hidden")
    say(timeline.shown_input(row.actor, found["input"]))


def _counters(row: reading.JobRow) -> str:
    counted = [
        (row.retries, "retried"),
        (row.lost, "lost with their worker"),
        (row.interruptions, "interrupted"),
        (row.lost_claims, "lost before the start"),
    ]
    attempts = ", ".join([f"{row.attempt} started", *(f"{number} {what}" for number, what in counted if number)])
    return attempts + (f"; put back into the queue {count(row.put_back, 'time')}" if row.put_back else "")
