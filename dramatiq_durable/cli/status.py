"""``dramatiq-durable status``."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from ..states import HELD, JobState
from ..store import reading
from .common import AsJson, DatabaseUrl, record
from .render import STYLES, count, emit, say, short, span, table, title

__all__ = ["status"]

#: Workers tell every few seconds that they are there; one that was silent for this long (milliseconds) is not shown.
SEEN_WITHIN = 60_000


def status(database_url: DatabaseUrl = None, as_json: AsJson = False) -> None:
    """How many jobs there are in each state, what waits longest, who works, and the last reconciliation."""
    with record(database_url) as db:
        now = reading.now(db)
        counts = {str(state): count for state, count in reading.counts(db).items()}
        queues = [
            {"queue": queue, "queued": queued, "oldest_age": oldest}
            for queue, queued, oldest in reading.oldest_waiting(db)
        ]
        workers = [worker._asdict() for worker in reading.workers(db, SEEN_WITHIN)]
        passes = {name: last._asdict() for name in ("reconcile", "reaper") if (last := reading.last_pass(db, name))}
        undecodable = reading.undecodable(db)
        where = db.safe_url
    found = {
        "database": where,
        "now": now,
        "jobs": {state.value: counts.get(state.value, 0) for state in JobState},
        "held": sum(counts.get(state.value, 0) for state in HELD),
        "undecodable": undecodable,
        "queues": queues,
        "workers": workers,
        "reconciliation": passes.get("reconcile"),
        "lost_leases": passes.get("reaper"),
    }
    if as_json:
        emit(found)
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    say(f"The record at {found['database']}", style="dim")
    title("Jobs")
    table(
        [("STATE", {"no_wrap": True}), ("JOBS", {"justify": "right"})],
        [
            (Text(state, STYLES[state] if count else "dim"), Text(f"{count:,}", "" if count else "dim"))
            for state, count in found["jobs"].items()
        ],
    )
    for state in (state.value for state in JobState if state in HELD and found["jobs"][state]):
        say(
            f"{count(found['jobs'][state], 'job')} {state}: see `dramatiq-durable jobs list --state {state}`.", "yellow"
        )
    if found["undecodable"]:
        say(
            f"{count(found['undecodable'], 'message')} could not be decoded; the table durable_undecodable keeps them.",
            "yellow",
        )
    title("Waiting in queues")
    if found["queues"]:
        table(
            [("QUEUE", {"overflow": "fold"}), ("QUEUED", {"justify": "right"}), ("OLDEST", {"justify": "right"})],
            [(row["queue"], f"{row['queued']:,}", span(row["oldest_age"])) for row in found["queues"]],
        )
    else:
        say("Nothing waits.")
    _show_workers(found)
    _show_reconciliation(found)


def _show_workers(found: dict[str, Any]) -> None:
    title("Workers")
    if found["workers"]:
        table(
            [(name, {"overflow": "fold"}) for name in ("WORKER", "HOST", "PID", "THREADS", "SEEN", "QUEUES")],
            [
                (
                    short(w["owner"]),
                    w["host"],
                    str(w["pid"]),
                    str(w["threads"]),
                    span(w["seen_ago"]) + " ago",
                    w["queues"],
                )
                for w in found["workers"]
            ],
        )
    else:
        say("No worker process has been seen for a minute.", "yellow" if found["queues"] else "")


def _show_reconciliation(found: dict[str, Any]) -> None:
    title("Reconciliation")
    if (last := found["reconciliation"]) is None:
        say("None yet: workers do it when they start.")
    else:
        say(
            f"{span(last['finished_ago'])} ago: {count(last['looked'], 'waiting job')} compared with the broker, "
            f"{last['put_back']:,} put back ({last['put_back_total']:,} in all)."
        )
    if (last := found["lost_leases"]) is not None:
        say(
            f"Of lost workers, {count(last['requeued_total'], 'job')} started again and {last['failed_total']:,} "
            f"failed; the last {span(last['finished_ago'])} ago."
        )
