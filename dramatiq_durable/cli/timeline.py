"""What happened to one job, and why it stands where it stands, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..redact import clip, redact_text, redact_value
from .render import count, short, span

if TYPE_CHECKING:
    from ..store.reading import JobRow, WorkerRow
    from ..store.types import Attempt

__all__ = ["as_json", "attempt_as_json", "decode", "events", "shown_input", "why"]

#: A worker that has been silent for this long (milliseconds) is not counted on.
SILENT = 60_000

#: How much of a job's input is shown to people (bytes); ``--json`` shows all.
SHOWN_INPUT = 4_096

#: A longer call gets a line for each of its arguments.
CALL_WIDTH = 78

#: What a reason that is kept on a row means.
REASONS = {
    "again": "it asked to run again later",
    "error": "its last attempt raised an error and it has no more",
    "expired": "another middleware failed it before it started, as AgeLimit does with old messages",
    "failed": "another middleware failed it",
    "follow_up_refused": "a job that it sent on could not be recorded",
    "interrupted_too_often": "workers were stopped too often while it ran",
    "lease_expired": "the worker that had fetched it went silent",
    "no_outcome": "how it ended could not be determined",
    "no_row": "its message came back after its row was gone; it is never run by itself",
    "not_adopted": "a process without dramatiq-durable sent it, and the setting adopt is off",
    "not_storable": "its outcome could not be stored",
    "orphaned": "the worker that had fetched it lost it",
    "retry": "its last attempt raised an error",
    "shutdown": "its worker was stopped while it ran; that costs no attempt",
    "skipped": "another middleware skipped it",
    "unknown_actor": "no worker that fetched it knows its actor; it goes on as soon as one does",
    "worker_lost": "workers died while it ran",
    "worker_stopped": "the worker that had fetched it was stopped",
}


#: How an attempt ended.
ENDINGS = {
    "failed": "failed",
    "retry": "failed, and is tried again",
    "interrupted": "was interrupted by a stopping worker",
    "lost": "was lost with its worker",
}


def as_json(row: JobRow) -> dict[str, Any]:
    """A row for programs: its columns, and the phase of an active job."""
    fields = row._asdict()
    if fields["reason"] is not None:
        fields["reason"] = redact_text(fields["reason"])
    fields["phase"] = None if row.state != "active" else "started" if row.started_at is not None else "claimed"
    return fields


def attempt_as_json(attempt: Attempt) -> dict[str, Any]:
    """An attempt for programs; redacted once more, as rules may have grown since it was stored."""
    fields = attempt._asdict()
    for name in ("error_message", "traceback"):
        if fields[name] is not None:
            fields[name] = redact_text(fields[name])
    return fields


def why(row: JobRow, workers: Sequence[WorkerRow], now: int) -> str:
    """Why the job is not finished, or how it finished."""
    reason = redact_text(REASONS.get(row.reason or "", row.reason or ""))
    match row.state:
        case "scheduled":
            return _due("It is due", row.publish_at, now) + (f" ({reason})." if reason else ".")
        case "queued":
            return _why_queued(row, workers, now)
        case "active":
            return _why_active(row, now)
        case "parked" | "denied" | "in_doubt":
            return f"It is held: {reason or 'no reason was kept'}."
        case "failed":
            return f"It will not be tried again by itself{f': {reason}' if reason else ''}."
        case "cancelled":
            return f"It shall not run{f': {reason}' if reason else ''}."
        case _:
            return "Its outcome is committed."


def _due(sentence: str, at: int | None, now: int) -> str:
    if at is None:
        return sentence
    return f"{sentence} in {span(at - now)}" if at > now else f"{sentence} since {span(now - at)}"


def _why_queued(row: JobRow, workers: Sequence[WorkerRow], now: int) -> str:
    if row.publish_at is not None:
        return "It is about to be handed to the broker; a running worker does that."
    since = f"for {span(now - row.published_at)}" if row.published_at is not None else "for a while"
    listening = [w for w in workers if w.seen_ago <= SILENT and row.queue in w.queues.split(",")]
    listeners = count(len(listening), "worker process is", "worker processes are")
    if not listening:
        return f"Its message has been in the broker {since}, and no worker of queue {row.queue!r} was seen lately."
    return f"Its message has been in the broker {since} and waits its turn; {listeners} there."


def _why_active(row: JobRow, now: int) -> str:
    doing = "has started it" if row.started_at is not None else "has fetched it and not started it yet"
    if row.lease_until is not None and row.lease_until < now:
        return (
            f"Worker {short(row.owner)} {doing}, and its lease ran out {span(now - row.lease_until)} ago: "
            "the worker renews it, or the reconciler takes the job away from it."
        )
    return f"Worker {short(row.owner)} {doing}; its lease runs for another {span((row.lease_until or now) - now)}."


def events(row: JobRow, attempts: Sequence[Attempt], seen: Mapping[str, WorkerRow]) -> list[dict[str, Any]]:
    """What happened, in order; of publications and claims only the last is kept."""
    found: list[tuple[int | None, str]] = [(row.created_at, _created(row))]
    for attempt in attempts:
        found.append((attempt.started_at, f"Attempt {attempt.attempt} started on {_worker(attempt.owner, seen)}."))
        error = f": {attempt.error_type}: {_first_line(attempt.error_message)}" if attempt.error_type else ""
        found.append(
            (attempt.ended_at, f"Attempt {attempt.attempt} {ENDINGS.get(attempt.ended, attempt.ended)}{error}.")
        )
    times = f", for the {_ordinal(row.publishes)} time" if row.publishes > 1 else ""
    found.append((row.published_at, f"Handed to the broker{times}."))
    told = {attempt.claim for attempt in attempts}
    if row.claim not in told:
        found.append((row.claimed_at, f"Claimed by {_worker(row.owner, seen)}." if row.owner else "Claimed."))
        found.append((row.started_at, f"Attempt {row.attempt} started."))
    # A stable sort: what happened in the same millisecond stays in the order above.
    past = sorted(((at, what) for at, what in found if at is not None), key=lambda event: event[0])
    if row.finished_at is not None:
        # Last: the statement that writes it may read the clock a moment before the one that keeps the attempt.
        past.append((max(row.finished_at, past[-1][0]), f"Finished: {row.state}."))
    if row.publish_at is not None:
        past.append((row.publish_at, "Due."))
    return [{"at": at, "what": what} for at, what in past]


def _created(row: JobRow) -> str:
    match row.origin:
        case "child":
            return f"Sent by job {row.parent_id}."
        case "follow_up":
            return f"Sent on by job {row.parent_id}."
        case "adopted":
            return "Adopted: sent by a process without dramatiq-durable."
        case _:
            return "Sent."


def _worker(owner: str | None, seen: Mapping[str, WorkerRow]) -> str:
    worker = seen.get(owner or "")
    return f"worker {short(owner)}" + (f" ({worker.host}, process {worker.pid})" if worker is not None else "")


def _first_line(text: str | None) -> str:
    lines = redact_text(text or "").strip().splitlines()
    return lines[0] if lines else ""


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def decode(payload: bytes) -> dict[str, Any]:
    """The input of a job with its secrets hidden, if it is JSON.

    Nothing else is decoded: a pickle that is unpickled can run anything.
    """
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError):
        return {"encoding": "other", "bytes": len(payload)}
    return {"encoding": "json", "bytes": len(payload), "message": redact_value(message)}


def shown_input(actor: str, found: dict[str, Any] | None) -> str:
    """The input for people: as a call, and the options that were given with it."""
    if found is None:
        return "It is gone."
    message = found.get("message")
    if not isinstance(message, dict):
        return f"{count(found['bytes'], 'byte')} that are no JSON message, not shown."
    values = [_shown(value) for value in message.get("args") or ()]
    values += [f"{name}={_shown(value)}" for name, value in (message.get("kwargs") or {}).items()]
    call = f"{actor}({', '.join(values)})"
    if len(call) > CALL_WIDTH:
        call = f"{actor}(\n" + "".join(f"    {value},\n" for value in values) + ")"
    if message.get("options"):
        call += f"\noptions: {_shown(message['options'])}"
    return clip(call, SHOWN_INPUT)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
